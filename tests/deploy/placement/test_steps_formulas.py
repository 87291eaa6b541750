"""The cost model's sums: barrier, pipeline, layer ranges, against simulations."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from deploy.placement.cost import barrier_s, chain_s, step_s
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
    clock = {"attention": 0.0, "experts": 0.0, "there": 0.0, "back": 0.0}
    ready = [0.0] * m
    for hop in layers:
        for mb in range(m):
            clock["attention"] = max(clock["attention"], ready[mb]) + hop.t_a
            ready[mb] = clock["attention"]
            if hop.t_e or hop.t_c:
                rest_s = hop.t_c - hop.t_w
                clock["there"] = max(clock["there"], ready[mb]) + hop.t_w
                clock["experts"] = max(clock["experts"], clock["there"] + rest_s) + hop.t_e
                clock["back"] = max(clock["back"], clock["experts"]) + hop.t_w
                ready[mb] = clock["back"] + rest_s
    return max(ready)


def hop_over_a_card(rng: random.Random) -> HopTimes:
    """Return a hop whose rows keep a card busy, perhaps for longer than a side."""
    card_s = 1.5 * rng.random()
    return HopTimes(rng.random(), rng.random(), card_s + 0.2 * rng.random(), card_s)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_a_card_carries_the_rows_of_one_micro_batch_at_a_time(m: int) -> None:
    rng = random.Random(m)
    for _ in range(50):
        equal = [hop_over_a_card(rng)] * 5
        others = [hop_over_a_card(rng) for _ in range(5)]
        for layers in (equal, others):
            found = layers_s(layers, num_micro_batches=m, shares_cores=False)
            assert found == pytest.approx(rallied(layers, m))


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_runs_of_equal_layers_take_the_simulated_time(m: int) -> None:
    """Once a layer moves all by the same time, so does every further one of its run."""
    rng = random.Random(m)
    for _ in range(30):
        dense, moe = HopTimes(rng.random(), 0.0, 0.0), hop_over_a_card(rng)
        layers = [dense] * rng.randrange(9) + [moe] * 20 + [dense] * 5 + [moe] * rng.randrange(9)
        found = layers_s(layers, num_micro_batches=m, shares_cores=False)
        assert found == pytest.approx(rallied(layers, m))


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


def ranged(layers: list[HopTimes], ends: tuple[int, ...], m: int, pass_s: float) -> float:
    """Simulate attention_nodes.step.rally on a device per range, and the expert side, as programs.

    A device takes micro-batches in at its first layer and lets them leave after its last one.
    """
    known: dict[tuple[object, ...], float] = {("in", 0, mb): 0.0 for mb in range(m)}

    def device(idx: int, begin: int, end: int) -> Iterator[tuple[object, ...]]:
        now = 0.0
        for layer in range(begin, end):
            for mb in range(m):
                key = ("in", idx, mb) if layer == begin else ("answer", layer - 1, mb)
                yield key
                now = max(now, known[key]) + layers[layer].t_a
                hops = layers[layer].t_e or layers[layer].t_c
                known["sent" if hops else "answer", layer, mb] = now
        is_last = idx == len(ends) - 1
        for mb in range(m):
            yield ("answer", end - 1, mb)
            now = max(now, known["answer", end - 1, mb])
            # By way of the first device, which is the first end or the last one of some passes.
            passes = (0 if idx == 0 else 1) + (0 if is_last else 1)
            known["in", idx + 1, mb] = now + passes * pass_s

    def experts() -> Iterator[tuple[object, ...]]:
        now = 0.0
        for layer, (_, t_e, t_c, _) in enumerate(layers):
            for mb in range(m if t_e or t_c else 0):
                yield ("sent", layer, mb)
                now = max(now, known["sent", layer, mb] + t_c) + t_e
                known["answer", layer, mb] = now + t_c

    waiting = [(each, next(each)) for each in (experts(),)]
    ranges = zip((0, *ends[:-1]), ends, strict=True)
    programs = [device(idx, begin, end) for idx, (begin, end) in enumerate(ranges)]
    waiting += [(each, next(each)) for each in programs]
    while waiting:
        program, key = waiting.pop(0)
        while key is not None and key in known:
            key = next(program, None)  # type: ignore[assignment]
        if key is not None:
            waiting.append((program, key))
    return max(known["in", len(ends), mb] for mb in range(m))


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("ends", [(7,), (3, 7), (1, 2, 7), (2, 4, 6, 7)])
def test_layer_ranges_take_the_simulated_time(ends: tuple[int, ...], m: int) -> None:
    rng = random.Random(m)
    for _ in range(20):
        layers = [
            HopTimes(rng.random(), 0.0, 0.0)
            if layer and rng.random() < 0.3
            else HopTimes(rng.random(), rng.random(), 0.2 * rng.random())
            for layer in range(7)
        ]
        found = chain_s(layers, ends, num_micro_batches=m, pass_s=0.1)
        assert found == pytest.approx(ranged(layers, ends, m, 0.1))
        if len(ends) == 1:
            assert found == pytest.approx(layers_s(layers, num_micro_batches=m, shares_cores=False))


def test_a_micro_batch_alone_takes_the_sum_of_its_ranges() -> None:
    """LLM-PQ's corrected objective, for the one micro-batch that the ranges have at a time."""
    layers = [HopTimes(1.0, 0.0, 0.0)] * 3 + [HopTimes(4.0, 0.0, 0.0)] * 2
    assert chain_s(layers, (3, 5), num_micro_batches=1, pass_s=0.0) == max(3 + 8, 1 * 8)
