"""Searches that are timed (`topspin bench plan-search`)."""

from __future__ import annotations

from benchmarks.engine.plan_search import CASES, Case, timed


def test_the_clusters_are_those_that_are_named() -> None:
    inputs = {name: case.inputs() for name, case in CASES.items()}
    found = {
        name: (
            sum(host.spec.count * each.count for host in asked.hosts for each in host.devices),
            len({each.name for host in asked.hosts for each in host.devices}),
            asked.between_hosts is not None,
        )
        for name, asked in inputs.items()
    }
    assert found == {
        "10,000 devices of 8 types": (10_000, 8, False),
        "the same, engines over hosts too": (10_000, 8, True),
        "4 CPUs and 8 GPUs on a host": (12, 2, False),
        "64 GPUs on 8 hosts": (64, 2, True),
    }


def test_a_search_is_timed_and_finds_a_plan() -> None:
    (row,) = timed({"small": Case(((1, {"h100": 2}),), 2.0, "min_price", 5)})
    assert row["engines"] > 1
    assert row["cpu_s"] > 0
    assert row["requests_per_s"] >= 2
