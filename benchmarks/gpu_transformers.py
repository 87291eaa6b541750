"""transformers on the same model, device, batches and contexts: a part of `make gpu`.

Owns how the peer is run: random weights of the same shape, a static cache filled by a real
prefill, then greedy steps with each implementation of the experts that transformers has and
that runs; no torch.compile. The best one counts. Run by benchmarks.gpu, in a process of its
own so that its memory is the device's.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu_models import FULL, QUICK, Fields, Workload
from benchmarks.gpu_records import Deadline, Recorder, parse_flags
from benchmarks.gpu_timing import time_once
from kernels.runtime import Runtime, open_runtime

IMPLEMENTATIONS: Final = ("grouped_mm", "batched_mm", "eager")
PREFILL: Final = IMPLEMENTATIONS[0]
"""batched_mm copies an expert's weights for every row: no prefill fits."""
PREFILL_ROWS: Final = 8192
"""Rows of one forward pass while the cache is filled."""
ROUNDS: Final = 3
STEPS: Final = 4


@dataclass(frozen=True)
class Peer:
    """A model of transformers, and its static cache for one batch."""

    model: Any
    runtime: Runtime

    def use(self, implementation: str) -> None:
        """Choose how experts are computed."""
        self.model.set_experts_implementation(implementation)

    def new_cache(self, length: int) -> Any:
        """Give an empty cache of so many positions."""
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=length)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        """Give the greedy next token i64[B, 1] after ids [B, T]."""
        logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token: Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return token

    def prefill(self, ids: Tensor, cache: Any) -> Tensor:
        """Fill the cache with ids [B, T], so many columns at a time that no pass is too large."""
        width = max(PREFILL_ROWS // len(ids), 1)
        for start in range(0, ids.shape[1], width):
            token = self.forward(ids[:, start : start + width], cache)
        return token

    def random_ids(self, batch: int, length: int) -> Tensor:
        """Give prompts."""
        vocab = self.model.config.vocab_size
        return torch.randint(vocab, (batch, length), device=self.runtime.device)


def make_peer(fields: Fields, runtime: Runtime) -> Peer:
    """Make the model with random weights on the device."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    own = {name: value for name, value in fields.items() if name != "torch_dtype"}
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, fields["torch_dtype"]))
    try:
        with torch.device(runtime.device):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**own))
    finally:
        torch.set_default_dtype(dtype)
    return Peer(model.eval(), runtime)


def time_steps(peer: Peer, token: Tensor, cache: Any) -> tuple[Tensor, list[float]]:
    """Give the token after, and the seconds of a step in each round after one that warms up."""
    rounds = []
    for _ in range(ROUNDS + 1):

        def steps() -> None:
            nonlocal token
            for _ in range(STEPS):
                token = peer.forward(token, cache)

        rounds.append(time_once(peer.runtime, steps) / STEPS)
    return token, rounds[1:]


def measure_decode(
    peer: Peer, batch: int, context: int, recorder: Recorder, deadline: Deadline
) -> None:
    """Record the greedy steps of a batch with every implementation that runs."""
    cache = peer.new_cache(context + len(IMPLEMENTATIONS) * (ROUNDS + 1) * STEPS + 1)
    peer.use(PREFILL)
    token = peer.prefill(peer.random_ids(batch, context), cache)
    for implementation in IMPLEMENTATIONS:
        what = f"transformers, batch {batch}, {implementation}"
        if not deadline.has_another:
            recorder.skipped(what, "the time would not have sufficed")
            continue
        # One that this version or this device does not have is none to be compared with.
        try:
            peer.use(implementation)
            with deadline.measured():
                token, rounds = time_steps(peer, token, cache)
        except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
            traceback.print_exc()
            recorder.skipped(what, f"{type(error).__name__}: {first_line(error)}")
            continue
        step_s = statistics.median(rounds)
        recorder.write(
            "figure",
            of="decode",
            engine="transformers",
            variant=implementation,
            batch=batch,
            context=context,
            step_ms=step_s * 1e3,
            rounds_ms=[seconds * 1e3 for seconds in rounds],
            tokens_per_s=batch / step_s,
        )


def measure_prefill(peer: Peer, num_tokens: int, recorder: Recorder) -> None:
    """Record the prefill of one prompt."""
    peer.use(PREFILL)
    ids = peer.random_ids(1, num_tokens)
    seconds = [
        time_once(peer.runtime, lambda: peer.prefill(ids, peer.new_cache(num_tokens)))
        for _ in range(ROUNDS + 1)
    ]
    median = statistics.median(seconds[1:])
    recorder.write(
        "figure",
        of="prefill",
        engine="transformers",
        variant=PREFILL,
        tokens=num_tokens,
        ms=median * 1e3,
        tokens_per_s=num_tokens / median,
    )


def first_line(error: Exception) -> str:
    """Give the first line of what an exception says."""
    return next(iter(str(error).strip().splitlines()), "")


def steps_of(
    peer: Peer, workload: Workload, recorder: Recorder, deadline: Deadline
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Give what is measured, in order, by name."""
    for batch in workload.batches:
        yield (
            f"transformers, batch {batch}",
            lambda batch=batch: measure_decode(peer, batch, workload.context, recorder, deadline),
        )
    yield (
        "transformers, prefill",
        lambda: measure_prefill(peer, workload.prefill_tokens, recorder),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    flags = parse_flags("benchmarks.gpu_transformers", __doc__, argv)
    recorder, deadline = Recorder(), Deadline(flags.seconds)
    runtime = open_runtime(flags.device)
    workload = QUICK if flags.quick else FULL
    torch.manual_seed(0)
    recorder.progress(f"building {workload.name} of transformers")
    peer = make_peer(workload.fields, runtime)
    for what, run in steps_of(peer, workload, recorder, deadline):
        if not deadline.has(0):
            recorder.skipped(what, "the time was up")
            continue
        try:
            run()
        except RuntimeError as error:
            traceback.print_exc()
            recorder.problem(what, f"{type(error).__name__}: {first_line(error)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
