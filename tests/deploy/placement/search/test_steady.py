"""The queueing against a simulated scheduler, which knows none of its formulas."""

from __future__ import annotations

import random
from collections import deque
from statistics import mean

import pytest

from deploy.placement.search.steady import Chunks, EngineShape, chunks_of, point
from deploy.placement.workload import Lengths, Targets, Workload
from tests.deploy.placement import samples


class LinearSteps:
    """Steps of an engine of M nodes: a constant, and a time per decoding row and prompt token."""

    def __init__(self, num_attention: int = 1) -> None:
        self.num_attention = num_attention

    def step_s(self, running: float, chunks: Chunks | None) -> float:
        tokens = 0.0 if chunks is None else chunks.replicas * chunks.tokens
        return 5e-3 + 1e-4 * running + 5e-5 * tokens

    def real_s(self, running: int, tokens: float) -> float:
        """Return the time of a step with so many rows."""
        return 5e-3 + 1e-4 * running + 5e-5 * tokens


def simulate(workload: Workload, *, budget: int, num_requests: int) -> tuple[float, float, float]:
    """Return running sequences, TPOT and mean TTFT of one node that serves Poisson arrivals.

    Decode first, then prompts in the order of their arrival, up to the budget.
    """
    rng = random.Random(7)
    steps, rate = LinearSteps(), workload.arrival_rate
    assert rate is not None
    prompt, output = round(workload.prompt.average), round(workload.output.average)
    arrivals, now = [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        arrivals.append(now)
    waiting: deque[list[float]] = deque()
    running: list[int] = []
    now, nxt = 0.0, 0
    ttfts, counts, spans = [], [], []
    while nxt < num_requests or waiting or running:
        while nxt < num_requests and arrivals[nxt] <= now:
            waiting.append([arrivals[nxt], float(prompt)])
            nxt += 1
        if not waiting and not running:
            now = arrivals[nxt]
            continue
        room, taken, done = budget - len(running), 0.0, []
        for each in waiting:
            part = min(each[1], room - taken)
            each[1] -= part
            taken += part
            if each[1] > 0:
                break
            done.append(each)
        step_s = steps.real_s(len(running), taken)
        counts += [len(running)] if running else []
        spans += [step_s] * len(running)
        now += step_s
        running = [left - 1 for left in running if left > 1]
        for each in done:
            waiting.popleft()
            ttfts.append(now - each[0])
            running.append(output - 1)
    return mean(counts), mean(spans), mean(ttfts)


@pytest.mark.parametrize(("running", "within"), [(4.0, 0.1), (16.0, 0.1), (40.0, 0.15)])
def test_rates_and_times_are_those_of_a_simulated_scheduler(running: float, within: float) -> None:
    asked = samples.workload(
        prompt=Lengths(mean=300),
        output=Lengths(mean=80),
        arrival_rate=1.0,
        targets=Targets(percentile="p50"),
    )
    found = point(LinearSteps(), asked, EngineShape(1, 512), running)
    assert found is not None
    at_rate = samples.workload(
        prompt=Lengths(mean=300), output=Lengths(mean=80), arrival_rate=found.rate
    )
    _, tpot_s, ttft_s = simulate(at_rate, budget=512, num_requests=3000)
    assert found.tpot_s == pytest.approx(tpot_s, rel=within)
    assert found.ttft_s == pytest.approx(ttft_s, rel=2 * within)


def test_a_load_beyond_the_prompts_capacity_has_no_steady_state() -> None:
    asked = samples.workload(prompt=Lengths(mean=4000), output=Lengths(mean=10))
    assert point(LinearSteps(), asked, EngineShape(1, 512), 2.0) is None


def test_decoding_that_fills_the_budget_leaves_no_room_for_prompts() -> None:
    asked = samples.workload()
    assert chunks_of(asked, EngineShape(2, 128), 255.0) is None
    chunks = chunks_of(asked, EngineShape(2, 128), 128.0)
    assert chunks is not None
    assert chunks[1].replicas == 2
    assert chunks[1].tokens == 64


def test_the_p95_is_later_than_the_mean() -> None:
    lengths = {"prompt": Lengths(mean=300, p95=900), "output": Lengths(mean=80)}
    points = [
        point(
            LinearSteps(),
            samples.workload(**lengths, targets=Targets(percentile=percentile)),
            EngineShape(1, 512),
            16.0,
        )
        for percentile in ("p50", "p95")
    ]
    assert points[0] is not None
    assert points[1] is not None
    assert points[1].ttft_s > 1.5 * points[0].ttft_s
    assert points[1].rate == points[0].rate
