"""The three scripts of `make gpu` from end to end at tiny sizes, with Triton's interpreter."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import decode, rooflines, smoke
from benchmarks.gpu.decode import time_decode, time_prefill
from benchmarks.gpu.workload import QUICK
from kernels.triton.ops import TritonOps

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="interprets kernels, which a process with a GPU does not"
)


def run(script: Any, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Return a script's exit status and JSON."""
    status = script.main(["--device", "cpu", "--quick", "--output", str(folder), *flags])
    (path,) = folder.glob("gpu-*.json")
    return status, json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.slow
def test_rooflines(tmp_path: Path) -> None:
    status, result = run(rooflines, tmp_path)
    assert (status, result["problems"], result["complete"]) == (0, [], True)
    figures = [each for each in result["figures"] if each["of"] == "kernel"]
    ops = {each["op"].split(",")[0] for each in figures}
    assert ops >= {"attention", "experts none", "linear int4", "route and permute", "sample"}
    assert all(each["us"] > 0 and each["fraction"] > 0 for each in figures)
    assert any(each["library_us"] for each in figures if each["op"] == "attention")
    ceilings = [each["name"] for each in result["figures"] if each["of"] == "ceiling"]
    assert ceilings == ["copy", "read", "bf16", "fp8"]


def test_bytes_of_experts_are_those_that_packing_takes() -> None:
    sizes = rooflines.TINY
    gate_up = torch.randn(sizes.experts, 2 * sizes.ffn, sizes.hidden).bfloat16()
    down = torch.randn(sizes.experts, sizes.hidden, sizes.ffn).bfloat16()
    for name in rooflines.FORMATS:
        experts = TritonOps().pack_experts(gate_up, down, formats=[name] * sizes.experts)
        held = 0
        for weight in (experts.gate_up[0], experts.down[0]):
            assert isinstance(weight, rooflines.GpuWeight)
            held += weight.data.nbytes + (0 if weight.scales is None else weight.scales.nbytes)
        assert rooflines.expert_bytes(sizes, name) == held


@pytest.mark.slow
def test_decode(tmp_path: Path) -> None:
    status, result = run(decode, tmp_path, "--batch", "1", "--context", "3", "--no-graphs")
    assert (status, result["problems"], result["complete"]) == (0, [], True)
    kinds = [each["of"] for each in result["figures"]]
    assert kinds == [*["ceiling"] * 2, "engine", "decode", "profile", "prefill", "profile"]
    (step,) = (each for each in result["figures"] if each["of"] == "decode")
    assert step["fraction"] == pytest.approx(step["floor_ms"] / step["step_ms"])
    assert set(step["floor_bytes"]) == {"attention", "experts", "kv", "lm_head", "embed"}


def test_a_failing_measurement_fails_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(decode, "open_engine", fail)
    status, result = run(decode, tmp_path)
    assert status == 1
    assert result["problems"] == [
        "the engine: RuntimeError: an illegal memory access was encountered"
    ]


@pytest.mark.slow
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(
        (smoke.ROOT / name).exists() for name in (*smoke.KERNELS, *smoke.TIMED, smoke.QUICK[0])
    )
    own = tmp_path / "test_own.py"
    own.write_text("def test_one() -> None:\n    pass\n")
    monkeypatch.setattr(smoke, "QUICK", (str(own),))
    versions = {"torch": torch.__version__}
    monkeypatch.setattr(smoke, "installed", lambda package: versions.get(package, "1.0"))
    status, result = run(smoke, tmp_path)
    assert (status, result["problems"]) == (0, [])
    found = {each["probe"]: each["found"] for each in result["figures"] if "probe" in each}
    assert found["torch"] == torch.__version__
    assert found["Python.h"] is not None
    assert [each["outcome"] for each in result["figures"] if "test" in each] == ["passed"]
    own.write_text(
        "def test_two(record_property) -> None:\n    record_property('us', 9)\n    raise OSError\n"
    )
    status, result = run(smoke, tmp_path)
    problem = result["problems"][0]
    assert status == 1
    assert "OSError" in problem
    (outcome,) = (each for each in result["figures"] if "test" in each)
    assert (outcome["outcome"], outcome["properties"]) == ("failed", {"us": "9"})


def test_smoke_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(smoke, "installed", lambda package: "1.0")
    monkeypatch.setattr(smoke, "run_tests", lambda *_: None)
    status, result = run(smoke, tmp_path)
    assert status == 1
    assert "problem: C compiler: MISSING: install gcc or clang" in capsys.readouterr().err
    assert result["problems"][-1].endswith(": did not come to their end")


def test_a_package_that_cannot_be_imported_is_missing() -> None:
    assert smoke.installed("msgspec") == importlib.metadata.version("msgspec")
    assert smoke.installed("no_such_package") is None


def test_outcomes_are_read_from_the_report() -> None:
    report = """<testsuites><testsuite>
      <testcase classname="a" name="one" time="1.5"><properties>
        <property name="round_trip_us_p50" value="9.1"/></properties></testcase>
      <testcase classname="a" name="two" time="0.5"><failure message="3 != 4"/></testcase>
      <testcase classname="a" name="three"><skipped message="no numba"/></testcase>
    </testsuite></testsuites>"""
    one, two, three = smoke.read_outcomes(report)
    assert one == ("a::one", "passed", 1.5, "", {"round_trip_us_p50": "9.1"})
    assert (two.outcome, two.why) == ("failed", "3 != 4")
    assert (three.outcome, three.why) == ("skipped", "no numba")


class FakeEngine:
    """Its decode steps take 1 ms more with each round, its prefill 8 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rounds = 0
        self.started: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now_s

    def start_decode(self, batch: int, context: int) -> None:
        self.started.append((batch, context))

    def decode_step(self) -> None:
        self.now_s += 1e-3 * (1 + self.rounds)

    def prefill(self, num_tokens: int) -> None:
        self.now_s += 1e-3 * num_tokens

    def finish(self) -> None:
        self.rounds += 1

    def decode_floor(self) -> dict[str, float]:
        return {"experts": 600.0, "kv": 400.0}


def test_decode_is_the_median_of_rounds_after_a_warm_up() -> None:
    engine = FakeEngine()
    workload = replace(QUICK, rounds=3, steps=4)
    found = time_decode(engine, workload, 2, 1e6, engine.clock)
    assert found.rounds_s == pytest.approx((2e-3, 3e-3, 4e-3))
    assert found.step_s == pytest.approx(3e-3)
    assert found.fraction == pytest.approx(1e-3 / 3e-3)
    assert engine.started == [(2, workload.context)]
    assert time_prefill(engine, workload, engine.clock) == pytest.approx(8e-3)
