"""The decision whether layers are local, on simulated steps whose true times are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from server.scheduler.experts.local_layers import (
    RETRY_STEPS,
    SETTLE_STEPS,
    TRIAL_STEPS,
    LocalLayers,
)
from server.scheduler.micro_batching.cost import CostModel, StepLoad
from topspin.messages import StepTimings

TimeOf = Callable[[int, int, bool], float]
"""(step, rows, is_local) -> the seconds of a step's layers."""


def run(
    time_of: TimeOf,
    *,
    steps: int,
    rows: Callable[[int], int] = lambda step: 8,
    noise: float = 0.0,
    seed: int = 0,
    delay: int = 2,
) -> list[bool]:
    """Return where each step ran; a decision comes into use `delay` steps later."""
    rng = random.Random(seed)
    layers, sides = LocalLayers(CostModel()), [False] * delay
    for step in range(steps):
        is_local, num_rows = sides[step], rows(step)
        took_s = time_of(step, num_rows, is_local) * (1 + rng.gauss(0, noise))
        wait_s = 0.0 if is_local else 0.4 * took_s
        timings = StepTimings(total_s=1.0, attention_s=took_s - wait_s, wait_s=wait_s, sample_s=0.1)
        layers.learn({0: StepLoad(1, num_rows, 100.0 * num_rows)}, {0: timings}, is_local=is_local)
        sides.append(layers.wanted)
    return sides[:steps]


def changes(sides: list[bool]) -> int:
    return sum(a != b for a, b in pairwise(sides))


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_slow_link_makes_layers_local_after_one_trial(noise: float) -> None:
    sides = run(lambda step, rows, here: 0.01 if here else 0.02, steps=3000, noise=noise)
    assert changes(sides) == 1
    assert sides.index(True) < SETTLE_STEPS + TRIAL_STEPS + 5


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_fast_expert_nodes_keep_their_layers_after_one_trial(noise: float) -> None:
    sides = run(lambda step, rows, here: 0.02 if here else 0.01, steps=3000, noise=noise)
    assert changes(sides) == 2
    assert sum(sides) < SETTLE_STEPS + TRIAL_STEPS + 5


def test_equal_sides_do_not_alternate() -> None:
    sides = run(lambda step, rows, here: 0.01, steps=16_000, noise=0.3)
    assert changes(sides) <= 16


@pytest.mark.slow
def test_what_the_trials_of_a_worse_side_cost_is_little() -> None:
    steps = 20_000
    sides = run(lambda step, rows, here: 0.03 if here else 0.01, steps=steps, noise=0.1)
    assert 2 <= changes(sides) // 2 <= 4
    assert sum(sides) < 0.02 * steps


def test_a_link_that_becomes_slow_and_fast_again_is_followed() -> None:
    slow_from, slow_to = 1000, 1000 + 2 * RETRY_STEPS

    def time_of(step: int, rows: int, here: bool) -> float:
        return 0.02 if here else 0.1 if slow_from <= step < slow_to else 0.01

    sides = run(time_of, steps=slow_to + 3 * RETRY_STEPS, noise=0.1)
    assert not sides[slow_from - 1]
    assert sides[slow_from + 200]
    assert changes(sides[:slow_to]) <= 2 + 1 + 2 * 2
    assert sides[slow_to - 1]
    assert not sides[-1]


def test_few_rows_are_computed_here_and_many_there() -> None:
    """Each side's time is known at other loads than those that it was measured with."""

    def time_of(step: int, rows: int, here: bool) -> float:
        return 1e-3 + 1e-3 * rows if here else 1e-2 + 1e-4 * rows

    def rows(step: int) -> int:
        return (2, 30)[step // 1500 % 2] + step % 5

    sides = run(time_of, steps=6000, rows=rows, noise=0.05)
    for end in (1499, 2999, 4499, 5999):
        assert sides[end] == (end // 1500 % 2 == 0), end


def test_a_change_by_others_is_undone() -> None:
    layers = LocalLayers(CostModel())
    timings = StepTimings(total_s=1.0, attention_s=0.5, wait_s=0.1, sample_s=0.1)
    for _ in range(1000):
        layers.learn({0: StepLoad(1, 1, 1.0)}, {0: timings}, is_local=True)
        assert not layers.wanted
