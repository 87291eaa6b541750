"""Drafts from what was written before: the longest suffix of a sequence that occurs elsewhere.

Owns, per sequence, an index of its own tokens and, per tenant, of recent outputs of others; both
are bounded. What followed at the other places is what may follow now, with counts for
probabilities (suffix decoding, arXiv 2411.04975; matching n-grams is the same with short
suffixes). Knows no device, no clock and no step.

There is no suffix tree in memory, which takes hundreds of bytes per token here. The index has the
places of each token, and the few places that end as the sequence does are compared backwards at
once: they are the leaves below one node of the suffix tree.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spec_decode.draft import NO_DRAFT, Draft, Drafter, DraftRequest, DraftText
from spec_decode.tree import TokenTree, log_shares
from topspin.plan.speculation import Speculation

Tokens = npt.NDArray[np.int32]

MAX_OWN_TOKENS: Final = 2**16
"""Of a sequence's own tokens, only so many of the last ones are indexed when it is first seen."""
MAX_TENANT_TOKENS: Final = 2**16
"""Of a tenant's outputs, so many of the last ones at most are indexed, and half of it at least."""
MAX_SHARED_TOKENS: Final = 2**18
"""Of all tenants together; the tenants that have been silent longest are forgotten."""
MAX_PLACES: Final = 64
"""So many of the last places at which the last two tokens occur are compared further."""
MAX_BRANCHES: Final = 32
"""So many of the last places of the longest match are counted."""
_MAX_SCANNED: Final = 4096
_BREAK: Final = -1
"""In an index, between texts and before the first one: no token."""


class SuffixLimits(NamedTuple):
    """The settings of a SuffixDrafter.

    A match has `min_match` to `max_match` tokens and its draft at most `factor` times as many
    (None: no such limit). No token of a smaller share than `min_share` is drafted. Drafts are
    chains unless they may have `branches`; without `shares` only a sequence's own tokens count.
    """

    min_match: int = 2
    max_match: int = 32
    factor: float | None = 1.0
    min_share: float = 0.1
    branches: bool = False
    shares: bool = True


DEFAULT_LIMITS: Final = SuffixLimits()
_NGRAM_LIMITS: Final = SuffixLimits(
    min_match=5, max_match=5, factor=None, min_share=0.0, shares=False
)


class Match(NamedTuple):
    """Places whose last `length` tokens are those asked for: the places behind them, ascending."""

    length: int
    ends: npt.NDArray[np.int64]


NO_MATCH: Final = Match(0, np.zeros(0, dtype=np.int64))


class SuffixIndex:
    """Texts, one behind the other, and the places of each token in them."""

    def __init__(self, max_match: int) -> None:
        """Find matches of at most `max_match` tokens."""
        self._max_match = max_match
        # Breaks before the first token: every place has max_match tokens before it.
        self._tokens = np.full(max_match + 64, _BREAK, dtype=np.int32)
        self._end = max_match
        self._places: dict[int, array[int]] = {}
        self._back = np.arange(max_match)

    def __len__(self) -> int:
        return self._end - self._max_match

    def append(self, tokens: Tokens) -> None:
        """Append tokens to the last text."""
        begin, end = self._end, self._end + len(tokens)
        self._grow(end)
        self._tokens[begin:end] = tokens
        places = self._places
        for place, token in enumerate(tokens.tolist(), begin):
            found = places.get(token)
            if found is None:
                found = places[token] = array("i")
            found.append(place)
        self._end = end

    def end_text(self) -> None:
        """Begin another text: no match and no draft crosses the border."""
        self._grow(self._end + 1)
        self._tokens[self._end] = _BREAK
        self._end += 1

    def _grow(self, size: int) -> None:
        if size > len(self._tokens):
            grown = np.full(max(size, 2 * len(self._tokens)), _BREAK, dtype=np.int32)
            grown[: self._end] = self._tokens[: self._end]
            self._tokens = grown

    def longest_match(self, suffix: Tokens, *, at_least: int, is_own: bool) -> Match:
        """Return the places before which the longest suffix of `suffix` occurs.

        NO_MATCH if that has fewer than `at_least` tokens. `is_own`: `suffix` is the end of the
        last text, which is no place.
        """
        found = self._places.get(int(suffix[-1]))
        if found is None:
            return NO_MATCH
        places = np.frombuffer(found[-_MAX_SCANNED:], dtype=np.int32).astype(np.int64)
        if is_own:
            places = places[:-1]
        if len(suffix) > 1 and self._max_match > 1:
            longer = places[self._tokens[places - 1] == suffix[-2]]
            if len(longer):
                places = longer
        if not len(places):
            return NO_MATCH
        places = places[-MAX_PLACES:]
        wanted = suffix[::-1][: self._max_match]
        before = self._tokens[places[:, None] - self._back[: len(wanted)]]
        is_equal = before == wanted
        lengths = np.where(is_equal.all(1), len(wanted), is_equal.argmin(1))
        length = int(lengths.max())
        if length < at_least:
            return NO_MATCH
        return Match(length, places[lengths == length] + 1)

    def after(self, ends: npt.NDArray[np.int64], count: int, *, is_own: bool) -> list[list[int]]:
        """Return the up to `count` tokens behind each of `ends`.

        Where the last text ends and `is_own`, it goes on as if it repeated what has led to its
        end; else there is nothing behind the end of a text.
        """
        steps = np.arange(count)
        if is_own:
            steps = steps % (self._end - ends)[:, None]
        else:
            self._grow(self._end + count)
        rows: list[list[int]] = self._tokens[ends[:, None] + steps].tolist()
        return [row[: row.index(_BREAK)] if _BREAK in row else row for row in rows]


def limits_of(settings: Speculation) -> SuffixLimits:
    """Return the limits that `settings` ask for; one bound of an n-gram is the other's default."""
    is_ngram = settings.method == "ngram"
    limits = _NGRAM_LIMITS if is_ngram else DEFAULT_LIMITS
    low, high = settings.prompt_lookup_min, settings.prompt_lookup_max
    if is_ngram:
        low, high = low or high, high or low
    factor = settings.suffix_decoding_max_spec_factor
    share = settings.suffix_decoding_min_token_prob
    if low is None:
        low = min(limits.min_match, high or limits.min_match)
    return limits._replace(
        min_match=low,
        max_match=high or max(low, limits.max_match),
        factor=limits.factor if factor is None else factor,
        min_share=limits.min_share if share is None else share,
        branches=settings.branches,
    )


class _Own:
    """A sequence's own index; `known` of its tokens have been looked at."""

    def __init__(self, max_match: int, tokens: Tokens) -> None:
        self.index = SuffixIndex(max_match)
        self.known = max(0, len(tokens) - MAX_OWN_TOKENS)
        self.append(tokens)

    def append(self, tokens: Tokens) -> None:
        """Append those of `tokens` that are new."""
        self.index.append(tokens[self.known :])
        self.known = len(tokens)


class _Tenant:
    """A tenant's recent outputs, in a younger index and an older one, which ends first."""

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        self.young = SuffixIndex(max_match)
        self.old = SuffixIndex(max_match)

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def add(self, tokens: Tokens) -> None:
        half = MAX_TENANT_TOKENS // 2
        tokens = tokens[-half + 1 :]
        if len(self.young) + len(tokens) >= half:
            self.old, self.young = self.young, SuffixIndex(self._max_match)
        self.young.append(tokens)
        self.young.end_text()


class SuffixDrafter:
    """Drafts what followed the longest match; satisfies spec_decode.draft.Drafter.

    A sequence's own text is preferred to others' where their matches are equally long.
    """

    def __init__(self, limits: SuffixLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._own: dict[int, _Own] = {}
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._num_shared = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(each.text, each.at_most) for each in requests]

    def close(self) -> None:
        """Do nothing: it holds memory only."""

    def end(self, text: DraftText) -> None:
        self._own.pop(text.seq_id, None)
        output = text.tokens[text.num_prompt :]
        if not self._limits.shares or not len(output):
            return
        tenant = self._tenants.pop(text.salt, None) or _Tenant(self._limits.max_match)
        self._num_shared -= len(tenant)
        tenant.add(output)
        self._num_shared += len(tenant)
        self._tenants[text.salt] = tenant
        while self._num_shared > MAX_SHARED_TOKENS:
            _, silent = self._tenants.popitem(last=False)
            self._num_shared -= len(silent)

    def _draft(self, text: DraftText, at_most: int) -> Draft:
        limits = self._limits
        own = self._own.get(text.seq_id)
        if own is None:
            own = self._own[text.seq_id] = _Own(limits.max_match, text.tokens)
        else:
            own.append(text.tokens)
        suffix = text.tokens[-limits.max_match :]
        index, is_own = own.index, True
        match = index.longest_match(suffix, at_least=limits.min_match, is_own=True)
        tenant = self._tenants.get(text.salt)
        if tenant is not None:
            for other in (tenant.young, tenant.old):
                least = max(limits.min_match, match.length + 1)
                found = other.longest_match(suffix, at_least=least, is_own=False)
                if found.length:
                    match, index, is_own = found, other, False
        if not match.length:
            return NO_DRAFT
        if limits.factor is not None:
            at_most = min(at_most, int(limits.factor * match.length))
        if at_most < 1:
            return NO_DRAFT
        rows = index.after(match.ends[-MAX_BRANCHES:], at_most, is_own=is_own)
        if not limits.branches:
            return _likeliest(rows, limits.min_share)
        return _tree_of(rows, at_most, limits.min_share)


def drafter_of(settings: Speculation | None) -> Drafter | None:
    """Return the drafter that `settings` ask for; None: none."""
    return None if settings is None else SuffixDrafter(limits_of(settings))


def _likeliest(rows: list[list[int]], min_share: float) -> Draft:
    """Return the chain of tokens each of which has followed the one before it most often.

    Of equals the one of the last row; ends where that has a smaller share than `min_share`.
    """
    chain: list[int] = []
    logps: list[float] = []
    depth = 0
    while len(rows) > 1:
        rows = [row for row in rows if len(row) > depth]
        if not rows:
            return Draft.chain(chain, logps)
        # A Counter keeps the order of first meetings.
        token, count = Counter(row[depth] for row in reversed(rows)).most_common(1)[0]
        if count < min_share * len(rows):
            return Draft.chain(chain, logps)
        chain.append(token)
        logps.append(math.log(count / len(rows)))
        rows = [row for row in rows if row[depth] == token]
        depth += 1
    rest = rows[0][depth:]
    return Draft.chain(chain + rest, logps + [0.0] * len(rest))


def _tree_of(rows: list[list[int]], count: int, min_share: float) -> Draft:
    """Return the `count` likeliest continuations by the counts in `rows`, as a tree."""
    tree = TokenTree(_BREAK)
    below: dict[int, list[list[int]]] = {}
    chosen = 0
    while chosen < count and (candidates := tree.best_candidates(1)):
        (node,) = candidates
        depth = len(tree.path(node))
        rows_here = [row for row in below.get(node, rows) if len(row) > depth]
        counts = Counter(row[depth] for row in reversed(rows_here))
        shares = {
            token: logp
            for token, logp in log_shares(counts).items()
            if counts[token] >= min_share * len(rows_here)
        }
        for token, child in zip(shares, tree.expand(node, shares), strict=True):
            below[child] = [row for row in rows_here if row[depth] == token]
        chosen += 1
    return tree.send(count)[0]
