"""Trees of several sequences: what a draft promises, and what a pass may feed."""

from __future__ import annotations

import math

import pytest

from spec_decode.forest import FIRST_SHARE, MAX_CHUNK, MIN_CHUNK, Forest, Growth
from tests.spec_decode.table import Table, logps_after


def forest_of(growth: Growth, *texts: list[int]) -> Forest:
    forest = Forest(Table(), growth)
    forest.advance({idx: (text, 1) for idx, text in enumerate(texts)})
    return forest


def test_prospects_are_the_tokens_of_a_step_and_the_gain_of_a_pass() -> None:
    text = [1, 2]
    forest = forest_of(Growth(passes=4, width=2, num_top=2), text)
    assert forest.prospects(0, 4) == (1.0, FIRST_SHARE), "the bonus token, and a first guess"
    forest.grow({0: 4}, busy=[0])
    first, second = sorted(logps_after(text).values(), reverse=True)[:2]
    found = forest.prospects(0, 4)
    assert found.tokens == pytest.approx(1 + math.exp(first) + math.exp(second))
    share = FIRST_SHARE + 0.05 * (math.exp(first) - FIRST_SHARE)
    assert found.gain == pytest.approx(share * (math.exp(first) + math.exp(second)))
    # A draft of two is complete but for what may follow its first token.
    assert forest.prospects(0, 2).gain == pytest.approx(share * math.exp(first))
    assert forest.prospects(0, 1).gain == 0.0


def test_a_pass_brings_as_much_as_was_promised_on_average() -> None:
    promised = brought = 0.0
    for seed in range(60):
        forest = forest_of(
            Growth(passes=4, width=4, num_top=4), [seed % 5, seed // 5 % 5, seed % 3]
        )
        for _ in range(4):
            before = forest.prospects(0, 6)
            forest.grow({0: 6}, busy=[0])
            promised += before.gain
            brought += forest.prospects(0, 6).tokens - before.tokens
    # Children beside the best one count too, and leaves that were in the draft may fall out.
    assert 0.6 < brought / promised < 1.7


def test_a_pass_feeds_so_many_rows_and_some_of_each() -> None:
    long, short = [1] * (2 * MAX_CHUNK), [2] * (MIN_CHUNK + 3)
    forest = forest_of(Growth(passes=1, width=1, num_top=1), long, short)
    assert forest.grow({0: 1, 1: 1}, busy=[0, 1]) == {0: False, 1: False}
    assert (forest.lag(0), forest.lag(1)) == (MAX_CHUNK, 3)
    assert forest.grow({0: 1, 1: 1}, busy=[0, 1]) == {0: True, 1: True}
    assert (forest.lag(0), forest.lag(1)) == (0, 0)


def test_advancing_says_whether_the_tree_goes_on() -> None:
    forest = forest_of(Growth(passes=4, width=2, num_top=2), [1, 2], [3])
    assert forest.known(0) == 2
    assert forest.known(9) == 0
    forest.grow({0: 4, 1: 4}, busy=[0, 1])
    best, _ = sorted(logps_after([1, 2]), key=lambda t: -logps_after([1, 2])[t])[:2]
    worst = min(logps_after([3]), key=lambda t: logps_after([3])[t])
    assert forest.advance({0: ([best], 0), 1: ([worst], 0)}) == {0: True, 1: False}
    assert forest.advance({0: ([worst], 0), 1: ([worst], 0)}) == {}, "neither had a tree"
    forest.drop([0, 7])
    assert 0 not in forest
    assert not forest.has_draft(0)
