"""The loss of quality by --quantization.

Runs benchmarks/payload_text.txt through the model in transformers, once unchanged (in fp32) and
once per mode with its attention projections, MLPs, routed experts and LM head computed by the
kernels that serve them, and compares the next token's distributions at all positions: mean and
largest KL divergence, how often the most likely token is the same, and the perplexity of the text.
For a scale, the same for the whole model in bf16, and with the same matrices and their inputs
rounded as llama.cpp's Q4_0 does (by the gguf package; its embeddings and LM head, which llama.cpp
rounds too, stay as they are). `kv-fp8` is the model in fp32 with its keys and values rounded as
`--kv-cache-dtype fp8` keeps them. Run as `topspin bench quantization`.

In int8, int4 and mxfp4 the LM head has 8 bits, in int4-head 4 like all else.

A GPU's formats (gpu-fp8, gpu-int8, gpu-int4, gpu-mxfp4) need no GPU: torch multiplies, in fp32, by
the unpacked matrices, and for fp8 the experts' rows are rounded as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from benchmarks.experiment import Experiment, Result, TextTable, say, table
from benchmarks.quality.transformers_names import CACHE
from kernels import reference
from kernels.contracts import Biases, LinearWeight, PackedExperts
from kernels.cpu import ops as cpu
from kernels.dispatch import select_ops
from kernels.triton.grouped_mlp.weights import FP8_MAX, GROUP, pack_weight, unpack_weight
from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import (
    UNQUANTISED,
    Format,
    Part,
    PrecisionRule,
    Rules,
    format_of,
    formats,
    rules_of,
)

TEXT = Path(__file__).parents[1] / "payload_text.txt"
GPU_MODES: dict[str, Format] = {
    "gpu-fp8": "fp8",
    "gpu-int8": "int8",
    "gpu-int4": "int4",
    "gpu-mxfp4": "mxfp4",
}
CPU_MODES: dict[str, Rules] = {
    "int8": rules_of("int8"),
    "int4": rules_of("int4"),
    "mxfp4": rules_of("mxfp4"),
    "int4-head": (*rules_of("int4"), PrecisionRule(format="int4", part="lm_head")),
}
KV_MODE = "kv-fp8"
MODES = ("bf16", KV_MODE, *CPU_MODES, *GPU_MODES, "q4_0")


def rounded(x: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Return x [R, I] rounded to gguf's format `kind`, in fp32."""
    return torch.from_numpy(quants.dequantize(quants.quantize(x.float().numpy(), kind), kind))


def in_fp8(x: Tensor) -> Tensor:
    """Return x [R, I] rounded as for a GPU's fp8 experts: groups of 128 scaled by their maximum."""
    padded = F.pad(x, (0, -x.shape[1] % GROUP))
    groups = padded.reshape(len(x), padded.shape[1] // GROUP, GROUP)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / FP8_MAX
    codes = (groups / scales).to(torch.float8_e4m3fn)
    rounded: Tensor = (codes.float() * scales).flatten(1)[:, : x.shape[1]]
    return rounded


Rounding = Callable[[Tensor], Tensor]
WeightRounding = Callable[[Tensor, Format], Tensor]


def unchanged(x: Tensor) -> Tensor:
    """Return x."""
    return x


@dataclass(frozen=True)
class RoundingOps:
    """torch's fp32 products of rounded matrices and rows."""

    weight: WeightRounding
    """The rounding of matrices [O, I] but for experts' gate_up."""
    gate_up: WeightRounding
    """The rounding of a gate above an up projection."""
    row: Rounding = unchanged
    """The rounding of the input rows [R, I] of projections and LM head."""
    expert_row: Rounding = unchanged

    def pack_linear(self, weight: Tensor, weight_format: Format) -> LinearWeight:
        """Round a weight [O, I]."""
        return reference.pack_linear(self.weight(weight, weight_format))

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        """Multiply the rounded x [R, I] by a weight."""
        return reference.linear(self.row(x), weight, bias)

    def pack_experts(
        self,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        *,
        formats: Sequence[Format],
        biases: Biases | None = None,
        activation: ExpertActivation = SWIGLU,
    ) -> PackedExperts:
        """Round all experts of a layer, but for their biases."""
        return reference.pack_experts(
            map(self.gate_up, gate_up, formats),
            map(self.weight, down, formats),
            biases=biases,
            activation=activation,
        )

    def grouped_mlp(
        self, hidden: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts
    ) -> tuple[Tensor, None]:
        """Sum each row's experts."""
        out = torch.zeros_like(hidden)
        inputs = self.expert_row(hidden)
        for slot in range(experts.num_experts):
            rows, choices = torch.where(slots == slot)
            if len(rows):
                biases = experts.biases_of(slot)
                gate_up = reference.linear(inputs[rows], experts.gate_up[slot], biases[0])
                units = self.expert_row(reference.units_of(gate_up, experts.activation))
                result = reference.linear(units, experts.down[slot], biases[1])
                out.index_add_(0, rows, result * weights[rows, choices, None])
        return out, None


def peer_ops() -> RoundingOps:
    """Return the products of llama.cpp's Q4_0: weights in Q4_0, their inputs in Q8_0.

    The LM head is unchanged: the gguf package cannot make the Q6_K that llama.cpp uses for it.
    """
    row = partial(rounded, kind=GGMLQuantizationType.Q8_0)

    def weight(matrix: Tensor, weight_format: Format) -> Tensor:
        is_plain = weight_format == UNQUANTISED
        return matrix if is_plain else rounded(matrix, GGMLQuantizationType.Q4_0)

    return RoundingOps(weight, weight, row=row, expert_row=row)


def gpu_ops(quantization: Format) -> RoundingOps:
    """Return the products of kernels.triton.ops with a `quantization`, but for fp32 rows."""

    def stand_in(weight: Tensor, weight_format: Format, *, halves: int = 1) -> Tensor:
        return unpack_weight(pack_weight(weight, weight_format, halves=halves))

    return RoundingOps(
        stand_in,
        partial(stand_in, halves=2),
        expert_row=in_fp8 if quantization == "fp8" else unchanged,
    )


class Fp8Cache(DynamicCache):
    """A cache whose keys and values are rounded to float8_e4m3fn, those of its own step too."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep rounded ones, and return all of the layer."""
        keys, values = (
            each.clamp(-reference.FP8_MAX, reference.FP8_MAX).to(torch.float8_e4m3fn).to(each.dtype)
            for each in (key_states, value_states)
        )
        return super().update(keys, values, layer_idx, *args, **kwargs)


def mode_ops(mode: str) -> tuple[Any, Rules]:
    """Return the products, and the weights' formats, of one of the modes that have others."""
    if mode == "q4_0":
        kept = PrecisionRule(format=UNQUANTISED, part="lm_head")
        return peer_ops(), (PrecisionRule(format="int4"), kept)
    if mode in GPU_MODES:
        return gpu_ops(GPU_MODES[mode]), rules_of(GPU_MODES[mode])
    rules = CPU_MODES[mode]
    return select_ops(cpu.name, torch.float32, formats(rules, "attention")), rules


@contextmanager
def patched(model: torch.nn.Module, ops: Any, rules: Rules) -> Iterator[int]:
    """Replace the products that --quantization covers by `ops`; yields the number of modules.

    Attention projections, dense and shared MLPs, routed experts and the LM head: every Linear
    inside a layer except routers, gates and what makes keys and values of latents, and every module
    with stacked experts.
    """
    changed: list[Any] = []
    for name, module in model.named_modules():
        target: Any = module
        if name == "lm_head":
            target.forward = _linear(module, ops, format_of(rules, "lm_head"))
            changed.append(module)
        if ".layers." not in name:
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        if type(module) is torch.nn.Linear and not name.endswith(("gate", "kv_b_proj")):
            part: Part = "attention" if ".self_attn." in name else "mlp"
            target.forward = _linear(module, ops, format_of(rules, part, layer))
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, Tensor):
            target.forward = _experts(module, ops, rules, layer)
        else:
            continue
        changed.append(module)
    try:
        yield len(changed)
    finally:
        for module in changed:
            del module.forward


def _linear(module: Any, ops: Any, weight_format: Format) -> Callable[[Tensor], Tensor]:
    packed = ops.pack_linear(module.weight, weight_format)

    def forward(x: Tensor) -> Tensor:
        result: Tensor = ops.linear(x.reshape(-1, x.shape[-1]), packed, module.bias)
        return result.view(*x.shape[:-1], -1)

    return forward


def _experts(
    module: Any, ops: Any, rules: Rules, layer: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    gate_up, down = module.gate_up_proj, module.down_proj
    form: dict[str, Any] = {}
    if hasattr(module, "gate_up_proj_bias"):  # stored as columns, gates and ups in turn
        gate_up, down = _in_halves(gate_up.mT), down.mT.contiguous()
        form["biases"] = _in_halves(module.gate_up_proj_bias), module.down_proj_bias
        form["activation"] = ExpertActivation(module.alpha, offset=1.0, limit=module.limit)
    each = [format_of(rules, "experts", layer, expert) for expert in range(len(down))]
    packed = ops.pack_experts(list(gate_up), list(down), formats=each, **form)

    def forward(hidden: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = ops.grouped_mlp(hidden, slots.int(), weights.float(), packed)[0]
        return result

    return forward


def _in_halves(rows: Tensor) -> Tensor:
    """Return [E, 2F, ...] of gates and ups in turn with all gates first."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def compare(plain: Tensor, coded: Tensor, tokens: Tensor) -> dict[str, float]:
    """Compare log-probabilities [T, V] over a text i64[T] with those of the plain model."""
    return {**divergence(plain, coded), "perplexity": perplexity(coded, tokens)}


def divergence(plain: Tensor, coded: Tensor) -> dict[str, float]:
    """Return how far log-probabilities [T, V] are from those of the plain model."""
    kl = (plain.exp() * (plain - coded)).sum(-1)
    same = (plain.argmax(-1) == coded.argmax(-1)).float().mean().item()
    return {
        "mean_kl": float(f"{kl.mean().item():.3g}"),
        "max_kl": float(f"{kl.max().item():.3g}"),
        "same_most_likely_token": round(same, 4),
    }


def perplexity(logprobs: Tensor, tokens: Tensor) -> float:
    """Return the perplexity of a text i64[T] under log-probabilities [T, V] of its successors."""
    loss = F.nll_loss(logprobs[:-1], tokens[1:])
    return round(loss.exp().item(), 4)


def measure(
    path: Path, tokens: Tensor, modes: Sequence[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield ("fp32", ...) and then every mode with its comparison; tokens are i64[1, T]."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()

    plain = _log_softmax(model, tokens)
    yield "fp32", {"perplexity": perplexity(plain, tokens[0])}
    for mode in modes:
        if mode == "bf16":
            other: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
            coded = _log_softmax(other.eval(), tokens)
        elif mode == KV_MODE:
            coded = _log_softmax(model, tokens, **{CACHE: Fp8Cache()})
        else:
            with patched(model, *mode_ops(mode)):
                coded = _log_softmax(model, tokens)
        yield mode, compare(plain, coded, tokens[0])


def _log_softmax(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    logits: Tensor = model(tokens, **options).logits[0]
    return logits.float().log_softmax(-1)


def layout(result: Result) -> Iterator[TextTable]:
    """Yield the loss per model and mode, relative to the model in fp32."""
    columns = {
        "model": "{model}",
        "weights": "{mode}",
        "mean KL": "{mean_kl}",
        "greatest KL": "{max_kl}",
        "same token": "{same_most_likely_token:.1%}",
        "perplexity": "{perplexity}",
    }
    itself = dict.fromkeys(("mean_kl", "max_kl", "same_most_likely_token"))
    yield table(columns, ({**itself, **row} for row in result["rows"]))


EXPERIMENT = Experiment("quantization", __doc__, layout)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every mode and write the result."""
    parser = EXPERIMENT.parser()
    parser.add_argument("models", nargs="*", default=[DEFAULT_MODEL], metavar="MODEL")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--text", type=Path, default=TEXT)
    args = parser.parse_args(argv)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows = []
    for model in args.models:
        path = resolve_model(model)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokens = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
        for mode, figures in measure(path, tokens, args.modes):
            rows.append({"model": Path(model).name, "mode": mode, **figures})
            say(f"{model}, {mode}")
    settings = {"text": args.text.name, "positions": tokens.shape[1]}
    return EXPERIMENT.finish(args, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
