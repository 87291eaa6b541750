"""Steps of few rows on the CPU: recorded once per shape, replayed with other numbers.

Owns the tensors that a recorded step reads and writes: each replay gets its own numbers in them. A
step is recorded per number of rows of each micro-batch and of rows to sample; contexts, trees,
selections of keys and cache blocks are read from memory. Knows no layer and no net: its caller
computes the step. Used by host_executor.py and by draft_nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention_nodes.step.decoder import NodeLayers
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.step_inputs import Slices, StepInputs, host_meta, of_tables
from kernels.contracts import AttentionMeta
from kernels.recordings import MAX_RECORDED_ROWS, SINGLE_ROWS, Recordings
from kernels.runtime import Runtime

# Rows of one sequence: longer pieces of prompts spend their time in the kernels.
MAX_SEQUENCE_ROWS: Final = 32
# Recordings that are kept: about 100 KB each for 30 layers. They share the memory of their rows.
MAX_RECORDINGS: Final = 64

_log = logging.getLogger("recordings")

Renew = Callable[[AttentionMeta, AttentionMeta], None]
"""Lets a recorded step attend to other keys: kernels.cpu.attention.renew."""


class Key(NamedTuple):
    """The shape of a step.

    The rows of each micro-batch, whether sequences of it retrieve, whether some attend in groups,
    and the number of rows to sample.
    """

    rows: tuple[int, ...]
    retrieves: tuple[bool, ...]
    joins: tuple[bool, ...]
    num_sampled: int


def key_of(micro_batches: Sequence[Slices]) -> Key | None:
    """Return the shape of a step; None: such steps are not recorded."""
    rows = tuple(len(each.tokens) for each in micro_batches)
    if not 0 < sum(rows) <= MAX_RECORDED_ROWS:
        return None
    longest = [int(each.counts.max(initial=0)) for each in micro_batches]
    if max(longest) > MAX_SEQUENCE_ROWS:
        return None
    return Key(
        rows,
        tuple(each.retrieval is not None for each in micro_batches),
        tuple(most > SINGLE_ROWS for most in longest),
        sum(len(each.sample_rows) for each in micro_batches),
    )


class _Recorded(NamedTuple):
    """What the recorded steps of one key read and write."""

    inputs: StepInputs
    logits: Tensor

    def take(self, micro_batches: Sequence[Slices], rotary: RotaryTable, renew: Renew) -> None:
        """Let the next replay run with the numbers of `micro_batches`.

        They are copied as arrays: a tensor's copy_ takes several times as long.
        """
        begin, tokens, sample_rows = 0, self.inputs.tokens.numpy(), self.inputs.sample_rows.numpy()
        for part, each in zip(self.inputs.parts, micro_batches, strict=True):
            tokens[part.start : part.start + part.num_tokens] = each.tokens
            end = begin + len(each.sample_rows)
            sample_rows[begin:end] = each.sample_rows + part.start
            begin = end
            rotary.gather(each.positions, each.prompt_lens, out=(part.cos, part.sin))
            part.kv_slots.numpy()[:] = each.kv_slots
            meta = host_meta(each)
            renew(part.meta, meta)
            for group, tables in zip(part.further, each.further, strict=True):
                group.kv_slots.numpy()[:] = tables.kv_slots
                renew(group.meta, of_tables(meta, torch.from_numpy(tables.block_tables)))


class KeyedInputs(NamedTuple):
    """A step's tensors; `key` None: it is not recorded."""

    inputs: StepInputs
    key: Key | None


class RecordedSteps:
    """The recorded steps of one model, or of some of its layers."""

    def __init__(
        self, runtime: Runtime, rotary: RotaryTable, renew: Renew | None, *, vocab_size: int
    ) -> None:
        """`renew` None: no step is recorded."""
        self._runtime = runtime
        self._rotary = rotary
        self._renew = renew
        self._vocab_size = vocab_size
        self._recordings: Recordings[Key] = Recordings(runtime)
        self._recorded: dict[Key, _Recorded] = {}
        # Of all recordings, whose logits each step's end uses up.
        self._logits = torch.empty(0 if renew is None else MAX_RECORDED_ROWS, vocab_size)

    def place(
        self,
        micro_batches: Sequence[Slices],
        make: Callable[[], StepInputs],
        *,
        may_record: bool = True,
    ) -> KeyedInputs:
        """Return the tensors of a step: new ones by `make`, or those of its recording.

        The steps before have ended.
        """
        key = key_of(micro_batches) if may_record and self._renew is not None else None
        recorded = None if key is None else self._recorded.get(key)
        if recorded is None or self._renew is None:
            return KeyedInputs(make(), key)
        self._runtime.synchronize()  # a thread may still look at what there was to do
        recorded.take(micro_batches, self._rotary, self._renew)
        return KeyedInputs(recorded.inputs, key)

    def run(
        self, placed: KeyedInputs, body: Callable[[StepInputs, Tensor], None], state: object = None
    ) -> Tensor:
        """Return the logits f32[R, V] of a step, recorded or not, valid until the next run.

        `body` computes a step and writes its logits. Recordings depend on `state`.
        """
        inputs, key = placed
        if key is None:
            sampled = inputs.sample_rows
            logits = torch.empty(len(sampled), self._vocab_size, device=sampled.device)
            body(inputs, logits)
            return logits
        recorded = self._recorded.pop(key, None)
        if recorded is None:
            recorded = _Recorded(inputs, self._logits[: key.num_sampled])
        logits = recorded.logits
        self._recorded[key] = recorded
        if len(self._recorded) > MAX_RECORDINGS:
            # A recording writes to the tensors that go with it: they end together.
            oldest = next(iter(self._recorded))
            del self._recorded[oldest]
            self._recordings.drop(oldest)
        self._recordings.run(key, lambda: body(inputs, logits), state)
        return logits

    def clear(self) -> None:
        """Forget all recordings."""
        self._recordings.clear()
        self._recorded.clear()


def recorded_steps(
    layers: NodeLayers, runtime: Runtime, rotary: RotaryTable, *, vocab_size: int, recordings: bool
) -> RecordedSteps:
    """Return the recorded steps of a model, or of some of its layers, which have no logits.

    Those have a `vocab_size` of 0. Nothing is recorded unless `recordings`, or if the kernels
    cannot be.
    """
    renew = _renew_of(layers) if recordings and layers.ops.name == "cpu" else None
    return RecordedSteps(runtime, rotary, renew, vocab_size=vocab_size)


def _renew_of(layers: NodeLayers) -> Renew | None:
    from kernels.cpu.attention import renew
    from kernels.cpu.compiled.attention.rows import HeadShape

    config = layers.config
    if HeadShape(config.num_heads, config.num_kv_heads, config.head_dim).fits:
        return renew
    # renew() needs rows that are attended to one by one.
    _log.info("steps are not recorded: heads have %d numbers", config.head_dim)
    return None
