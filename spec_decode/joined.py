"""Several drafters that feed one tree: of all that they offer, the likeliest tokens are verified.

Owns how far each drafter is believed. A drafter's probabilities are its own: a suffix that occurred
once says "surely". So each is measured by what came of its offers, verified or not: the share of
tokens that were right, over the share that it promised. Knows no drafter's kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from spec_decode.draft import NO_DRAFT, ROOT, Draft, Drafter, DraftRequest, DraftText
from spec_decode.tree import TokenTree

FORGET: Final = 0.95
"""Of the weight of a token's outcome, what is left after the next one of the sequence."""
FORGET_SHARED: Final = 0.99
"""The same for all sequences together, which are what is known of a new one."""
PRIOR_WEIGHT: Final = 4.0
"""What is known of others counts as so many promised tokens."""
_LEAST_TRUST: Final = 1e-3


@dataclass(slots=True)
class _Record:
    """Fading sums: of tokens that were right, and of the probabilities that were named."""

    right: float = 0.0
    promised: float = 0.0

    def add(self, promised: float, is_right: bool, keep: float) -> None:
        self.right = keep * self.right + is_right
        self.promised = keep * self.promised + promised

    def trust(self, prior: float) -> float:
        """Return the share of what is promised that comes true."""
        share = (self.right + PRIOR_WEIGHT * prior) / (self.promised + PRIOR_WEIGHT)
        return min(1.0, max(share, _LEAST_TRUST))


class _Offered(NamedTuple):
    """What each drafter offered to follow the first `length` tokens of a sequence."""

    length: int
    drafts: tuple[Draft, ...]


class JoinedDrafter:
    """Drafts with several drafters; satisfies spec_decode.draft.Drafter.

    Its drafts are trees, also where those of each drafter are chains.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._shared = [_Record() for _ in drafters]
        self._records: dict[int, list[_Record]] = {}
        self._offered: dict[int, _Offered] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for each in requests:
            self._learn(each.text)
        found = [each.draft(requests) for each in self._drafters]
        return [
            self._join(request, drafts)
            for request, drafts in zip(requests, zip(*found, strict=True), strict=True)
        ]

    def end(self, text: DraftText) -> None:
        self._learn(text)
        self._records.pop(text.seq_id, None)
        for each in self._drafters:
            each.end(text)

    def close(self) -> None:
        for each in self._drafters:
            each.close()

    def _learn(self, text: DraftText) -> None:
        """Compare what was offered last for a sequence with what came."""
        offered = self._offered.pop(text.seq_id, None)
        if offered is None:
            return
        came = text.tokens[offered.length :].tolist()
        own = self._records.setdefault(text.seq_id, [_Record() for _ in self._drafters])
        for draft, mine, shared in zip(offered.drafts, own, self._shared, strict=True):
            for promised, is_right in _outcomes(draft, came):
                mine.add(promised, is_right, FORGET)
                shared.add(promised, is_right, FORGET_SHARED)

    def _join(self, request: DraftRequest, drafts: tuple[Draft, ...]) -> Draft:
        text = request.text
        self._offered[text.seq_id] = _Offered(len(text.tokens), drafts)
        own = self._records.get(text.seq_id, self._shared)
        tree = TokenTree(int(text.tokens[-1]))
        for draft, mine, shared in zip(drafts, own, self._shared, strict=True):
            _feed(tree, draft, math.log(mine.trust(shared.trust(1.0))))
        return tree.send(request.at_most)[0] if len(tree) else NO_DRAFT


def _feed(tree: TokenTree, draft: Draft, log_trust: float) -> None:
    """Add a draft's tokens to `tree`, each less likely by `log_trust` than it says."""
    ids = {ROOT: ROOT}
    for idx, (token, parent, logp) in enumerate(
        zip(draft.tokens, draft.parents, draft.logps, strict=True)
    ):
        (ids[idx],) = tree.expand(ids[parent], {token: logp + log_trust})


def _outcomes(draft: Draft, came: Sequence[int]) -> list[tuple[float, bool]]:
    """Return, for each place of `came` up to the first wrong one, what was promised and came true.

    The promise of a place is the sum of the probabilities of all tokens that are offered there.
    """
    found: list[tuple[float, bool]] = []
    at = ROOT
    for token in came:
        below = [idx for idx, parent in enumerate(draft.parents) if parent == at]
        if not below:
            break
        promised = min(1.0, sum(math.exp(draft.logps[idx]) for idx in below))
        right = [idx for idx in below if draft.tokens[idx] == token]
        found.append((promised, bool(right)))
        if not right:
            break
        at = right[0]
    return found
