"""The cost model's sums: barrier, pipeline, layer ranges, against simulations."""

from __future__ import annotations

import random

import pytest

from deploy.placement.cost import barrier_s, decode_s, prefill_s, step_s
from topspin.pipeline import HopTimes, layers_s


def test_the_barrier_is_the_mean_maximum() -> None:
    rng = random.Random(3)
    moments = [(1.0, 0.1), (1.05, 0.02), (0.9, 0.2), (1.0, 0.0)]
    rounds = 20_000
    mean = sum(max(rng.gauss(*each) for each in moments) for _ in range(rounds)) / rounds
    assert barrier_s(moments) == pytest.approx(mean, rel=0.005)
    assert barrier_s([(2.0, 0.5)]) == 2.0
    assert barrier_s([(2.0, 0.0), (3.0, 0.0)]) == 3.0


def rallied(layers: list[HopTimes], m: int) -> float:
    """Simulate both sides serving (layer, micro-batch) in order, event by event."""
    clock = {"attention": 0.0, "experts": 0.0}
    ready = [0.0] * m
    for hop in layers:
        for mb in range(m):
            clock["attention"] = max(clock["attention"], ready[mb]) + hop.t_a
            ready[mb] = clock["attention"]
            if hop.t_e or hop.t_c:
                clock["experts"] = max(clock["experts"], ready[mb] + hop.t_c) + hop.t_e
                ready[mb] = clock["experts"] + hop.t_c
    return max(ready)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_layers_that_differ_take_the_simulated_time(m: int) -> None:
    rng = random.Random(m)
    for _ in range(50):
        layers = [
            HopTimes(rng.random(), 0.0, 0.0)
            if rng.random() < 0.3
            else HopTimes(rng.random(), rng.random(), 0.2 * rng.random())
            for _ in range(7)
        ]
        found = layers_s(layers, num_micro_batches=m, shares_cores=False)
        assert found == pytest.approx(rallied(layers, m))


def test_a_step_on_shared_cores_adds_both_sides_up() -> None:
    layers = [HopTimes(2.0, 3.0, 0.5), HopTimes(4.0, 0.0, 0.0)]
    found = step_s(layers, fixed_s=1.0, micro_batches=1, shares_cores=True, factor=1.5)
    assert found == pytest.approx(1.5 * (1.0 + 2 + 3 + 1 + 4))


def staged(stages: list[float], batches: int, tokens: int) -> float:
    """Simulate micro-batches that pass layer ranges, each token after its last one's end."""
    free = [0.0] * len(stages)
    ready = [0.0] * batches
    for _ in range(tokens):
        for batch in range(batches):
            at = ready[batch]
            for idx, stage_s in enumerate(stages):
                free[idx] = at = max(at, free[idx]) + stage_s
            ready[batch] = at
    return max(ready)


@pytest.mark.parametrize("batches", [1, 2, 4, 8])
def test_layer_ranges_decode_at_the_simulated_pace(batches: int) -> None:
    rng = random.Random(batches)
    for _ in range(20):
        stages = [0.1 + rng.random() for _ in range(4)]
        tokens = 40
        longer = staged(stages, batches, tokens) - staged(stages, batches, 1)
        assert decode_s(stages, batches, tokens) == pytest.approx(longer)
        assert prefill_s(stages, batches) == pytest.approx(staged(stages, batches, 1))
