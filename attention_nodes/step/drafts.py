"""The drafts of a step: which of its sequences may have one, how long, and the drafter's answers.

Owns the drafter's view of a sequence, and of a step's final rows where a drafter goes on from
these. Drafts themselves, and drafters, are those of spec_decode. Knows no cache. Called by
model_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from attention_nodes.sampling.sampler import Sampled, SampleVerdict
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.sequences import PENDING, IntArray, SequenceTable, unpack
from attention_nodes.step.step_inputs import Slices
from spec_decode.draft import ROOT, Draft, Drafter, DraftRequest, DraftText
from topspin.errors import ProtocolError
from topspin.messages import SAMPLE, MicroBatch

_NONE: Final[IntArray] = np.zeros(0, dtype=np.int64)


class FinalRows(NamedTuple):
    """The model's final rows [n, H] of a sequence's tokens from `first` on, all certain."""

    text: DraftText
    first: int
    rows: Tensor


@runtime_checkable
class RowDrafter(Drafter, Protocol):
    """A drafter that goes on from the rows of the model that it drafts for."""

    def follow(self, target: Decoder) -> None:
        """Draft for `target`; called once, before all else."""

    def take(self, rows: Sequence[FinalRows]) -> None:
        """Learn a step's rows; those of a sequence come once each, in order."""


def final_rows(
    micro_batches: Sequence[Slices],
    final: Tensor,
    verdict: SampleVerdict,
    table: SequenceTable,
) -> list[FinalRows]:
    """Return the rows of a settled step's certain tokens, of `final` [T, H], by sequence."""
    accepted = _accepted(micro_batches, verdict)
    chosen: list[IntArray] = []
    firsts: list[int] = []
    texts: list[DraftText] = []
    begin = 0
    for slices in micro_batches:
        seq_ids = table.seq_id_of[slices.rows]
        for idx, row in enumerate(slices.rows.tolist()):
            start = int(slices.query_start[idx])
            end = start + int(slices.certain[idx])
            path = end + accepted.get(row, _NONE)
            chosen.append(begin + np.concatenate([np.arange(start, end), path]))
            firsts.append(int(slices.positions[start]))
            known = int(table.num_known[row])
            texts.append(_text(table, seq_ids, slices.rows, idx, end=known))
        begin += slices.num_tokens
    if not chosen:
        return []
    places = torch.from_numpy(np.concatenate(chosen)).to(final.device)
    parts = torch.split(final.index_select(0, places), [len(each) for each in chosen])
    return [FinalRows(*each) for each in zip(texts, firsts, parts, strict=True)]


def _accepted(micro_batches: Sequence[Slices], verdict: SampleVerdict) -> dict[int, IntArray]:
    """Return, by the row of its sequence, which tokens of each draft were accepted."""
    drafted = {each.first: each.row for each in Sampled.of(micro_batches).drafted}
    ends = [0, *np.cumsum(verdict.counts).tolist()]
    chosen = [verdict.rows[begin:end] for begin, end in pairwise(ends)]
    return {
        drafted[int(mine[0])]: mine[1:] - mine[0] - 1 for mine in chosen if int(mine[0]) in drafted
    }


def draft_requests(plan: MicroBatch, table: SequenceTable) -> list[DraftRequest]:
    """Return the sequences of a micro-batch that may have a draft; none of their tokens is PENDING.

    At most as many tokens as the plan reserves slots for, and as can be accepted before the last
    token that the sequence may have.
    """
    max_draft = unpack(plan.max_draft, what="max_draft")
    if not len(max_draft):
        return []
    seq_ids = unpack(plan.seq_ids, what="seq_ids")
    counts = unpack(plan.num_tokens, what="num_tokens")
    wanted = np.frombuffer(plan.wanted, dtype=np.uint8)
    if not len(seq_ids) == len(counts) == len(wanted) == len(max_draft):
        raise ProtocolError("a micro-batch's arrays differ in length")
    rows = table.rows_of(seq_ids)
    ends = table.num_committed[rows] + counts
    at_most = np.minimum(max_draft, table.max_length[rows] - 1 - ends)
    may = (wanted & SAMPLE).astype(bool) & (at_most > 0) & (ends == table.num_known[rows])
    return [
        DraftRequest(_text(table, seq_ids, rows, idx, end=int(ends[idx])), int(at_most[idx]))
        for idx in np.flatnonzero(may).tolist()
    ]


def take_drafts(drafter: Drafter, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
    """Return the drafts that are not empty, by sequence id."""
    if not requests:
        return {}
    drafts = {}
    for request, draft in zip(requests, drafter.draft(requests), strict=True):
        assert len(draft.tokens) == len(draft.parents) <= request.at_most
        assert all(ROOT <= parent < idx for idx, parent in enumerate(draft.parents))
        if draft.tokens:
            drafts[request.text.seq_id] = draft
    return drafts


def end_texts(drafter: Drafter, finished: Sequence[int], table: SequenceTable) -> None:
    """Tell the drafter of sequences that the table is about to forget."""
    seq_ids = np.array(finished, dtype=np.int64)
    rows = table.rows_of(seq_ids)
    ends = table.num_known[rows]
    ends -= table.tokens[rows, ends - 1] == PENDING
    for idx, end in enumerate(ends.tolist()):
        drafter.end(_text(table, seq_ids, rows, idx, end=end))


def _text(
    table: SequenceTable, seq_ids: IntArray, rows: IntArray, idx: int, *, end: int
) -> DraftText:
    """Return the first `end` tokens of sequence `idx` of those in `rows`."""
    row = int(rows[idx])
    return DraftText(
        int(seq_ids[idx]), table.tokens[row, :end], int(table.num_prompt[row]), table.salt(row)
    )
