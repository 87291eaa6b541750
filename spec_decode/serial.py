"""Drafts by a draft model while the target waits: the serial runner of the token tree.

Owns one tree per sequence, which nodes of it have keys in the draft model's cache, and what the
model computes next: the tokens that it has not seen, then the most probable leaves, pass by pass,
all sequences together. Knows no tensors: the model is behind a protocol.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from spec_decode.draft import NO_DRAFT, ROOT, Draft, DraftRequest, Text
from spec_decode.tree import TokenTree

MAX_CHUNK: Final = 256
"""Rows of a text that the model has not seen, in one pass."""


class Rows(NamedTuple):
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


class DraftModel(Protocol):
    """A model with a cache of its own."""

    def open(self, text: Text) -> None:
        """Begin a sequence, whose prefix is empty."""

    def reserve(self, seq_id: int, num_rows: int) -> bool:
        """Make room for `num_rows` more rows; False: there is none."""

    def forward(self, rows: Sequence[Rows], *, num_top: int) -> list[list[dict[int, float]]]:
        """Compute `rows`, for which there is room, at most one entry per sequence.

        Returns, per entry and wanted row, the log-probabilities of the `num_top` likeliest next
        tokens; none where the model gives no numbers.
        """

    def keep(self, kept: Sequence[Kept]) -> None:
        """Move rows in the cache."""

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""


class Growth(NamedTuple):
    """How trees grow: at most `passes` times per draft the `width` best leaves are expanded.

    Each gets the `num_top` likeliest tokens; 1 makes chains of trees.
    """

    passes: int
    width: int
    num_top: int


class _Sequence:
    """A sequence's tree over the last of its `known` tokens, of which `fed` are in the cache.

    `places` has the nodes that are in the cache, behind the fed tokens. Invariant: if it has any,
    the root is fed.
    """

    def __init__(self, text: Text) -> None:
        self.tree = TokenTree(int(text.tokens[-1]))
        self.known = len(text.tokens)
        self.fed = 0
        self.places: dict[int, int] = {}
        # Of the draft under way.
        self.pending: list[int] = []
        self.passes_left = 0
        self.at_most = 0

    def take_in(self, text: Text) -> Kept | None:
        """Re-root the tree at the text's last token; returns what the cache keeps of it."""
        new = text.tokens[self.known :].tolist()
        if not new:
            return None
        rerooted = self.tree.reroot(new)
        places = self.places
        verified = tuple(places[node] for node in rerooted.verified if node in places)
        kept = [(idx, places[n]) for idx, n in enumerate(rerooted.kept) if n in places]
        self.fed += len(verified)
        self.known += len(new)
        self.places = {node: place for place, (node, _) in enumerate(kept)}
        assert not kept or self.fed == self.known, "a row of the live tree lacks its root"
        return Kept(text.seq_id, verified, tuple(place for _, place in kept))

    def begin(self, request: DraftRequest, passes: int) -> None:
        """Begin to draft."""
        self.pending = request.text.tokens[self.fed :].tolist()
        self.passes_left = passes
        self.at_most = request.at_most

    def next_nodes(self, width: int) -> list[int]:
        """Return the leaves to expand; none if the best draft does not change any more."""
        if not self.passes_left:
            return []
        # What follows the last of the best nodes is no better than that one.
        best = self.tree.best(self.at_most - 1)
        return [node for node in best if not self.tree.is_expanded(node)][:width]


class SerialDrafter:
    """Drafts with a draft model; satisfies spec_decode.draft.Drafter.

    A sequence that the model has no room for is not drafted; those that were drafted longest ago
    make room. The draft is the best one by the model's probabilities that `growth` finds.
    """

    def __init__(self, model: DraftModel, growth: Growth, *, max_length: int) -> None:
        """`max_length` is the most positions that the model computes."""
        self._model = model
        self._growth = growth
        self._max_length = max_length
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        fitting = [each for each in requests if self._fits(each)]
        kept = [self._take_in(each.text) for each in fitting]
        self._model.keep([each for each in kept if each is not None])
        for each in fitting:
            self._sequences[each.text.seq_id].begin(each, self._growth.passes)
        busy = {each.text.seq_id for each in fitting}
        going = [each.text.seq_id for each in fitting]
        while going:
            rows: list[Rows] = []
            nodes: list[list[int]] = []
            for seq_id in going:
                found = self._next_rows(seq_id, busy)
                if found is not None:
                    rows.append(found[0])
                    nodes.append(found[1])
            if rows:
                self._compute(rows, nodes)
            going = [each.seq_id for each in rows]
        return [self._send(each) for each in requests]

    def end(self, text: Text) -> None:
        if self._sequences.pop(text.seq_id, None) is not None:
            self._model.drop(text.seq_id)

    def _fits(self, request: DraftRequest) -> bool:
        return len(request.text.tokens) + request.at_most <= self._max_length

    def _take_in(self, text: Text) -> Kept | None:
        own = self._sequences.get(text.seq_id)
        if own is None:
            self._sequences[text.seq_id] = _Sequence(text)
            self._model.open(text)
            return None
        self._sequences.move_to_end(text.seq_id)
        return own.take_in(text)

    def _next_rows(self, seq_id: int, busy: set[int]) -> tuple[Rows, list[int]] | None:
        """Return the next rows of a sequence, and the nodes of those that are wanted.

        None if its draft is complete, or there is no room for more.
        """
        own = self._sequences[seq_id]
        if own.pending:
            tokens = tuple(own.pending[:MAX_CHUNK])
            is_last = len(tokens) == len(own.pending)
            rows = Rows(seq_id, tokens, tuple(range(ROOT, len(tokens) - 1)), int(is_last))
            nodes = [ROOT] if is_last else []
        else:
            tree, places = own.tree, own.places
            nodes = own.next_nodes(self._growth.width)
            above = map(tree.parent, nodes)
            parents = tuple(ROOT if each == ROOT else places[each] for each in above)
            rows = Rows(seq_id, tuple(map(tree.token, nodes)), parents, len(nodes))
        if not rows.tokens or not self._reserve(seq_id, len(rows.tokens), busy):
            return None
        return rows, nodes

    def _reserve(self, seq_id: int, num_rows: int, busy: set[int]) -> bool:
        """Make room in the model's cache; sequences that are not `busy` may lose theirs."""
        while not self._model.reserve(seq_id, num_rows):
            silent = next((each for each in self._sequences if each not in busy), None)
            if silent is None:
                return False
            del self._sequences[silent]
            self._model.drop(silent)
        return True

    def _compute(self, rows: Sequence[Rows], nodes: Sequence[Sequence[int]]) -> None:
        found = self._model.forward(rows, num_top=self._growth.num_top)
        fed: list[Kept] = []
        for each, own_nodes, wanted in zip(rows, nodes, found, strict=True):
            own, count = self._sequences[each.seq_id], len(each.tokens)
            if own.pending:
                del own.pending[:count]
                own.fed += count
                fed.append(Kept(each.seq_id, tuple(range(count)), ()))
            else:
                begin = len(own.places)
                own.places |= {node: begin + idx for idx, node in enumerate(own_nodes)}
            own.passes_left -= bool(own_nodes)
            for node, logps in zip(own_nodes, wanted, strict=True):
                own.tree.expand(node, logps)
        self._model.keep(fed)

    def _send(self, request: DraftRequest) -> Draft:
        own = self._sequences.get(request.text.seq_id)
        if own is None or own.known != len(request.text.tokens):
            return NO_DRAFT
        return own.tree.send(request.at_most)[0]
