"""The plans of a node that only decodes a fixed batch, or prefills one prompt.

Replaces the scheduler for a benchmark's engine, without a queue: numbers steps and sequences,
gives blocks (in random order, as after a while of serving) and takes them back. Knows
no tensors. Called by benchmarks.gpu.engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.scheduler.micro_batching.split import row_bucket
from topspin.errors import ConfigError
from topspin.messages import (
    SAMPLE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepTicket,
    pack_ints,
)


@dataclass(eq=False)
class _Sequence:
    """A sequence of the batch: the number of committed positions, and its blocks."""

    seq_id: int
    length: int
    num_blocks: int


class Plans:
    """The chain of steps of one attention node; sequences are greedy and never end."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        max_tokens: int,
        num_micro_batches: int = 1,
        seed: int = 0,
    ) -> None:
        """Give out blocks 0..num_blocks-1; `max_tokens` is a step's budget."""
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._num_micro_batches = num_micro_batches
        self._random = np.random.default_rng(seed)
        self._blocks: list[int] = self._random.permutation(num_blocks).tolist()
        self._free = list(self._blocks)
        self._step = 0
        self._next_id = 0
        self._batch: list[_Sequence] = []
        self._finished: list[int] = []
        self._new: list[NewSequence] = []

    @property
    def contexts(self) -> list[int]:
        """Return the number of cached positions of each sequence after the last step."""
        return [each.length for each in self._batch]

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the sequences of each micro-batch of a decode step."""
        return tuple(len(part) for part in self._split())

    def start_decode(self, batch: int, context: int) -> None:
        """Drop all sequences; begin `batch` new ones with `context` positions cached."""
        self._forget_all()
        for _ in range(batch):
            self._admit(num_tokens=context + 1, num_computed=context)

    def decode(self) -> StepPlan:
        """Advance every sequence by a token. Raises ConfigError if the cache is full."""
        assert self._batch, "start_decode() first"
        return self._plan([[(each, 1) for each in part] for part in self._split()])

    def prefill(self, num_tokens: int) -> list[StepPlan]:
        """Drop all sequences; prefill one prompt, in as many steps as the budget requires."""
        self._forget_all()
        sequence = self._admit(num_tokens=num_tokens, num_computed=0)
        left, plans = num_tokens, []
        while left:
            count = min(left, self._max_tokens)
            left -= count
            plans.append(self._plan([[(sequence, count)]], sample=left == 0))
        return plans

    def _split(self) -> list[list[_Sequence]]:
        """Divide the batch into micro-batches of equal size, none of them empty."""
        m = min(self._num_micro_batches, len(self._batch))
        bounds = [len(self._batch) * idx // m for idx in range(m + 1)]
        return [self._batch[bounds[idx] : bounds[idx + 1]] for idx in range(m)]

    def _forget_all(self) -> None:
        # The node does not know a sequence that was not sent yet.
        unsent = {new.seq_id for new in self._new}
        self._finished += [each.seq_id for each in self._batch if each.seq_id not in unsent]
        self._new, self._batch = [], []
        self._free = list(self._blocks)

    def _take_blocks(self, count: int) -> list[int]:
        if count > len(self._free):
            raise ConfigError(
                f"{len(self._batch)} sequences need {count} more blocks of {self._block_size} "
                f"positions; the cache has {len(self._free)} of {len(self._blocks)} left"
            )
        return [self._free.pop() for _ in range(count)]

    def _admit(self, *, num_tokens: int, num_computed: int) -> _Sequence:
        num_blocks = -(-num_tokens // self._block_size)
        tokens = self._random.integers(self._vocab_size, size=num_tokens)
        sequence = _Sequence(self._next_id, num_computed, num_blocks)
        self._next_id += 1
        self._batch.append(sequence)
        self._new.append(
            NewSequence(
                seq_id=sequence.seq_id,
                tokens=tokens.astype("<i4").tobytes(),
                num_prompt_tokens=num_tokens,
                num_computed=num_computed,
                blocks=pack_ints(self._take_blocks(num_blocks)),
                max_length=2**30,
                sampling=SamplingParams(max_tokens=2**30, seed=0, temperature=0.0),
            )
        )
        return sequence

    def _plan(self, parts: list[list[tuple[_Sequence, int]]], *, sample: bool = True) -> StepPlan:
        self._step += 1
        plan = StepPlan(
            ticket=StepTicket(
                step=self._step,
                previous=self._step - 1,
                generation=1,
                table_version=1,
                num_micro_batches=len(parts),
                participants=(0,),
                row_buckets=tuple(row_bucket(sum(n for _, n in part)) for part in parts),
            ),
            finished=pack_ints(self._finished),
            new=tuple(self._new),
            micro_batches=tuple(self._micro_batch(part, sample=sample) for part in parts),
        )
        self._finished, self._new = [], []
        return plan

    def _micro_batch(self, part: list[tuple[_Sequence, int]], *, sample: bool) -> MicroBatch:
        block_counts, block_ids = [], []
        for sequence, count in part:
            sequence.length += count
            needed = max(0, -(-sequence.length // self._block_size) - sequence.num_blocks)
            block_ids += self._take_blocks(needed)
            block_counts.append(needed)
            sequence.num_blocks += needed
        return MicroBatch(
            seq_ids=pack_ints([sequence.seq_id for sequence, _ in part]),
            num_tokens=pack_ints([count for _, count in part]),
            wanted=bytes([SAMPLE * sample] * len(part)),
            block_counts=pack_ints(block_counts),
            block_ids=pack_ints(block_ids),
        )
