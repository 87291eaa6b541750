"""Timing of decode and prefill, with an engine whose steps take what a made-up clock says."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.gpu_decode import VARIANTS, Variant, run, time_decode, time_prefill
from benchmarks.gpu_models import FULL, QUICK, Workload
from benchmarks.gpu_records import Deadline, PartFlags, Recorder

WORKLOAD = Workload("small", {}, context=100, batches=(1, 4), prefill_tokens=50, rounds=3, steps=2)


@dataclass
class FakeEngine:
    """Takes a second for a step, ten for the very first one, and half a second to finish."""

    now: float = 0.0
    batch: int = 0
    context: int = 0
    launched: int = 0
    is_closed: bool = False
    prefills: list[int] = field(default_factory=list)

    def start_decode(self, batch: int, context: int) -> None:
        self.batch, self.context, self.launched = batch, context, 0

    def decode_step(self) -> None:
        self.now += 1.0 if self.launched else 10.0
        self.launched += 1

    def prefill(self, num_tokens: int) -> None:
        self.prefills.append(num_tokens)
        self.now += 3.0

    def finish(self) -> None:
        self.now += 0.5

    def decode_floor(self) -> Mapping[str, float]:
        return {"experts": 200.0 * self.batch, "keys": float(self.context + self.launched)}

    def close(self) -> None:
        self.is_closed = True


def test_the_first_round_warms_up() -> None:
    engine = FakeEngine()
    found = time_decode(engine, WORKLOAD, 4, bytes_per_s=1000.0, clock=lambda: engine.now)
    assert found.steps_s == (1.25, 1.25, 1.25)
    assert found.step_s == 1.25
    assert engine.launched == 8
    # The floor is that before the timed rounds: two steps in.
    assert found.floor == {"experts": 800.0, "keys": 102.0}
    assert found.floor_s == pytest.approx(0.902)
    assert found.fraction == pytest.approx(0.902 / 1.25)


def test_prefill_is_the_median_after_one_that_warms_up() -> None:
    engine = FakeEngine()
    assert time_prefill(engine, WORKLOAD, clock=lambda: engine.now) == 3.5
    assert engine.prefills == [50] * 4


def records_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def run_with(open_engine: Any, seconds: float = 100.0) -> list[dict[str, Any]]:
    stream = io.StringIO()
    flags = PartFlags("cpu", quick=True, seconds=seconds)
    run(flags, Recorder(stream), open_engine, 1e9, Deadline(seconds))
    return records_of(stream)


def test_every_variant_is_measured_and_closed() -> None:
    opened: dict[Variant, FakeEngine] = {}

    def open_engine(workload: Workload, device: str, variant: Variant) -> FakeEngine:
        assert (workload, device) == (QUICK, "cpu")
        assert all(engine.is_closed for engine in opened.values()), "two do not fit the memory"
        return opened.setdefault(variant, FakeEngine())

    found = [record for record in run_with(open_engine) if record["kind"] == "figure"]
    assert tuple(opened) == VARIANTS
    assert all(engine.is_closed for engine in opened.values())
    decode = [(r["variant"], r["batch"]) for r in found if r["of"] == "decode"]
    assert decode == [(v.name, batch) for v in VARIANTS for batch in QUICK.batches]
    assert [r["variant"] for r in found if r["of"] == "prefill"] == [VARIANTS[0].name]
    assert all(r["gate"] is None for r in found if r["of"] == "decode"), "tiny sizes have no gate"


def test_a_variant_that_fails_leaves_the_others() -> None:
    class Faulty(FakeEngine):
        def decode_step(self) -> None:
            raise RuntimeError("an illegal address")

    engines: list[FakeEngine] = []

    def open_engine(workload: Workload, device: str, variant: Variant) -> FakeEngine:
        engines.append(Faulty() if variant == VARIANTS[0] else FakeEngine())
        return engines[-1]

    found = run_with(open_engine)
    problems = [record for record in found if record["kind"] == "problem"]
    assert [p["why"] for p in problems] == ["RuntimeError: an illegal address"]
    assert VARIANTS[0].name in problems[0]["what"]
    assert engines[0].is_closed
    measured = {r["variant"] for r in found if r["kind"] == "figure"}
    assert measured == {variant.name for variant in VARIANTS[1:]}


def test_what_does_not_fit_the_time_is_named() -> None:
    def open_engine(*_: object) -> FakeEngine:
        raise AssertionError("there is no time for an engine")

    found = run_with(open_engine, seconds=-1.0)
    assert [record["kind"] for record in found] == ["skipped"] * len(VARIANTS)
    assert all("the time would not" in record["why"] for record in found)


def test_a_sequence_has_room_for_every_step() -> None:
    for workload in (FULL, QUICK):
        steps = (workload.rounds + 1) * workload.steps
        assert workload.max_len >= workload.context + steps
        assert workload.max_len <= workload.fields["max_position_embeddings"]
