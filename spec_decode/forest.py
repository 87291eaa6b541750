"""The trees of a draft model's sequences, and how a pass of the model makes them grow.

Owns one token tree per sequence, which nodes of it have keys in the model's cache, and the rows of
the next pass: tokens that the model has not seen, or the most probable leaves. A runner (serial.py,
rounds.py) decides when a pass is made and for whom. Knows no tensors: the model is behind a
protocol.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from spec_decode.draft import NO_DRAFT, ROOT, Draft
from spec_decode.tree import TokenTree

MAX_CHUNK: Final = 256
"""Rows of texts that the model has not seen, in one pass: a long prompt takes several."""
MIN_CHUNK: Final = 8
"""Of these, so many of each sequence, whatever others feed: who only goes on waits for nobody."""
FIRST_SHARE: Final = 0.7
"""The probability of a likeliest token, before the model has named one."""
_RATE: Final = 0.05


class PassRows(NamedTuple):
    """Rows of a sequence for one pass of a draft model.

    The cache has the sequence's verified prefix and behind it the rows of its live tree, at places
    0, 1, ... in the order in which they were computed. Token i follows the row at place
    `parents[i]`, which may be of this pass, or, if ROOT, the end of the prefix. What may follow is
    wanted of the last `num_wanted` rows.
    """

    seq_id: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    num_wanted: int


class Kept(NamedTuple):
    """What is left of a live tree, as places: of the others nothing is used again.

    The rows at `verified` become the prefix's last ones; those at `kept` are the new live tree.
    """

    seq_id: int
    verified: tuple[int, ...]
    kept: tuple[int, ...]


class CachedModel(Protocol):
    """A model with a cache of its own."""

    @property
    def vocab_size(self) -> int:
        """Return how many tokens there are: it computes no others."""

    def open(self, seq_id: int, *, num_prompt: int) -> None:
        """Begin a sequence, whose prefix is empty; its first `num_prompt` tokens are prompt."""

    def reserve(self, seq_id: int, num_rows: int) -> bool:
        """Make room for `num_rows` more rows; False: there is none."""

    def forward(self, rows: Sequence[PassRows], *, num_top: int) -> list[list[dict[int, float]]]:
        """Compute `rows`, for which there is room, at most one entry per sequence.

        Returns, per entry and wanted row, the log-probabilities of the `num_top` likeliest next
        tokens; none where the model gives no numbers.
        """

    def keep(self, kept: Sequence[Kept]) -> None:
        """Move rows in the cache."""

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""


class Growth(NamedTuple):
    """How trees grow: the `width` best leaves are expanded in a pass, `passes` times per draft.

    Each gets the `num_top` likeliest tokens; 1 makes chains of trees.
    """

    passes: int
    width: int
    num_top: int


class Prospects(NamedTuple):
    """The tokens that a step is expected to give, and how many more after a pass."""

    tokens: float
    gain: float


class _Sequence:
    """A sequence's tree over the last of its `known` tokens; `unfed` are not in the cache.

    `places` has the nodes that are in the cache, behind the fed tokens. Invariant: if it has any,
    no token is unfed.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tree = TokenTree(tokens[-1])
        self.known = len(tokens)
        self.unfed = list(tokens)
        self.places: dict[int, int] = {}

    def advance(
        self, seq_id: int, tokens: Sequence[int], *, reuses_tree: bool
    ) -> tuple[Kept, bool]:
        """Re-root the tree at the last of `tokens`, unless a new one begins.

        Returns what the cache keeps of it, and whether the tree had that token.
        """
        rerooted = self.tree.reroot(tokens)
        places = self.places
        if not reuses_tree:
            self.tree, places = TokenTree(tokens[-1]), {}
        verified = tuple(places[node] for node in rerooted.verified if node in places)
        kept = [(idx, places[n]) for idx, n in enumerate(rerooted.kept) if n in places]
        self.known += len(tokens)
        self.unfed += tokens[len(verified) :]
        self.places = {node: place for place, (node, _) in enumerate(kept)}
        assert not (kept and self.unfed), "a row of the live tree lacks its root"
        return Kept(seq_id, verified, tuple(place for _, place in kept)), rerooted.is_hit

    def leaves(self, width: int, reach: int) -> list[int]:
        """Return the leaves to expand: of the `reach` best nodes the first `width` that are."""
        if not self.tree.is_expanded(ROOT):
            return [ROOT]
        return [node for node in self.tree.best(reach) if not self.tree.is_expanded(node)][:width]


class Forest:
    """The sequences of one draft model, by id; those that are silent longest make room."""

    def __init__(self, model: CachedModel, growth: Growth, *, reuses_trees: bool = True) -> None:
        """Unless it `reuses_trees`, each verdict begins a new one: the model sees all tokens again.

        For a model that computes better with what the verdict brings.
        """
        self._model = model
        self._growth = growth
        self._reuses_trees = reuses_trees
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()
        self._best_share = FIRST_SHARE

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def known(self, seq_id: int) -> int:
        """Return how many tokens of a sequence are known; 0: it is not there."""
        own = self._sequences.get(seq_id)
        return 0 if own is None else own.known

    def advance(self, texts: Mapping[int, tuple[Sequence[int], int]]) -> dict[int, bool]:
        """Let sequences go on by these tokens; a new one has the number of prompt tokens beside it.

        Returns, of those that had a tree, whether it goes on.
        """
        kept: list[Kept] = []
        hits: dict[int, bool] = {}
        for seq_id, (tokens, num_prompt) in texts.items():
            own = self._sequences.get(seq_id)
            if own is None:
                self._sequences[seq_id] = _Sequence(tokens)
                self._model.open(seq_id, num_prompt=num_prompt)
                continue
            self._sequences.move_to_end(seq_id)
            if tokens:
                had_tree = own.tree.is_expanded(ROOT)
                moves, is_hit = own.advance(seq_id, tokens, reuses_tree=self._reuses_trees)
                kept.append(moves)
                if had_tree:
                    hits[seq_id] = is_hit
        self._model.keep(kept)
        return hits

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Forget those of `seq_ids` that are there."""
        for seq_id in seq_ids:
            if self._sequences.pop(seq_id, None) is not None:
                self._model.drop(seq_id)

    def has_draft(self, seq_id: int) -> bool:
        """Return whether anything may follow a sequence's last token."""
        own = self._sequences.get(seq_id)
        return own is not None and len(own.tree) > 0

    def prospects(self, seq_id: int, at_most: int) -> Prospects:
        """Return what a draft of `at_most` tokens promises, now and after a pass.

        By the model's probabilities: a node of the draft counts as much as it is likely, the bonus
        token as one; a leaf's best child as the best ones were so far.
        """
        own = self._sequences[seq_id]
        best = own.tree.weights(at_most)
        tokens = 1.0 + sum(math.exp(weight) for _, weight in best)
        if not own.tree.is_expanded(ROOT):
            return Prospects(tokens, self._best_share)
        # What follows the last node of a whole draft is no better than that one.
        inner = best if len(best) < at_most else best[:-1]
        leaves = [weight for node, weight in inner if not own.tree.is_expanded(node)]
        reached = leaves[: self._growth.width]
        return Prospects(tokens, self._best_share * sum(map(math.exp, reached)))

    def lag(self, seq_id: int) -> int:
        """Return how many tokens of a sequence the model has not seen."""
        return len(self._sequences[seq_id].unfed)

    def draft(self, seq_id: int, at_most: int) -> Draft:
        """Put the best draft of a sequence in flight and return it; it may be empty."""
        own = self._sequences.get(seq_id)
        return NO_DRAFT if own is None else own.tree.send(at_most)[0]

    def grow(self, reach: Mapping[int, int], *, busy: Collection[int]) -> dict[int, bool]:
        """Make one pass for the sequences that have something to compute.

        Of each the leaves among its best `reach` nodes count. Returns those that took part, and
        whether their trees grew. Sequences that are not `busy` may lose their place in the cache.
        """
        rows: list[PassRows] = []
        nodes: list[list[int]] = []
        seq_ids: list[int] = []
        num_left = MAX_CHUNK
        for seq_id, count in reach.items():
            found = self._next_rows(seq_id, count, busy, max_fed=max(num_left, MIN_CHUNK))
            if found is not None:
                num_left -= len(found[0].tokens)
                seq_ids.append(seq_id)
                rows.append(found[0])
                nodes.append(found[1])
        if rows:
            self._compute(seq_ids, rows, nodes)
        return {seq_id: bool(own) for seq_id, own in zip(seq_ids, nodes, strict=True)}

    def _next_rows(
        self, seq_id: int, reach: int, busy: Collection[int], *, max_fed: int
    ) -> tuple[PassRows, list[int]] | None:
        """Return the next rows of a sequence, and the nodes of those that are wanted.

        None if there is nothing to compute, or no room.
        """
        own = self._sequences.get(seq_id)
        if own is None:
            return None
        if own.unfed:
            tokens = tuple(own.unfed[:max_fed])
            is_last = len(tokens) == len(own.unfed)
            rows = PassRows(seq_id, tokens, tuple(range(ROOT, len(tokens) - 1)), int(is_last))
            nodes = [ROOT] if is_last else []
        else:
            tree, places = own.tree, own.places
            nodes = own.leaves(self._growth.width, reach)
            above = map(tree.parent, nodes)
            parents = tuple(ROOT if each == ROOT else places[each] for each in above)
            rows = PassRows(seq_id, tuple(map(tree.token, nodes)), parents, len(nodes))
        if not rows.tokens or not self._reserve(seq_id, len(rows.tokens), busy):
            return None
        return rows, nodes

    def _reserve(self, seq_id: int, num_rows: int, busy: Collection[int]) -> bool:
        """Make room in the model's cache."""
        while not self._model.reserve(seq_id, num_rows):
            silent = next((each for each in self._sequences if each not in busy), None)
            if silent is None:
                return False
            self.drop([silent])
        return True

    def _compute(
        self, seq_ids: Sequence[int], rows: Sequence[PassRows], nodes: Sequence[Sequence[int]]
    ) -> None:
        found = self._model.forward(rows, num_top=self._growth.num_top)
        fed: list[Kept] = []
        for seq_id, each, own_nodes, wanted in zip(seq_ids, rows, nodes, found, strict=True):
            own, count = self._sequences[seq_id], len(each.tokens)
            if own.unfed:
                del own.unfed[:count]
                fed.append(Kept(seq_id, tuple(range(count)), ()))
            else:
                begin = len(own.places)
                own.places |= {node: begin + idx for idx, node in enumerate(own_nodes)}
            for node, logps in zip(own_nodes, wanted, strict=True):
                own.tree.expand(node, logps)
                share = math.exp(max(logps.values(), default=-math.inf))
                self._best_share += _RATE * (share - self._best_share)
        self._model.keep(fed)
