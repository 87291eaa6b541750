"""Output throughput at 16 concurrent requests: Topspin against transformers' generate.

Both serve the same checkpoint in the same dtype on the same machine, in turn (A B A B):
Topspin as `topspin serve` runs it (one attention and one expert process over shm unless
flags say otherwise) with 16 concurrent streaming HTTP requests; transformers as one
process that generates a static batch of 16. Prompts are random token ids, output lengths
are fixed. Also measured: seconds until ready and resident memory (PSS) of all processes.

    python -m benchmarks.vs_transformers [MODEL] [--requests 16] [-- SERVE FLAGS]
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.experiment import (
    Experiment,
    Result,
    TextTable,
    number,
    ratio_text,
    rounds_in_turn,
    settings_of,
)
from benchmarks.load.figures.metrics import measure_run
from benchmarks.servers.topspin import Streams, TopspinServer
from models.description.config import load_model_config
from models.sources.hub import DEFAULT_MODEL, resolve_model
from models.text.tokenizer import Tokenizer


class BatchRound(NamedTuple):
    """One round of one side: output tokens per second, and the answers' texts."""

    tokens_per_s: float
    texts: list[str]


class TransformersBatch:
    """A child process that generates static batches."""

    def __init__(self, model: str, dtype: str) -> None:
        self._tokenizer = Tokenizer.from_directory(Path(model))
        # The load tester must not import torch.
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._oracle = model, dtype
        self.close = self._process.shutdown

    def generate(self, prompts: list[list[int]], output_len: int) -> BatchRound:
        """Return a round of these prompts."""
        done = self._process.submit(_generate, *self._oracle, prompts, output_len)
        tokens, elapsed_s = done.result()
        texts = [self._tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
        return BatchRound(sum(map(len, tokens)) / elapsed_s, texts)


def _generate(
    model: str, dtype: str, prompts: list[list[int]], output_len: int
) -> tuple[list[list[int]], float]:
    """Return a batch's greedy tokens and the seconds that they took; called in the child."""
    import torch

    inputs = torch.tensor(prompts)
    oracle = _load(model, dtype)
    started_s = time.perf_counter()
    with torch.inference_mode():
        out = oracle.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
        )
    return out[:, inputs.shape[1] :].tolist(), time.perf_counter() - started_s


@cache
def _load(path: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.eval()


def layout(result: Result) -> Iterator[TextTable]:
    """Yield throughput, start and memory."""
    ours, theirs = (result[f"median_{name}_tokens_per_s"] for name in ("topspin", "transformers"))
    yield TextTable(
        ["", "Topspin", "transformers"],
        [
            ["output tokens/s", number(ours), number(theirs)],
            ["ratio", ratio_text([each["ratio"] for each in result["rounds"]]), ""],
            ["seconds until ready", number(result["ready_s"]), ""],
            ["memory (PSS, MB), loaded", number(result["pss_loaded_mb"]), ""],
        ],
    )


EXPERIMENT = Experiment(
    "vs_transformers", __doc__, layout, command="python -m benchmarks.vs_transformers"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, print a table and write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL, rounds=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("serve_flags", nargs="*", help="flags of topspin serve, after --")
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    vocab_size = load_model_config(path).vocab_size

    streams = Streams(args.requests, args.prompt_len, args.output_len, vocab_size)

    def measure(side: TopspinServer | TransformersBatch, turn: int) -> BatchRound:
        if isinstance(side, TransformersBatch):
            return side.generate(streams.prompts(turn), args.output_len)
        run = side.generate(streams, turn)
        texts = [record.text for record in run.records]
        return BatchRound(measure_run(run)["output_throughput"], texts)

    with (
        TopspinServer([str(path), "--dtype", args.dtype, *args.serve_flags]) as ours,
        closing(TransformersBatch(str(path), args.dtype)) as theirs,
    ):
        idle_bytes = ours.pss_bytes()
        sides: dict[str, TopspinServer | TransformersBatch] = {"topspin": ours}
        found = rounds_in_turn({**sides, "transformers": theirs}, measure, rounds=args.rounds)
        loaded_bytes = ours.pss_bytes()
    rows = [
        {
            **{f"{name}_tokens_per_s": round(run.tokens_per_s, 1) for name, run in row.items()},
            "ratio": round(row["topspin"].tokens_per_s / row["transformers"].tokens_per_s, 3),
            "identical_sequences": sum(
                a == b for a, b in zip(row["topspin"].texts, row["transformers"].texts, strict=True)
            ),
        }
        for row in found
    ]
    names = ("ratio", "topspin_tokens_per_s", "transformers_tokens_per_s")
    weights_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    result = {
        "settings": settings_of(args),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "rounds": rows,
        **{f"median_{name}": statistics.median(row[name] for row in rows) for name in names},
        "ready_s": round(ours.ready_s, 2),
        "weights_mb": round(weights_bytes / 1e6, 1),
        "pss_idle_mb": round(idle_bytes / 1e6, 1),
        "pss_loaded_mb": round(loaded_bytes / 1e6, 1),
    }
    return EXPERIMENT.finish(args, result)


if __name__ == "__main__":
    raise SystemExit(main())
