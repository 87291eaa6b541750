"""Steps of sequences that never end, for nodes that are timed.

Owns plans and tickets: sequences begin with a context that nobody computed, then all advance by a
token a step, or one prompt by a chunk. Knows no clock. Called by solo.py and rally.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deploy.profiling.parts import BLOCK_SIZE
from topspin.messages import (
    SAMPLE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepTicket,
    pack_ints,
)

# Tokens by which a sequence may grow while it is measured.
GROWTH = 2 * BLOCK_SIZE


class Load(NamedTuple):
    """What every step of a visit computes.

    `rows` sequences whose new token attends to `context` keys, in `micro_batches`; or, with
    `chunk` tokens, a prompt's chunk that begins at position `context`.
    """

    rows: int
    context: int
    micro_batches: int = 1
    chunk: int = 0

    @property
    def num_rows(self) -> int:
        """Return the token rows of all micro-batches."""
        return self.chunk or self.rows

    @property
    def num_keys(self) -> int:
        """Return the keys that the cache must have room for."""
        return self.rows * (self.context + GROWTH)


def tickets(load: Load, first: int, count: int) -> list[StepTicket]:
    """Return the tickets of a visit of `count` steps from number `first` on.

    Sequences of an earlier generation are forgotten: a visit is one, or each chunk of a prompt.
    """
    buckets = tuple(len(part) for part in _parts(load)) if not load.chunk else (load.chunk,)
    return [
        StepTicket(
            step=step,
            previous=step - 1,
            generation=step if load.chunk else first,
            table_version=1,
            num_micro_batches=load.micro_batches,
            participants=(0,),
            row_buckets=buckets,
        )
        for step in range(first, first + count)
    ]


def plans(load: Load, stamped: Sequence[StepTicket], *, num_blocks: int) -> list[StepPlan]:
    """Return the plans of a visit; the first admits its sequences, the last may end them."""
    if load.chunk:
        return [_prompt(load, ticket, num_blocks=num_blocks) for ticket in stamped]
    parts = [_micro_batch(part, [1] * len(part)) for part in _parts(load)]
    return [
        StepPlan(
            ticket=ticket,
            finished=b"",
            new=_sequences(load, num_blocks) if idx == 0 else (),
            micro_batches=tuple(parts),
        )
        for idx, ticket in enumerate(stamped)
    ]


def _parts(load: Load) -> list[list[int]]:
    everyone = list(range(load.rows))
    return [everyone[part :: load.micro_batches] for part in range(load.micro_batches)]


def _sequences(load: Load, num_blocks: int) -> tuple[NewSequence, ...]:
    committed = max(0, load.context - 1)
    each = -(-(committed + GROWTH) // BLOCK_SIZE)
    assert load.rows * each <= num_blocks, (load, each, num_blocks)
    return tuple(
        NewSequence(
            seq_id=row,
            tokens=pack_ints([(row * 7 + idx) % 100 for idx in range(committed + 1)]),
            num_prompt_tokens=committed + 1,
            num_computed=committed,
            blocks=pack_ints(range(row * each, (row + 1) * each)),
            max_length=committed + GROWTH,
            sampling=SamplingParams(max_tokens=GROWTH, seed=row, temperature=0.0),
        )
        for row in range(load.rows)
    )


def _prompt(load: Load, ticket: StepTicket, *, num_blocks: int) -> StepPlan:
    """Return a step of a new prompt's chunk."""
    length = load.context + load.chunk
    each = -(-length // BLOCK_SIZE)
    assert each <= num_blocks, (load, num_blocks)
    sequence = NewSequence(
        seq_id=0,
        tokens=pack_ints([idx % 100 for idx in range(length + 1)]),
        num_prompt_tokens=length + 1,
        num_computed=load.context,
        blocks=pack_ints(range(each)),
        max_length=length + 2,
        sampling=SamplingParams(max_tokens=1, seed=1, temperature=0.0),
    )
    return StepPlan(
        ticket=ticket,
        finished=b"",
        new=(sequence,),
        micro_batches=(_micro_batch([0], [load.chunk], wanted=0),),
    )


def _micro_batch(ids: Sequence[int], lengths: Sequence[int], *, wanted: int = SAMPLE) -> MicroBatch:
    return MicroBatch(
        seq_ids=pack_ints(ids),
        num_tokens=pack_ints(lengths),
        wanted=bytes([wanted] * len(ids)),
        block_counts=pack_ints([0] * len(ids)),
        block_ids=b"",
    )
