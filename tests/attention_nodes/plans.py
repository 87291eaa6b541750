"""Plans for one attention node, as a scheduler would write them, and ways to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_nodes.step.model_runner import MAX_LAUNCHED, ModelRunner
from m2n_comm.net import AttentionNet, NetTimes
from topspin.messages import (
    SAMPLE,
    SCORE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTicket,
    pack_ints,
    unpack_ints,
)

BLOCK_SIZE = 4
BLOCKS_EACH = 8


def new_sequence(seq_id: int, tokens: Sequence[int], /, **fields: Any) -> NewSequence:
    """Return a greedy sequence without blocks whose prompt is `tokens`, but for `fields`."""
    known = {
        "tokens": pack_ints(tokens),
        "num_prompt_tokens": len(tokens),
        "num_computed": 0,
        "blocks": b"",
        "max_length": len(tokens) + 8,
        "sampling": SamplingParams(max_tokens=8, seed=seq_id, temperature=0.0),
    }
    return NewSequence(seq_id=seq_id, **{**known, **fields})


def micro_batch(
    counts: Mapping[int, int], wanted: Sequence[int] | None = None, **fields: bytes
) -> MicroBatch:
    """Return slices of so many tokens, all sampled unless `wanted` says else; no new blocks."""
    known = {"block_counts": pack_ints([0] * len(counts)), "block_ids": b"", **fields}
    return MicroBatch(
        seq_ids=pack_ints(counts),
        num_tokens=pack_ints(counts.values()),
        wanted=bytes([SAMPLE] * len(counts) if wanted is None else wanted),
        **known,
    )


def step_ticket(step: int, **fields: Any) -> StepTicket:
    """Return a ticket of one micro-batch for the first attention node, but for `fields`."""
    known = {
        "previous": step - 1,
        "generation": 1,
        "table_version": 1,
        "num_micro_batches": 1,
        "participants": (0,),
        "row_buckets": (64,),
    }
    return StepTicket(step=step, **{**known, **fields})


class SilentNet:
    """A graph-safe net whose experts answer 0."""

    trace = None
    is_graph_safe = True
    epoch = 0
    local: frozenset[int] = frozenset()
    is_closed = False

    def begin(self, ticket: StepTicket) -> None:
        pass

    def dispatch(self, micro_batch: int, layer: int, hidden: Tensor, *rest: Any) -> None:
        pass

    def combine(self, micro_batch: int, layer: int, out: Tensor) -> Tensor:
        return out.zero_()

    def times(self) -> NetTimes:
        return NetTimes(0.0, 0.0, None)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Planner:
    """Writes the plans of one generation; each sequence has its own BLOCKS_EACH blocks."""

    generation: int = 1
    table_version: int = 1
    plans: list[StepPlan] = field(default_factory=list)
    _new: list[NewSequence] = field(default_factory=list)
    _left: dict[int, int] = field(default_factory=dict)
    _free: list[int] = field(default_factory=lambda: list(range(8)))
    _place: dict[int, int] = field(default_factory=dict)

    def add(
        self,
        seq_id: int,
        prompt: Sequence[int],
        *,
        max_length: int = BLOCK_SIZE * BLOCKS_EACH + 1,
        **sampling: Any,
    ) -> None:
        """Admit a sequence with the next step."""
        place = self._place[seq_id] = self._free.pop(0)
        # Descending, so that a wrongly read table shows.
        blocks = range((place + 1) * BLOCKS_EACH - 1, place * BLOCKS_EACH - 1, -1)
        fields = {"max_tokens": 64, "seed": 7 + seq_id, "temperature": 0.0, **sampling}
        self._left[seq_id] = len(prompt)
        self._new.append(
            new_sequence(
                seq_id,
                prompt,
                blocks=pack_ints(blocks),
                max_length=max_length,
                sampling=SamplingParams(**fields),
            )
        )

    def step(
        self,
        *micro_batches: dict[int, int],
        finished: Sequence[int] = (),
        drafts: Mapping[int, int] | None = None,
        score: bool = False,
    ) -> None:
        """Plan a step that advances sequences by the given numbers of tokens; see MicroBatch.

        `drafts` has the greatest drafts behind them, `score` asks for the prompts' scores.
        """
        for seq_id in finished:
            self._free.insert(0, self._place.pop(seq_id))
        number = len(self.plans) + 1
        parts = []
        for slices in micro_batches:
            for seq_id, count in slices.items():
                self._left[seq_id] -= count
            wanted = [SAMPLE * (self._left[each] <= 0) | SCORE * score for each in slices]
            most = pack_ints(drafts.get(each, 0) for each in slices) if drafts else b""
            parts.append(micro_batch(slices, wanted, max_draft=most))
        ticket = step_ticket(
            number,
            generation=self.generation,
            table_version=self.table_version,
            num_micro_batches=len(parts),
            row_buckets=(64,) * len(parts),
        )
        self.plans.append(
            StepPlan(
                ticket=ticket,
                finished=pack_ints(finished),
                new=tuple(self._new),
                micro_batches=tuple(parts),
            )
        )
        self._new.clear()

    def decode(self, seq_ids: Sequence[int], *, m: int = 1) -> None:
        """Plan a step that advances each of `seq_ids` by one token."""
        self.step(*(dict.fromkeys(seq_ids[part::m], 1) for part in range(m)))


@torch.inference_mode()
def one_by_one(
    runner: ModelRunner, plans: Sequence[StepPlan], net: AttentionNet | None = None
) -> list[StepResult]:
    """Wait for each step before the next one is launched."""
    return [runner.execute(plan, net, index=0) for plan in plans]


@torch.inference_mode()
def ahead(
    runner: ModelRunner, plans: Sequence[StepPlan], net: AttentionNet | None = None
) -> list[StepResult]:
    """Launch each step before the one before it is collected."""
    results = []
    for plan in plans:
        if runner.num_launched == MAX_LAUNCHED:
            results.append(runner.collect())
        runner.launch(plan, net, index=0)
    while runner.num_launched:
        results.append(runner.collect())
    return results


def tokens_of(results: Sequence[StepResult]) -> dict[int, list[int]]:
    """Return each sequence's tokens over all steps."""
    tokens: dict[int, list[int]] = {}
    for result in results:
        seq_ids, flat = unpack_ints(result.seq_ids), list(unpack_ints(result.tokens))
        counts = unpack_ints(result.counts) if result.counts else [1] * len(seq_ids)
        for seq_id, count in zip(seq_ids, counts, strict=True):
            tokens.setdefault(seq_id, []).extend(flat[:count])
            del flat[:count]
        assert not flat
    return tokens
