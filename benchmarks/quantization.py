"""What does --quantization cost in quality?

Runs benchmarks/payload_text.txt through the model in transformers, once as it is (in fp32)
and once per mode with its attention projections, MLPs, routed experts and LM head computed
by the kernels that serve them, and compares the next token's distributions at all positions: mean
and largest KL divergence, how often the most likely token is the same, and the perplexity
of the text. For a scale, the same for the whole model in bf16, and with the same matrices
and their inputs rounded as llama.cpp's Q4_0 does (by the gguf package; its embeddings and
LM head, which llama.cpp rounds too, stay as they are). Run as `topspin bench quantization`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks import report
from kernels import cpu, reference
from kernels.contracts import ExpertWeights, LinearWeight
from kernels.dispatch import select_ops
from models.hub import DEFAULT_MODEL, resolve_model

TEXT = Path(__file__).with_name("payload_text.txt")
QUANTISED_MODES = ("int8", "int4")
MODES = ("bf16", *QUANTISED_MODES, "q4_0")


def rounded(x: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Return x [R, I] as gguf's format `kind` keeps it, in fp32."""
    return torch.from_numpy(quants.dequantize(quants.quantize(x.float().numpy(), kind), kind))


class PeerOps:
    """The products of llama.cpp's Q4_0: weights in Q4_0, their inputs in Q8_0."""

    def pack_projection(self, weight: Tensor) -> LinearWeight:
        """Round a weight [O, I]."""
        return reference.pack_linear(rounded(weight, GGMLQuantizationType.Q4_0))

    def pack_lm_head(self, weight: Tensor) -> LinearWeight:
        """Leave the LM head; the gguf package cannot make the Q6_K that llama.cpp has for it."""
        return reference.pack_linear(weight)

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        """Multiply the rounded x [R, I] by a weight."""
        return reference.linear(rounded(x, GGMLQuantizationType.Q8_0), weight, bias)

    def pack_experts(self, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> ExpertWeights:
        """Round all experts of a layer."""
        kind = GGMLQuantizationType.Q4_0
        return reference.pack_experts(
            [rounded(matrix, kind) for matrix in gate_up],
            [rounded(matrix, kind) for matrix in down],
        )

    def grouped_mlp(
        self, hidden: Tensor, slots: Tensor, weights: Tensor, experts: ExpertWeights
    ) -> tuple[Tensor, None]:
        """Sum each row's experts."""
        out = torch.zeros_like(hidden)
        for slot in range(experts.num_experts):
            rows, choices = torch.where(slots == slot)
            if len(rows):
                units = reference.swiglu(self.linear(hidden[rows], experts.gate_up[slot]))
                result = self.linear(units, experts.down[slot])
                out.index_add_(0, rows, result * weights[rows, choices, None])
        return out, None


@contextmanager
def patched(model: torch.nn.Module, ops: Any) -> Iterator[int]:
    """Let `ops` do the products that --quantization covers; yields how many modules.

    Attention projections, dense and shared MLPs, routed experts and the LM head: every
    Linear inside a layer but routers and gates, and every module with stacked experts.
    """
    changed: list[torch.nn.Module] = []
    for name, module in model.named_modules():
        if name == "lm_head":
            module.forward = _linear(module, ops, ops.pack_lm_head)
        elif ".layers." not in name:
            continue
        elif type(module) is torch.nn.Linear and not name.endswith("gate"):
            module.forward = _linear(module, ops, ops.pack_projection)
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, Tensor):
            module.forward = _experts(module, ops)
        else:
            continue
        changed.append(module)
    try:
        yield len(changed)
    finally:
        for module in changed:
            del module.forward


def _linear(
    module: Any, ops: Any, pack: Callable[[Tensor], LinearWeight]
) -> Callable[[Tensor], Tensor]:
    packed = pack(module.weight)

    def forward(x: Tensor) -> Tensor:
        result: Tensor = ops.linear(x.reshape(-1, x.shape[-1]), packed, module.bias)
        return result.view(*x.shape[:-1], -1)

    return forward


def _experts(module: Any, ops: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    packed = ops.pack_experts(list(module.gate_up_proj), list(module.down_proj))

    def forward(hidden: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = ops.grouped_mlp(hidden, slots.int(), weights.float(), packed)[0]
        return result

    return forward


def compare(plain: Tensor, coded: Tensor, tokens: Tensor) -> dict[str, float]:
    """Compare log-probabilities [T, V] over a text i64[T] with those of the plain model."""
    divergence = (plain.exp() * (plain - coded)).sum(-1)
    return {
        "mean_kl": float(f"{divergence.mean().item():.3g}"),
        "max_kl": float(f"{divergence.max().item():.3g}"),
        "same_most_likely_token": round(
            (plain.argmax(-1) == coded.argmax(-1)).float().mean().item(), 4
        ),
        "perplexity": perplexity(coded, tokens),
    }


def perplexity(logprobs: Tensor, tokens: Tensor) -> float:
    """Return the perplexity of a text i64[T] under log-probabilities [T, V] of its successors."""
    loss = F.nll_loss(logprobs[:-1], tokens[1:])
    return round(loss.exp().item(), 4)


def measure(
    path: Path, tokens: Tensor, modes: Sequence[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield ("fp32", ...) and then every mode with its comparison; tokens are i64[1, T]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def look() -> Tensor:
        return model(tokens).logits[0].float().log_softmax(-1)

    plain = look()
    yield "fp32", {"perplexity": perplexity(plain, tokens[0])}
    for mode in modes:
        if mode == "bf16":
            coded = _in_bf16(path, tokens)
        else:
            ops = PeerOps() if mode == "q4_0" else select_ops(cpu.name, torch.float32, mode)
            with patched(model, ops):
                coded = look()
        yield mode, compare(plain, coded, tokens[0])


def _in_bf16(path: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    return model(tokens).logits[0].float().log_softmax(-1)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every mode and write the result."""
    parser = argparse.ArgumentParser(prog="topspin bench quantization", description=__doc__)
    parser.add_argument("models", nargs="*", default=[DEFAULT_MODEL], metavar="MODEL")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    rows = []
    for model in args.models:
        path = resolve_model(model)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokens = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
        for mode, figures in measure(path, tokens, args.modes):
            rows.append({"model": Path(model).name, "mode": mode, **figures})
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if not args.no_write:
        settings = {"text": args.text.name, "positions": tokens.shape[1]}
        print(f"written: {report.write('quantization', {'settings': settings, 'rows': rows}).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
