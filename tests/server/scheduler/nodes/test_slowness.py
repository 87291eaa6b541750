"""Slow nodes, from the times of all; test_service.py has where the times come from."""

from __future__ import annotations

import pytest

from server.scheduler.nodes.roster import Member
from server.scheduler.nodes.slowness import NUM_TIMES, Slowness
from tests.server.scheduler.engine import make_config
from tests.structs import changed
from topspin.plan.spec import EnginePlan

A0, A1, A2 = (Member("attention", index) for index in range(3))
E0, E1 = (Member("expert", index) for index in range(2))


def plan(*, device: str = "cpu") -> EnginePlan:
    found = make_config(num_nodes=3, num_expert_nodes=2)
    first = changed(found.nodes[0], {"device": device})
    return changed(found, {"nodes": (first, *found.nodes[1:])})


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ({A0: 3.0, A1: 1.0, A2: 1.1}, {}),
        ({A0: 4.4, A1: 1.0, A2: 1.2}, {A0: 4.0}),
        ({A0: 9.0, E0: 1.0, E1: 1.0}, {}),
        ({E0: 1.0, E1: 4.0, A0: 1.0, A1: 1.0}, {E1: 4.0}),
        ({E0: 0.0, E1: 4.0}, {}),
    ],
)
def test_the_median_of_the_peers_decides_once_it_has_lasted(
    times: dict[Member, float], slow: dict[Member, float]
) -> None:
    slowness = Slowness(plan())
    for _ in range(NUM_TIMES - 1):
        assert slowness.heard(times) == []
    news = slowness.heard(times)
    assert slowness.slow == pytest.approx(slow)
    told = [f"{node} is {ratio:.1f} times slower than its peers" for node, ratio in slow.items()]
    assert news == told
    assert slowness.heard(times) == []


def test_a_moment_does_not_count_and_an_end_is_told() -> None:
    slowness = Slowness(plan())
    slow, even = {E0: 1.0, E1: 4.0}, {E0: 1.0, E1: 2.5}
    for times in (*[slow] * (NUM_TIMES - 1), even, *[slow] * (NUM_TIMES - 1)):
        assert slowness.heard(times) == []
    assert len(slowness.heard(slow)) == 1
    assert slowness.heard(even) == []
    assert slowness.slow == {E1: 2.5}
    assert slowness.heard({E0: 1.0, E1: 1.9}) == ["expert 1 is not slow any more"]
    assert slowness.slow == {}


def test_nodes_of_other_devices_are_no_peers_and_lost_ones_are_forgotten() -> None:
    slowness = Slowness(plan(device="cuda:0"))
    for _ in range(NUM_TIMES):
        slowness.heard({A0: 1.0, A1: 4.0, A2: 1.0})
    assert slowness.slow == {A1: 4.0}
    slowness.heard({A0: 1.0, A2: 1.0})
    assert slowness.slow == {}
    for _ in range(NUM_TIMES):
        slowness.heard({A0: 9.0, A1: 1.0, A2: 1.0})
    assert slowness.slow == {}
