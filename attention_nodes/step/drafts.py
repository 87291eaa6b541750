"""The drafts of a step: which of its sequences may have one, how long, and the drafter's answers.

Owns the drafter's view of a sequence. Drafts themselves, and drafters, are those of spec_decode.
Knows no tensors and no cache. Called by model_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attention_nodes.step.sequences import PENDING, IntArray, SequenceTable, unpack
from spec_decode.draft import ROOT, Draft, Drafter, DraftRequest, DraftText
from topspin.errors import ProtocolError
from topspin.messages import SAMPLE, MicroBatch


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
