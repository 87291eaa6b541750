"""Drafts: tokens that a node feeds behind a sequence's last one because they may come next.

Owns their form, the seam at which they come from elsewhere, and the choice of what is kept of
one. A draft is a tree over the root, the last token that is certain: verifying it samples every
row, as plain decoding would at that place, and keeps the path on which each token is the one
sampled before it. So a draft never changes what is sampled, only how much of it in one step.
Knows no tensors and no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

ROOT: Final = -1
"""Instead of a token's index: the last certain token."""


MAX_SHAPED_ROWS: Final = 64
"""Steps with more rows, as those with prompts, are not recorded: their number does not matter."""


class Draft(NamedTuple):
    """n tokens, none before the one that it follows: `parents[i]` < i is its index, or ROOT.

    `logps[i]`, at most 0, is the log-probability of token i there, as its drafter sees it. Only
    where several drafters feed one tree does it matter; empty: nobody asks.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logps: tuple[float, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int], logps: Sequence[float] = ()) -> Draft:
        """Return the draft in which each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(logps))

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


NO_DRAFT: Final = Draft((), ())


class DraftText(NamedTuple):
    """A sequence as a drafter knows it: i32[T] tokens, the first `num_prompt` of them prompt.

    `salt` names the tenant: nothing of a sequence may show in drafts for another salt.
    """

    seq_id: int
    tokens: npt.NDArray[np.int32]
    num_prompt: int
    salt: str = ""


class DraftRequest(NamedTuple):
    """A sequence to draft for, whose last token is the root, and the most tokens of the draft."""

    text: DraftText
    at_most: int


class Drafter(Protocol):
    """Where drafts come from."""

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return a draft for each request, perhaps an empty one; one call per step."""

    def end(self, text: DraftText) -> None:
        """Forget a sequence, asked for or not, that has left the node; all its tokens are known."""

    def close(self) -> None:
        """Release what it holds; it is not called again."""


def row_step(num_rows: int) -> int:
    """Return the distance between the numbers of rows near `num_rows` that steps should have.

    Each number is a shape of its own, which has to be recorded and timed: every one up to 16, then
    those within an eighth of each other.
    """
    step: int = 1 if num_rows < 16 else 2 ** (num_rows.bit_length() - 4)
    return step


def num_excess(num_rows: int) -> int:
    """Return by how many rows a step has too many for a shape; none where shapes do not matter."""
    return num_rows % row_step(num_rows) if num_rows <= MAX_SHAPED_ROWS else 0


def trim(drafts: Mapping[int, Draft], num_rows: int) -> dict[int, Draft]:
    """Return `drafts` without the tokens by which a step has too many rows for a shape.

    The step has `num_rows` besides. The longest drafts lose their last tokens, which nothing
    follows; a draft that loses all is left out.
    """
    kept = dict(drafts)
    total = num_rows + sum(len(each.tokens) for each in kept.values())
    for _ in range(num_excess(total)):
        if not kept:
            break
        longest = max(kept, key=lambda key: len(kept[key].tokens))
        draft = kept[longest]
        kept[longest] = Draft(draft.tokens[:-1], draft.parents[:-1], draft.logps[:-1])
        if not kept[longest].tokens:
            del kept[longest]
    return kept


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
