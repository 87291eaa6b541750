"""Engines that serve against the planner's cost model: the plans, and the errors that are told."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import served
from benchmarks.engine.local_layers import predicted_s
from benchmarks.engine.served import ENGINES, Engine, errors, predicted
from benchmarks.servers.topspin import Streams
from tests.benchmarks.engine.test_local_layers import LAPTOP
from tests.checkpoints import make_checkpoint


def test_every_engine_has_its_nodes_and_its_link(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral")
    for engine in ENGINES:
        plan = engine.plan(path)
        assert (len(plan.attention), len(plan.experts)) == engine[:2]
        assert (plan.link.transport, plan.link.latency_us) == engine[2:]
        assert plan.scheduling.micro_batches == 1
        assert plan.speculation is None  # the cost model predicts a token per step
    names = [str(engine) for engine in ENGINES]
    assert len({*names}) == len(names) == 9


def test_several_nodes_on_the_same_cores_take_no_less_time(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral")

    def step_s(num_nodes: tuple[int, int]) -> float:
        load = Streams(8, 16, 8, 100)
        return predicted_s(LAPTOP, path, latency_us=0, num_local=0, load=load, num_nodes=num_nodes)

    assert step_s((1, 1)) < step_s((1, 2)) < step_s((2, 2)) < 3 * step_s((1, 1))
    narrow, wide = (Engine(count, 2, "shm") for count in (1, 2))
    one, two = (Streams(requests, 16, 8, 100) for requests in (1, 2))
    alone = predicted(narrow, LAPTOP, path, one, 0.0)
    both = predicted(wide, LAPTOP, path, two, 0.0)
    assert predicted(wide, LAPTOP, path, one, 0.0) == alone < both


def test_outputs_get_longer_until_all_requests_decode_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = []

    def generate(streams: Streams, turn: int) -> Any:
        lengths.append(streams.output_len)
        return SimpleNamespace(records=[streams.output_len])

    def rate(records: list[int], *, streams: int) -> float | None:
        return 5.0 if records[0] > 40 else None

    monkeypatch.setattr(served, "decode_rate", rate)
    monkeypatch.setattr(served, "tpot_s", lambda record: 0.1)
    # Half a second of processor for each turn.
    clock = itertools.count(step=0.5)
    server: Any = SimpleNamespace(generate=generate, serving_cpu_s=lambda: next(clock))
    found = served.measured(server, Streams(2, 4, 16, 10), rounds=2)
    assert found[:2] == (5.0, 0.1)
    assert found.serving_s == 0.5 / 64
    assert lengths == [16, 32, 64, 64, 64]
    monkeypatch.setattr(served, "decode_rate", lambda records, streams: None)
    with pytest.raises(SystemExit, match="2 requests never decoded all at once"):
        served.measured(server, Streams(2, 4, 16, 10), rounds=2)


def test_errors_are_told_by_model_with_their_bound() -> None:
    rows = [
        {"model": "m", "throughput_error": error, "tpot_error": -2 * error}
        for error in (0.01, -0.05, 0.1)
    ]
    throughput, tpot = errors(rows)
    assert (throughput["what"], throughput["points"], throughput["within"]) == (
        "m: throughput",
        3,
        2,
    )
    assert throughput["median"] == pytest.approx(5)
    assert throughput["worst"] == pytest.approx(10)
    assert (tpot["within"], tpot["worst"]) == (2, pytest.approx(20))
