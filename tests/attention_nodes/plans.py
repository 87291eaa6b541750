"""Plans for one attention node, as a scheduler would write them, and ways to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attention_nodes.step.model_runner import MAX_LAUNCHED, ModelRunner
from m2n_comm.net import AttentionNet
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
            NewSequence(
                seq_id=seq_id,
                tokens=pack_ints(prompt),
                num_prompt_tokens=len(prompt),
                num_computed=0,
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
            parts.append(
                MicroBatch(
                    seq_ids=pack_ints(slices),
                    num_tokens=pack_ints(slices.values()),
                    wanted=bytes(
                        SAMPLE * (self._left[seq_id] <= 0) | SCORE * score for seq_id in slices
                    ),
                    max_draft=pack_ints(drafts.get(seq_id, 0) for seq_id in slices)
                    if drafts
                    else b"",
                    block_counts=pack_ints([0] * len(slices)),
                    block_ids=b"",
                )
            )
        ticket = StepTicket(
            step=number,
            previous=number - 1,
            generation=self.generation,
            table_version=self.table_version,
            num_micro_batches=len(parts),
            participants=(0,),
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
