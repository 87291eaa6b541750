"""The loss of quality by a compressed M2N payload.

Runs a text and greedy continuations through the model in transformers, with the input rows of its
routed experts converted by m2n_comm.payload as on the wire (answers in bf16), and compares with the
plain model: mean KL divergence of the next token's distribution over all positions of
benchmarks/payload_text.txt, how often the most likely token is the same, and how much of greedy
continuations agrees. Run as `topspin bench payload`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.experiment import Experiment, rows_of, settings_of
from benchmarks.load.comparison import common_prefix
from benchmarks.quality.quantization import TEXT, divergence
from m2n_comm.payload import pack_rows, unpack_rows
from models.sources.hub import DEFAULT_MODEL, resolve_model

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def through_wire(rows: torch.Tensor, payload: str) -> torch.Tensor:
    """Return rows [R, H] as the expert node receives them."""
    code = CODES.get(payload)
    if code is None:
        return rows.to(torch.bfloat16).to(rows.dtype)
    values = torch.empty(rows.shape, dtype=code)
    scales, scratch = torch.empty(rows.shape[0], 1), torch.empty(rows.shape)
    pack_rows(rows, values, scales, scratch)
    out = torch.empty_like(rows)
    unpack_rows(values, scales, out, scratch)
    return out


@contextmanager
def payload_of(model: torch.nn.Module, payload: str) -> Iterator[int]:
    """Convert the input rows of all routed experts by `payload`; yields the number of layers."""

    def incoming(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = inputs
        flat = through_wire(hidden.reshape(-1, hidden.shape[-1]), payload)
        return (flat.view(hidden.shape), *rest)

    def outgoing(module: torch.nn.Module, inputs: tuple[Any, ...], out: Any) -> Any:
        return out.to(torch.bfloat16).to(out.dtype)

    layers = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    with ExitStack() as hooks:
        for experts in layers:
            hooks.callback(experts.register_forward_pre_hook(incoming).remove)
            hooks.callback(experts.register_forward_hook(outgoing).remove)
        yield len(layers)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the number of equal sequences and the mean share before the first difference."""
    shares = [common_prefix(a, b) / len(a) for a, b in zip(ours, theirs, strict=True)]
    return {
        "identical_sequences": sum(share == 1 for share in shares),
        "num_sequences": len(shares),
        "mean_share_before_first_difference": round(statistics.mean(shares), 4),
    }


COLUMNS: Final = {
    "rows on the wire": "{payload}",
    "mean KL": "{mean_kl}",
    "greatest KL": "{max_kl}",
    "same token": "{same_most_likely_token:.1%}",
    "equal continuations": "{greedy[identical_sequences]} of {greedy[num_sequences]}",
}
EXPERIMENT = Experiment("payload", __doc__, rows_of(COLUMNS))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare every payload with the plain model and write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=32)
    args = parser.parse_args(argv)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = str(resolve_model(args.model))
    tokens = AutoTokenizer.from_pretrained(path)(TEXT.read_text(), return_tensors="pt").input_ids
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype))
    model.eval()
    starts = torch.linspace(0, tokens.shape[1] - 33, args.sequences).long().tolist()
    prompts = torch.cat([tokens[:, start : start + 32] for start in starts])

    def look() -> tuple[torch.Tensor, list[list[int]]]:
        logprobs = model(tokens).logits[0].float().log_softmax(-1)
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=args.output_len,
            max_new_tokens=args.output_len,
            pad_token_id=0,
        )
        return logprobs, made[:, prompts.shape[1] :].tolist()

    rows = []
    with torch.inference_mode():
        plain, continued = look()
        for payload in ("bf16", "int8", "fp8"):
            with payload_of(model, payload) as num_layers:
                if num_layers == 0:
                    raise SystemExit(f"{args.model}: found no routed experts in this model")
                coded, made = look()
            found = {**divergence(plain, coded), "greedy": agreement(made, continued)}
            rows.append({"payload": payload, **found})
    settings = settings_of(args, positions=tokens.shape[1])
    return EXPERIMENT.finish(args, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
