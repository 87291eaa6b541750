"""Steps of sequences that never end by themselves: a scheduler's part, for nodes that are timed.

Owns the numbers of steps and sequences, and which blocks a sequence has; both nodes get the same
tickets if both play the same plans. Knows no tensors and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from server.scheduler.micro_batching.split import row_bucket
from topspin.messages import (
    SAMPLE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepTicket,
    pack_ints,
)


class Steps:
    """The chain of plans of one attention node, which takes part in every step alone."""

    def __init__(self) -> None:
        self._num_steps = self._num_admitted = 0
        self._new: dict[int, NewSequence] = {}
        self._finished: list[int] = []

    def admit(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        max_length: int,
        num_computed: int = 0,
        num_prompt: int | None = None,
        temperature: float = 0.0,
    ) -> int:
        """Begin a sequence with the next step and return its id.

        The first `num_computed` tokens are in the cache. `num_prompt` None: all are prompt.
        """
        seq_id = self._num_admitted
        self._num_admitted += 1
        self._new[seq_id] = NewSequence(
            seq_id=seq_id,
            tokens=pack_ints(tokens),
            num_prompt_tokens=num_prompt or len(tokens),
            num_computed=num_computed,
            blocks=pack_ints(blocks),
            max_length=max_length,
            sampling=SamplingParams(max_tokens=max_length, seed=seq_id, temperature=temperature),
        )
        return seq_id

    def end(self, seq_id: int) -> None:
        """End a sequence with the next step; the node never hears of one that no step had."""
        if self._new.pop(seq_id, None) is None:
            self._finished.append(seq_id)

    def advance(self, *parts: Mapping[int, int], sample: bool = True) -> StepPlan:
        """Return the next plan: a micro-batch of each of `parts`, which has tokens by sequence."""
        self._num_steps += 1
        plan = StepPlan(
            ticket=StepTicket(
                step=self._num_steps,
                previous=self._num_steps - 1,
                generation=1,
                table_version=1,
                num_micro_batches=len(parts),
                participants=(0,),
                row_buckets=tuple(row_bucket(sum(part.values())) for part in parts),
            ),
            finished=pack_ints(self._finished),
            new=tuple(self._new.values()),
            micro_batches=tuple(
                MicroBatch(
                    seq_ids=pack_ints(part),
                    num_tokens=pack_ints(part.values()),
                    wanted=bytes([SAMPLE * sample] * len(part)),
                    block_counts=pack_ints([0] * len(part)),
                    block_ids=b"",
                )
                for part in parts
            ),
        )
        self._new, self._finished = {}, []
        return plan


class Batch:
    """A batch that decodes for ever, or one prompt, in the blocks of one cache."""

    def __init__(self, blocks: Sequence[int], *, block_size: int, vocab_size: int) -> None:
        """Give out `blocks` in this order; tokens are random ones of a vocabulary."""
        self._steps = Steps()
        self._blocks = tuple(blocks)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self._lengths: dict[int, int] = {}

    @property
    def contexts(self) -> list[int]:
        """Return the cached positions of each sequence after the last step."""
        return list(self._lengths.values())

    def begin(self, rows: int, context: int, *, growth: int) -> None:
        """Drop all sequences; begin `rows` new ones with `context` cached positions.

        Each has room for `growth` tokens more.
        """
        self._drop_all()
        for _ in range(rows):
            self._admit(context + 1, context, growth)

    def decode(self, num_micro_batches: int = 1, *, rows: int | None = None) -> StepPlan:
        """Return a step in which the first `rows` sequences (None: all) advance by a token.

        Micro-batches are of equal size, none of them empty.
        """
        ids = list(self._lengths)[:rows]
        m = min(num_micro_batches, len(ids))
        bounds = [len(ids) * idx // m for idx in range(m + 1)]
        for seq_id in ids:
            self._lengths[seq_id] += 1
        return self._steps.advance(
            *(dict.fromkeys(ids[bounds[idx] : bounds[idx + 1]], 1) for idx in range(m))
        )

    def prefill(
        self, num_tokens: int, *, start: int = 0, most: int, growth: int = 1
    ) -> list[StepPlan]:
        """Drop all sequences; return the steps of a prompt from position `start` on.

        No step has more than `most` tokens; the last one samples. `growth` as for begin().
        """
        self._drop_all()
        seq_id = self._admit(start + num_tokens, start, growth)
        self._lengths[seq_id] += num_tokens
        chunks = [min(most, num_tokens - begin) for begin in range(0, num_tokens, most)]
        return [
            self._steps.advance({seq_id: count}, sample=idx == len(chunks) - 1)
            for idx, count in enumerate(chunks)
        ]

    def _drop_all(self) -> None:
        for seq_id in self._lengths:
            self._steps.end(seq_id)
        self._lengths = {}

    def _admit(self, num_tokens: int, num_computed: int, growth: int) -> int:
        each = -(-(num_tokens + growth) // self._block_size)
        first = each * len(self._lengths)
        assert first + each <= len(self._blocks), "the cache is too small"
        seq_id = self._steps.admit(
            self._random.integers(self._vocab_size, size=num_tokens).tolist(),
            self._blocks[first : first + each],
            max_length=num_tokens + growth,
            num_computed=num_computed,
        )
        self._lengths[seq_id] = num_computed
        return seq_id
