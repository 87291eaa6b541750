"""Turns the nodes' batches of a step into tickets and plans.

Owns the packing of StepTicket and StepPlan, and the split into micro-batches. Does not
choose the sequences. Called by policy.py.
"""

from __future__ import annotations

from typing import NamedTuple

from server.scheduler.micro_batching.cost import CostFits, CostModel, StepLoad
from server.scheduler.micro_batching.split import (
    NodeLoad,
    choose_num_micro_batches,
    row_bucket,
    split_slices,
)
from server.scheduler.nodes.formation import Formation
from server.scheduler.planning.attention_replica import AttentionReplica, NodeBatch
from server.scheduler.planning.in_flight import NodePart, RunningStep
from topspin.messages import SAMPLE, MicroBatch, StepPlan, StepTicket, pack_ints


class StepMessages(NamedTuple):
    """The messages of a step: a ticket for every expert node, a plan per attention node."""

    ticket: StepTicket
    plans: dict[int, StepPlan]


class PlannedStep(NamedTuple):
    """The messages of a step, and its record until it is done."""

    step: StepMessages
    running: RunningStep


class _NodeSplit(NamedTuple):
    replica: AttentionReplica
    batch: NodeBatch
    micro_batches: list[list[int]]


class StepBuilder:
    """Numbers steps and builds their messages."""

    def __init__(
        self,
        *,
        formation: Formation,
        num_micro_batches: int | None,
        shares_cores: bool,
        costs: CostFits,
    ) -> None:
        self._formation = formation
        self._fixed_num_micro_batches = num_micro_batches
        self._shares_cores = shares_cores
        self._costs = costs
        self._chosen: int | None = None
        self._step = 0
        self._previous = 0

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches of the last step, 0 before the first."""
        return self._chosen or 0

    def begin_chain(self) -> None:
        """Give the next step no predecessor, as a generation begins."""
        self._previous = 0

    def build(self, work: list[tuple[AttentionReplica, NodeBatch]], now: float) -> PlannedStep:
        """Return the next step; `work` holds the participants' batches, none of them empty."""
        m, slices_s = self._divide(work)
        self._chosen = m
        splits = [
            _NodeSplit(replica, batch, split_slices(costs, m))
            for (replica, batch), costs in zip(work, slices_s, strict=True)
        ]
        ticket = StepTicket(
            step=self._step + 1,
            previous=self._previous,
            generation=self._formation.generation,
            table_version=self._formation.table.version,
            num_micro_batches=m,
            participants=tuple(replica.index for replica, _ in work),
            row_buckets=tuple(_bucket(splits, mb) for mb in range(m)),
        )
        self._step += 1
        self._previous = self._step
        plans: dict[int, StepPlan] = {}
        parts: dict[int, NodePart] = {}
        for split in splits:
            finished, new = split.replica.take_news()
            plan = StepPlan(
                ticket=ticket,
                finished=finished,
                new=new,
                micro_batches=tuple(_pack(split.batch, idxs) for idxs in split.micro_batches),
            )
            plans[split.replica.index] = plan
            parts[split.replica.index] = _part(split.batch, split.micro_batches, plan)
        running = RunningStep(
            ticket=ticket,
            sent_s=now,
            parts=parts,
            loads={split.replica.index: _load(split) for split in splits},
        )
        return PlannedStep(StepMessages(ticket, plans), running)

    def _divide(
        self, work: list[tuple[AttentionReplica, NodeBatch]]
    ) -> tuple[int, list[list[float]]]:
        """Return the number of micro-batches, and the predicted times of each node's slices."""
        fixed = self._fixed_num_micro_batches
        models = [self._costs.of(replica.index) for replica, _ in work]
        if fixed == 1 or (fixed is None and all(map(self._never_splits, models))):
            return 1, [[0.0] * len(batch.seqs) for _, batch in work]  # not split, so not needed
        slices_s = [
            [
                model.slice_s(count, start)
                for count, start in zip(batch.rows, batch.starts, strict=True)
            ]
            for model, (_, batch) in zip(models, work, strict=True)
        ]
        if fixed is not None:
            return fixed, slices_s
        loads = [
            NodeLoad(
                len(batch.seqs), sum(batch.rows), sum(costs), max(costs), model.attention_fixed_s
            )
            for (_, batch), costs, model in zip(work, slices_s, models, strict=True)
        ]
        chosen = choose_num_micro_batches(
            models[0],
            loads,
            shares_cores=self._shares_cores,
            num_layers=self._costs.num_hops,
            current=self._chosen,
        )
        return chosen, slices_s

    def _never_splits(self, cost: CostModel) -> bool:
        """Say whether splitting is slower under any load.

        On shared cores it can only hide the link, and reads both sides' weights again. Where no
        rows travel it hides nothing.
        """
        if not self._costs.num_hops:
            return True
        reread_s = cost.attention_fixed_s + cost.expert_fixed_s
        return self._shares_cores and not cost.link_token_s and 2 * cost.link_s <= reread_s


def _load(split: _NodeSplit) -> StepLoad:
    counts, starts = split.batch.rows, split.batch.starts
    num_tokens = sum(counts)
    if num_tokens == len(counts):
        num_pairs = float(sum(starts) + num_tokens)
    else:
        num_pairs = sum(
            count * (start + 0.5 * (count + 1)) for count, start in zip(counts, starts, strict=True)
        )
    return StepLoad(sum(1 for idxs in split.micro_batches if idxs), num_tokens, num_pairs)


def _bucket(splits: list[_NodeSplit], micro_batch: int) -> int:
    num_rows = []
    for split in splits:
        rows, indices = split.batch.rows, split.micro_batches[micro_batch]
        is_whole = len(indices) == len(rows)
        num_rows.append(sum(rows if is_whole else [rows[idx] for idx in indices]))
    return row_bucket(max(num_rows))


def _pack(batch: NodeBatch, indices: list[int]) -> MicroBatch:
    """Return the message for the slices `indices`, with the blocks new to the node."""
    seqs, counts, wanted = batch.seqs, batch.counts, batch.wanted
    if len(indices) < len(seqs):
        seqs = [seqs[idx] for idx in indices]
        counts = [counts[idx] for idx in indices]
        wanted = [wanted[idx] for idx in indices]
    block_counts = [0] * len(seqs)
    block_ids: list[int] = []
    growing = [pos for pos, seq in enumerate(seqs) if seq.num_planned > seq.sent_capacity]
    for position in growing:
        blocks = seqs[position].blocks_to_send()
        block_counts[position] = len(blocks)
        block_ids += blocks
    return MicroBatch(
        seq_ids=pack_ints([seq.seq_id for seq in seqs]),
        num_tokens=pack_ints(counts),
        wanted=bytes(wanted),
        block_counts=pack_ints(block_counts),
        block_ids=pack_ints(block_ids),
        max_draft=pack_ints([batch.drafts.get(idx, 0) for idx in indices]) if batch.drafts else b"",
    )


def _part(batch: NodeBatch, micro_batches: list[list[int]], plan: StepPlan) -> NodePart:
    """Return the node's slices, which `plan` names, in the order in which it will answer."""
    seqs, counts, wanted, drafts = batch.seqs, batch.counts, batch.wanted, [0] * len(batch.seqs)
    for idx, draft in batch.drafts.items():
        drafts[idx] = draft
    if len(micro_batches) > 1:
        order = [idx for indices in micro_batches for idx in indices]
        seqs = [seqs[idx] for idx in order]
        counts = [counts[idx] for idx in order]
        wanted = [wanted[idx] for idx in order]
        drafts = [drafts[idx] for idx in order]
    if wanted.count(SAMPLE) == len(seqs):  # the common decode step
        sampled_ids = b"".join(mb.seq_ids for mb in plan.micro_batches)
    else:
        sampled_ids = pack_ints(
            seq.seq_id for seq, want in zip(seqs, wanted, strict=True) if want & SAMPLE
        )
    return NodePart(seqs, counts, drafts, batch.scored, sampled_ids)
