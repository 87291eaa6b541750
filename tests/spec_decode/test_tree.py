"""The token tree against brute force: the best nodes, and what a verdict leaves."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_decode.draft import ROOT
from spec_decode.tree import TokenTree, log_shares

Path = tuple[int, ...]
VOCAB = 3


def some_tree(rng: random.Random, num_expansions: int) -> TokenTree:
    """Return a tree whose probabilities are powers of two, so that their sums are exact."""
    tree = TokenTree(root=9)
    for _ in range(num_expansions):
        node = rng.randint(ROOT, len(tree) - 1)
        tokens = rng.sample(range(VOCAB), rng.randint(0, VOCAB))
        tree.expand(node, {each: -float(rng.randint(0, 4)) for each in tokens})
    return tree


def weight(tree: TokenTree, node: int) -> float:
    return sum(tree._nodes[each].logp for each in ancestors(tree, node))


def ancestors(tree: TokenTree, node: int) -> list[int]:
    """Return `node` and its ancestors but the root."""
    found = []
    while node != ROOT:
        found.append(node)
        node = tree._nodes[node].parent
    return found


def described(tree: TokenTree) -> dict[Path, tuple[float, bool]]:
    """Return by path each node's log-probability and whether it is expanded."""
    return {
        tree.path(node): (tree._nodes[node].logp, tree.is_expanded(node))
        for node in range(len(tree))
    }


@pytest.mark.parametrize("seed", range(10))
def test_the_best_nodes_are_those_of_the_best_closed_subset(seed: int) -> None:
    tree = some_tree(random.Random(seed), 4)
    nodes = range(len(tree))
    for count in range(len(tree) + 1):
        closed = [
            chosen
            for chosen in combinations(nodes, count)
            if all(set(ancestors(tree, node)) <= set(chosen) for node in chosen)
        ]
        best = max(sum(2.0 ** weight(tree, node) for node in chosen) for chosen in closed)
        chosen = tree.best(count)
        assert tuple(sorted(chosen)) in closed
        assert sum(2.0 ** weight(tree, node) for node in chosen) == best
        assert [weight(tree, node) for node in chosen] == sorted(
            (weight(tree, node) for node in chosen), reverse=True
        )
    assert tree.best(len(tree) + 5) == tree.best(len(tree))


@pytest.mark.parametrize("seed", range(8))
def test_the_best_candidates_are_expanded_next(seed: int) -> None:
    tree = some_tree(random.Random(seed), 4)
    if not tree.is_expanded(ROOT):
        assert tree.best_candidates(3) == [ROOT]
        return
    leaves = [node for node in range(len(tree)) if not tree.is_expanded(node)]
    for width in range(len(leaves) + 2):
        chosen = tree.best_candidates(width)
        assert len(set(chosen)) == min(width, len(leaves))
        assert set(chosen) <= set(leaves)
        best = sorted((weight(tree, node) for node in leaves), reverse=True)[:width]
        assert [weight(tree, node) for node in chosen] == best


def test_growing_best_first_finds_the_best_nodes_of_an_infinite_tree() -> None:
    """Expanding `n` times is enough for the best `n`, whatever lies below."""
    shares = {0: math.log(0.6), 1: math.log(0.3), 2: math.log(0.1)}
    tree = TokenTree(root=9)
    for _ in range(7):
        for node in tree.best_candidates(1):
            tree.expand(node, shares)
    paths = [path for length in (1, 2, 3, 4, 5, 6, 7) for path in _paths(length)]
    best = sorted(paths, key=lambda path: -sum(shares[token] for token in path))[:7]
    assert {tree.path(node) for node in tree.best(7)} == set(best)


def _paths(length: int) -> list[Path]:
    if not length:
        return [()]
    return [(*path, token) for path in _paths(length - 1) for token in range(VOCAB)]


def test_a_draft_stores_its_best_path_first() -> None:
    tree = TokenTree(root=9)
    tree.expand(ROOT, {5: -1.0, 6: -0.5})
    tree.expand(0, {7: -0.1})  # 5 7: -1.1
    tree.expand(1, {8: -3.0})  # 6 8: -3.5
    draft, ids = tree.send(4)
    assert draft.tokens == (5, 7, 6, 8)
    assert draft.parents == (ROOT, 0, ROOT, 2)
    assert ids == [0, 2, 1, 3]
    assert tree.in_flight == {0, 1, 2, 3}
    with pytest.raises(AssertionError, match="has not spoken"):
        tree.send(1)


@pytest.mark.parametrize("seed", range(10))
def test_drafts_are_the_best_nodes_with_parents_first(seed: int) -> None:
    tree = some_tree(random.Random(seed), 5)
    chosen = tree.best(6)
    draft, ids = tree.send(6)
    assert sorted(ids) == sorted(chosen)
    assert all(parent < idx for idx, parent in enumerate(draft.parents))
    assert [draft.path(idx) for idx in range(len(ids))] == [tree.path(node) for node in ids]
    if ids:
        ends = [node for node in chosen if not any(tree._nodes[n].parent == node for n in chosen)]
        greatest = max(weight(tree, node) for node in ends)
        first_path = _length_of_first_path(draft.parents)
        assert weight(tree, ids[first_path - 1]) == greatest


def _length_of_first_path(parents: tuple[int, ...]) -> int:
    length = 1
    while length < len(parents) and parents[length] == length - 1:
        length += 1
    return length


def test_two_drafters_feed_one_tree() -> None:
    tree = TokenTree(root=9)
    tree.expand(ROOT, log_shares({1: 3, 2: 1}))
    assert tree.expand(ROOT, {2: math.log(0.9), 3: math.log(0.1)}) == [1, 2]
    assert [tree.path(node) for node in tree.best(3)] == [(2,), (1,), (3,)]
    tree.expand(1, {4: 0.0})
    assert tree.path(tree.best(2)[1]) == (2, 4)


@given(
    seed=st.integers(0, 2**32),
    num_expansions=st.integers(0, 12),
    verdicts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=3),
    count=st.integers(0, 8),
)
def test_a_rerooted_tree_is_one_built_of_the_paths_that_survive(
    seed: int, num_expansions: int, verdicts: list[list[int]], count: int
) -> None:
    rng = random.Random(seed)
    tree = some_tree(rng, num_expansions)
    for verdict in verdicts:
        before = described(tree)
        paths = [tree.path(node) for node in range(len(tree))]
        tree.send(count)
        result = tree.reroot(verdict)
        key = tuple(verdict)
        assert result.is_hit == (key in before)
        survivors = {path[len(key) :]: before[path] for path in before if path[: len(key)] == key}
        is_expanded = survivors.pop((), (0.0, False))[1]
        assert described(tree) == survivors
        assert tree.is_expanded(ROOT) == is_expanded
        assert tree.root == verdict[-1]
        assert not tree.in_flight
        # Whoever stores something per node finds it by the old ids.
        on_the_way = [key[: length + 1] for length in range(len(key))]
        assert [paths[node] for node in result.verified] == [p for p in on_the_way if p in before]
        assert [paths[node][len(key) :] for node in result.kept] == [
            tree.path(node) for node in range(len(tree))
        ]
        # The best path is first, and growth goes on as in a tree that was built so.
        parents = tuple(tree._nodes[node].parent for node in range(len(tree)))
        assert all(parent < idx for idx, parent in enumerate(parents))
        if len(tree):
            ends = [node for node in range(len(tree)) if node not in parents]
            greatest = max(weight(tree, node) for node in ends)
            assert weight(tree, _length_of_first_path(parents) - 1) == greatest
        if not tree.is_expanded(ROOT):
            tree.expand(ROOT, {0: -1.0, 2: -1.0})


def test_a_bonus_that_was_not_sent_is_a_hit() -> None:
    """SwiftSpec's t6: in the drafter's tree, not in the part that the target verified."""
    tree = TokenTree(root=9)
    tree.expand(ROOT, {1: -0.1, 2: -5.0})
    tree.expand(1, {3: -0.2})
    draft, _ = tree.send(1)
    assert draft.tokens == (1,)
    result = tree.reroot([2])
    assert result.is_hit
    assert tree.root == 2
    assert [tree.path(node) for node in range(len(tree))] == [(3,)]


def test_a_miss_starts_a_fresh_tree_at_the_bonus_token() -> None:
    tree = TokenTree(root=9)
    tree.expand(ROOT, {1: -0.1})
    tree.expand(0, {3: -0.2})
    tree.send(2)
    result = tree.reroot([1, 7])
    assert result == (False, (0,), ())
    assert tree.root == 7
    assert not len(tree)
    assert tree.best_candidates(4) == [ROOT]
