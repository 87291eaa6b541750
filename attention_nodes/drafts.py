"""Drafts: tokens that a node feeds behind a sequence's last one because they may come next.

Owns their form, the seam at which they come from elsewhere, and the choice of what is kept of
one. A draft is a tree over the root, the last token that is certain: verifying it samples every
row, as plain decoding would at that place, and keeps the path on which each token is the one
sampled before it. So a draft never changes what is sampled, only how much of it in one step.
Knows no tensors and no cache. Called by step_inputs.py and model_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from attention_nodes.sequences import SequenceTable, unpack
from topspin.errors import ProtocolError
from topspin.messages import SAMPLE, MicroBatch

ROOT: Final = -1
"""In Draft.parents: the token follows the last certain one."""


class Draft(NamedTuple):
    """n tokens, none before the one that it follows: `parents[i]` < i is its index, or ROOT."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def is_chain(self) -> bool:
        """Return whether each token follows the one before it."""
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    def ancestors(self) -> npt.NDArray[np.bool_]:
        """Return bool[n, n]: whether token j is token i or before it on its path."""
        seen = np.eye(len(self.tokens), dtype=bool)
        for idx, parent in enumerate(self.parents):
            if parent != ROOT:
                seen[idx] |= seen[parent]
        return seen

    def path(self, idx: int) -> tuple[int, ...]:
        """Return the tokens from the root's first to token `idx`."""
        tokens: list[int] = []
        while idx != ROOT:
            tokens.append(self.tokens[idx])
            idx = self.parents[idx]
        return tuple(reversed(tokens))


class DraftRequest(NamedTuple):
    """A sequence to draft for: all its tokens, the last of which is the root."""

    seq_id: int
    tokens: npt.NDArray[np.int32]
    at_most: int


class Drafter(Protocol):
    """Where drafts come from."""

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return a draft for each request, perhaps an empty one; one call per step."""


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
        DraftRequest(int(seq_ids[idx]), table.tokens[rows[idx], : ends[idx]], int(at_most[idx]))
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
            drafts[request.seq_id] = draft
    return drafts


def accepted(draft: Draft, sampled: Sequence[int], valid: Sequence[bool]) -> list[int]:
    """Return the indices of the accepted tokens, a path from the root on.

    `sampled` [1 + n] are the tokens sampled from the rows of the root and of each draft token;
    nothing is accepted behind a row that is not `valid`.
    """
    children = {
        (p, t): idx for idx, (p, t) in enumerate(zip(draft.parents, draft.tokens, strict=True))
    }
    path: list[int] = []
    at = ROOT
    while valid[1 + at] and (child := children.get((at, sampled[1 + at]))) is not None:
        path.append(child)
        at = child
    return path
