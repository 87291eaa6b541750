"""A token tree: what may follow a sequence, with probabilities, while it is drafted and verified.

Owns the tree's nodes and their states, the choice of those to verify and of those to expand, and
what is left of the tree once the target has spoken. Several drafters may feed one tree. After
SwiftSpec (arXiv 2506.11309): the root is the last certain token; a node's weight is the sum of
log-probabilities from the root on. Knows no drafter and no cache, but says how one is compacted.

A node is a *candidate* until a drafter has said what may follow it, then it is *expanded*; it is
*in flight* while the target verifies it, and *verified* when it has become part of the sequence,
which ends its life in the tree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from spec_decode.draft import ROOT, Draft


class Rerooted(NamedTuple):
    """What a verdict left of a tree, by the nodes' ids before it.

    `verified` are the nodes that became part of the sequence, in its order; the last of them is
    the new root if `is_hit`: else the target's last token was not in the tree, which is empty.
    `kept` are the others that are left, in the order of their new ids 0, 1, ... Whoever stores
    something per node behind something per token of the sequence, in the order of ids, moves
    `verified` to the end of the one and then `kept` to the begin of the other.
    """

    is_hit: bool
    verified: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(slots=True)
class _TreeNode:
    token: int
    parent: int
    logp: float
    children: dict[int, int] = field(default_factory=dict)
    is_expanded: bool = False


class TokenTree:
    """A tree over a root token, which is ROOT; other nodes are 0, 1, ..., parents before children.

    Invariant: the ids of a tree that was just re-rooted are in storage order: its best path first,
    then other branches, each from its best node down.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._nodes: list[_TreeNode] = []
        self._top = _TreeNode(root, ROOT, 0.0)
        self._in_flight: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def in_flight(self) -> frozenset[int]:
        """Return the nodes that the target verifies."""
        return self._in_flight

    def is_expanded(self, node: int) -> bool:
        """Return whether a drafter has said what may follow `node`."""
        return self._at(node).is_expanded

    def token(self, node: int) -> int:
        """Return the token of `node`."""
        return self._at(node).token

    def parent(self, node: int) -> int:
        """Return the node that `node`, not ROOT, follows."""
        return self._nodes[node].parent

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens behind the root up to `node`; none for ROOT."""
        tokens = []
        while node != ROOT:
            tokens.append(self._nodes[node].token)
            node = self._nodes[node].parent
        return tuple(reversed(tokens))

    def expand(self, node: int, logps: Mapping[int, float]) -> list[int]:
        """Add tokens that may follow `node`, with their log-probabilities (at most 0) after it.

        Returns their ids. A token that another drafter has named keeps its greater probability.
        """
        parent = self._at(node)
        parent.is_expanded = True
        ids = []
        for token, logp in logps.items():
            assert logp <= 0.0, f"{logp} is no log-probability"
            child = parent.children.get(token)
            if child is None:
                child = parent.children[token] = len(self._nodes)
                self._nodes.append(_TreeNode(token, node, logp))
            else:
                self._nodes[child].logp = max(self._nodes[child].logp, logp)
            ids.append(child)
        return ids

    def best(self, count: int) -> list[int]:
        """Return the `count` nodes of greatest weight, best first, parents before children.

        No other choice of as many nodes that has the parent of each has a greater sum of
        probabilities: no child is more likely than its parent.
        """
        return [node for node, _ in self.weights(count)]

    def weights(self, count: int) -> list[tuple[int, float]]:
        """Return the `count` nodes of greatest weight and their weights, best first."""
        return list(islice(self._by_weight(), count))

    def best_candidates(self, count: int) -> list[int]:
        """Return the `count` nodes of greatest weight that are not expanded, perhaps ROOT."""
        if not self._top.is_expanded:
            return [ROOT][:count]
        candidates = (n for n, _ in self._by_weight() if not self._nodes[n].is_expanded)
        return list(islice(candidates, count))

    def send(self, count: int) -> tuple[Draft, list[int]]:
        """Put the `count` best nodes in flight; return them as a draft, and their ids.

        The draft is in storage order. Its tokens' places are the ids' places in the list.
        """
        assert not self._in_flight, "the target has not spoken"
        chosen = set(self.best(count))
        self._in_flight = frozenset(chosen)
        ids = self._stored(chosen)
        place = {node: idx for idx, node in enumerate(ids)} | {ROOT: ROOT}
        tokens = tuple(self._nodes[node].token for node in ids)
        parents = tuple(place[self._nodes[node].parent] for node in ids)
        return Draft(tokens, parents, tuple(self._nodes[node].logp for node in ids)), ids

    def reroot(self, tokens: Sequence[int]) -> Rerooted:
        """Make the last of `tokens` the root: the target's tokens behind the present root.

        All but the last were accepted; the last, the bonus, is a hit wherever in the tree it is,
        sent or not. On a miss the tree is empty.
        """
        assert tokens, "a verdict has at least a token"
        self._in_flight = frozenset()
        verified: list[int] = []
        at = self._top
        for token in tokens:
            child = at.children.get(token)
            if child is None:
                self._nodes = []
                self._top = _TreeNode(tokens[-1], ROOT, 0.0)
                self.root = tokens[-1]
                return Rerooted(False, tuple(verified), ())
            verified.append(child)
            at = self._nodes[child]
        self._top, self.root = at, at.token
        kept = self._stored(None)
        place = {node: idx for idx, node in enumerate(kept)} | {verified[-1]: ROOT}
        self._nodes = [self._nodes[node] for node in kept]
        for each in self._nodes:
            each.parent = place[each.parent]
        for each in (self._top, *self._nodes):
            each.children = {token: place[child] for token, child in each.children.items()}
        self._top.parent = ROOT
        return Rerooted(True, tuple(verified), tuple(kept))

    def _at(self, node: int) -> _TreeNode:
        return self._top if node == ROOT else self._nodes[node]

    def _by_weight(self) -> Iterator[tuple[int, float]]:
        """Yield nodes and weights, greatest first; of equal ones the parent, then the older."""
        heap = [(-self._nodes[each].logp, each) for each in self._top.children.values()]
        heapq.heapify(heap)
        while heap:
            cost, node = heapq.heappop(heap)
            yield node, -cost
            for child in self._nodes[node].children.values():
                heapq.heappush(heap, (cost - self._nodes[child].logp, child))

    def _stored(self, chosen: set[int] | None) -> list[int]:
        """Return the nodes of `chosen` (None: all below the root) in storage order.

        The best path leads from the root to the node of greatest weight among the deepest nodes of
        their branches.
        """
        is_in = (lambda node: True) if chosen is None else chosen.__contains__
        # The best end below each node, by weight: children come after parents in weight's order.
        order = [(node, weight) for node, weight in self._by_weight() if is_in(node)]
        reach: dict[int, float] = {}
        for node, weight in reversed(order):
            below = [reach[c] for c in self._nodes[node].children.values() if c in reach]
            reach[node] = max(below, default=weight)
        stored: list[int] = []
        stack = self._by_reach(self._top, reach)
        while stack:
            node = stack.pop()
            stored.append(node)
            stack += self._by_reach(self._nodes[node], reach)
        return stored

    def _by_reach(self, node: _TreeNode, reach: Mapping[int, float]) -> list[int]:
        """Return the children of `node` that have a reach, the best one last."""
        children = [each for each in node.children.values() if each in reach]
        return sorted(children, key=lambda each: (reach[each], -each))


def log_shares(counts: Mapping[int, int]) -> dict[int, float]:
    """Return each token's share of all counts as a log-probability."""
    total = sum(counts.values())
    return {token: math.log(count / total) for token, count in counts.items()}
