"""Steps of few rows on the CPU: recorded once per shape, replayed with other numbers.

Owns the tensors that a recorded step reads and writes: each replay gets its own numbers in them. A
step is recorded per number of rows of each micro-batch and of rows to sample; contexts, trees and
cache blocks are read from memory. Knows no layer and no net: its caller computes the step. Used by
host_executor.py and by draft_nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention_nodes.step_inputs import StepInputs
from kernels.contracts import AttentionMeta
from kernels.dispatch import Ops
from kernels.recordings import Recordings
from kernels.runtime import Runtime

# Steps with more rows spend their time in the kernels.
MAX_RECORDED_ROWS: Final = 64
# Rows of one sequence: what paged_attention computes one by one.
MAX_SEQUENCE_ROWS: Final = 8
# Recordings that are kept: about 100 KB each for 30 layers, besides their rows.
MAX_RECORDINGS: Final = 64

Renew = Callable[[AttentionMeta, AttentionMeta], None]
"""Lets a recorded step attend to other keys: kernels.cpu.attention.renew."""

Key = tuple[tuple[int, ...], int]
"""The rows of each micro-batch, and the number of rows to sample."""


def key_of(inputs: StepInputs) -> Key | None:
    """Return the shape of a step; None: such steps are not recorded."""
    rows = tuple(part.num_tokens for part in inputs.parts)
    longest = max((part.meta.max_query_len for part in inputs.parts), default=0)
    if not 0 < sum(rows) <= MAX_RECORDED_ROWS or longest > MAX_SEQUENCE_ROWS:
        return None
    return None if inputs.to_score is not None else (rows, len(inputs.sample_rows))


class _Recorded(NamedTuple):
    """What the recorded steps of one key read and write."""

    inputs: StepInputs
    logits: Tensor

    def take(self, other: StepInputs, renew: Renew) -> None:
        """Let the next replay run with the numbers of `other`.

        They are copied as arrays: a tensor's copy_ takes several times as long.
        """
        own = self.inputs
        own.tokens.numpy()[:] = other.tokens.numpy()
        own.sample_rows.numpy()[:] = other.sample_rows.numpy()
        for part, theirs in zip(own.parts, other.parts, strict=True):
            part.cos.numpy()[:] = theirs.cos.numpy()
            part.sin.numpy()[:] = theirs.sin.numpy()
            part.kv_slots.numpy()[:] = theirs.kv_slots.numpy()
            renew(part.meta, theirs.meta)


class RecordedSteps:
    """The recorded steps of one model."""

    def __init__(self, runtime: Runtime, renew: Renew, *, vocab_size: int) -> None:
        self._renew = renew
        self._vocab_size = vocab_size
        self._recordings: Recordings[Key] = Recordings(runtime)
        self._recorded: dict[Key, _Recorded] = {}

    def run(
        self,
        key: Key,
        inputs: StepInputs,
        body: Callable[[StepInputs, Tensor], None],
        state: object,
    ) -> Tensor:
        """Return the logits f32[R, V] of a step whose key is `key`, valid until its next run.

        `body` computes a step and writes its logits. Recordings depend on `state`.
        """
        recorded = self._recorded.pop(key, None)
        if recorded is None:
            recorded = _Recorded(inputs, torch.empty(key[1], self._vocab_size))
        else:
            # The steps before have ended.
            recorded.take(inputs, self._renew)
        self._recorded[key] = recorded
        if len(self._recorded) > MAX_RECORDINGS:
            # A recording writes to the tensors that go with it: they end together.
            oldest = next(iter(self._recorded))
            del self._recorded[oldest]
            self._recordings.drop(oldest)
        own = recorded
        self._recordings.run(key, lambda: body(own.inputs, own.logits), state)
        return recorded.logits

    def clear(self) -> None:
        """Forget all recordings."""
        self._recordings.clear()
        self._recorded.clear()


def recorded_steps(ops: Ops, runtime: Runtime, *, vocab_size: int) -> RecordedSteps | None:
    """Return the recorded steps of a model that `ops` compute; None: these are not recorded."""
    if ops.name != "cpu":
        return None
    from kernels.cpu.attention import renew

    return RecordedSteps(runtime, renew, vocab_size=vocab_size)
