"""The device's clock and ceilings, clocks of nvidia-smi, and figures of kernels."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_rooflines, gpu_timing
from benchmarks.gpu_clocks import (
    FIELDS,
    Clocks,
    ask_nvidia_smi,
    read_sample,
    smi_name,
    summarise,
)
from benchmarks.gpu_clocks import describe as describe_clocks
from benchmarks.gpu_display import Display, describe, plain_table
from benchmarks.gpu_kernels import Entry
from benchmarks.gpu_kernels.catalogue import CATALOGUE, Job, in_order
from benchmarks.gpu_records import Deadline, Recorder
from benchmarks.gpu_rooflines import figure, find_jobs, measure
from benchmarks.gpu_timing import MAX_CALLS, Timed, calls_for, time_call
from benchmarks.roofline import Roofline, Work
from kernels.runtime import HostRuntime, Replay

ROOFLINES = {"bf16": Roofline(1e12, 4e14), "fp8": Roofline(1e12, 8e14)}


def test_a_replay_is_long_enough_for_the_clock_and_visits_every_copy() -> None:
    assert calls_for(1.0, copies=1) == 1
    assert calls_for(1e-4, copies=1) == 21
    assert calls_for(1.0, copies=33) == 33
    assert calls_for(1e-9, copies=1) == MAX_CALLS


def test_copies_take_turns() -> None:
    seen: list[int] = []
    timed = time_call(HostRuntime(), seen.append, copies=7)
    assert timed.calls >= 7
    assert timed.median_s > 0
    # One call that compiles, one that says how long a call is, then replays.
    assert seen[:2] == [0, 1]
    assert seen[2 : 2 + timed.calls] == list(range(timed.calls))


def test_a_figure_says_bytes_operations_and_shares() -> None:
    entry = Entry("op", "shape", Work(2e6, 4e7), lambda _: None, goal=0.8, goal_beyond_s=25e-6)
    found = figure(entry, Timed(8e-6, 7e-6, 5, "graph"), ROOFLINES)
    assert found["us"] == pytest.approx(8.0)
    assert found["floor_us"] == pytest.approx(2.0)
    assert found["fraction"] == pytest.approx(0.25)
    assert found["bytes_per_s"] == pytest.approx(2.5e11)
    assert found["flops_per_s"] == pytest.approx(5e12)
    assert found["bound"] == "memory"
    assert found["beyond_us"] == pytest.approx(6.0)
    assert found["goal_beyond_us"] == pytest.approx(25.0)


def test_an_fp8_product_is_compared_with_fp8s_rate() -> None:
    entry = Entry("op", "shape", Work(1.0, 8e9), lambda _: None, product="fp8")
    timed = Timed(20e-6, 20e-6, 1, "graph")
    assert figure(entry, timed, ROOFLINES)["fraction"] == pytest.approx(0.5)
    only_bf16 = {"bf16": ROOFLINES["bf16"]}
    assert figure(entry, timed, only_bf16)["fraction"] == pytest.approx(1.0)


def records_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_kernel_that_fails_leaves_the_others_and_late_ones_are_named() -> None:
    def fails() -> Iterable[Entry]:
        raise RuntimeError("out of shared memory")

    def works() -> Iterable[Entry]:
        yield Entry("op", "shape", Work(1.0, 1.0), lambda _: None)

    jobs = [Job("bad", False, fails), Job("good", False, works)]
    stream = io.StringIO()
    measure(jobs, HostRuntime(), ROOFLINES, Recorder(stream), Deadline(60.0))
    problem, found = records_of(stream)
    assert (problem["what"], problem["why"]) == ("bad", "RuntimeError: out of shared memory")
    assert found["op"] == "op"

    stream = io.StringIO()
    measure([*jobs, jobs[1]], HostRuntime(), ROOFLINES, Recorder(stream), Deadline(-1.0))
    whats = [record["what"] for record in records_of(stream)]
    assert whats == ["bad (1 sizes)", "good (2 sizes)"]


def test_what_the_device_alone_knows_makes_a_figure_a_problem() -> None:
    def fails() -> None:
        raise RuntimeError("the kernels saw Fault.LATE")

    job = Job("m2n", False, lambda: [Entry("m2n", "", Work(1, 1), lambda _: None, check=fails)])
    stream = io.StringIO()
    measure([job], HostRuntime(), ROOFLINES, Recorder(stream), Deadline(60.0))
    [record] = records_of(stream)
    assert (record["kind"], record["why"]) == (
        "problem",
        "RuntimeError: the kernels saw Fault.LATE",
    )


class _NoGraphs(HostRuntime):
    def capture(self, body: Callable[[], None]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_no_graph_can_hold_is_enqueued_each_time() -> None:
    seen: list[int] = []
    timed = time_call(_NoGraphs(), seen.append, copies=3)
    assert timed.by == "stream"
    assert seen.count(0) >= 3


def test_short_calls_are_recorded_again_when_their_time_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first time is that of launching."""
    times = iter([1.0, 1e-3, 1e-2, 1e-2])
    monkeypatch.setattr(gpu_timing, "time_once", lambda runtime, run: (run(), next(times))[1])
    recorded: list[int] = []
    timed = time_call(HostRuntime(), recorded.append)
    assert timed.calls == 3
    assert timed.median_s == pytest.approx(1e-2 / 3)
    # Two by themselves; one recorded, run and timed; three recorded, run and timed.
    assert recorded == [0, 1, 0, 0, 0, 1, 2, 0, 1, 2]


def test_shares_are_called_once_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[str] = []

    def job(name: str) -> Job:
        def make() -> Iterable[Entry]:
            yield Entry(name, "shape", Work(1.0, 1.0), lambda idx: called.append(f"{name} {idx}"))
            if name == "b":
                raise RuntimeError("does not compile")

        return Job(name, False, make)

    jobs = [job(name) for name in "abcde"]
    monkeypatch.setattr(gpu_rooflines, "CATALOGUE", {"all": lambda *_: jobs})
    for share in ("0/2", "1/2"):
        assert gpu_rooflines.main(["--device", "cpu", "--share", share]) == 0
    assert called == ["a 0", "c 0", "e 0", "b 0", "d 0"]
    assert capsys.readouterr().out == ""


def test_a_module_that_cannot_be_imported_leaves_the_others() -> None:
    job = Job("a", True, list)

    def missing(device: torch.device, is_tiny: bool) -> list[Job]:
        raise ImportError("no module named x")

    stream = io.StringIO()
    found = find_jobs(
        {"x": missing, "a": lambda *_: [job]}, torch.device("cpu"), Recorder(stream), is_tiny=True
    )
    assert found == [job]
    assert records_of(stream)[0]["what"] == "x"


def test_goals_come_first() -> None:
    cpu = torch.device("cpu")
    jobs = in_order([job for jobs_of in CATALOGUE.values() for job in jobs_of(cpu, False)])
    goals = [job.has_goal for job in jobs]
    assert goals == sorted(goals, reverse=True)
    named = {job.name for job in jobs if job.has_goal}
    assert named == {"attention decode", "attention prefill", "grouped_mlp plain", "m2n"}


def test_clocks_are_those_of_nvidia_smi() -> None:
    # What an H200 answers.
    assert read_sample("1980, 3201, 650.50, 60, 97") == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "power_w": 650.5,
        "celsius": 60.0,
        "busy_percent": 97.0,
    }
    assert read_sample("1980, [N/A], 650.5, 60, 97") is None
    assert read_sample("1980, 3201") is None
    assert read_sample(None) is None
    samples = [dict.fromkeys(FIELDS, value) for value in (1.0, 5.0, 2.0)]
    found = summarise(samples)
    assert found is not None
    assert found["samples"] == 3
    assert found["sm_mhz"] == {"least": 1.0, "median": 2.0, "greatest": 5.0}
    assert summarise([]) is None
    assert describe_clocks(found).startswith("SM clock 2 MHz (1 to 5), power up to 5 W")
    assert describe_clocks(None) == ""
    idle = dict.fromkeys(FIELDS, 345.0) | {"busy_percent": 0.0}
    busy = dict.fromkeys(FIELDS, 1980.0) | {"busy_percent": 97.0}
    found = summarise([idle, busy, idle])
    assert found is not None
    assert (found["samples"], found["sm_mhz"]["least"]) == (1, 1980.0)


def test_nvidia_smi_is_asked_for_the_gpu_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert smi_name("cuda", None) == "0"
    assert smi_name("cuda:1", "") == "1"
    assert smi_name("cuda", "3,GPU-5a0f") == "3"
    assert smi_name("cuda:1", "3,GPU-5a0f") == "GPU-5a0f"
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "1980, 3201, 119.58, 34, 97"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    sample = read_sample(ask_nvidia_smi("GPU-5a0f", list(FIELDS.values())))
    assert sample is not None
    assert sample["power_w"] == 119.58
    assert (tmp_path / "asked").read_text() == (
        "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu "
        "--format=csv,noheader,nounits -i GPU-5a0f\n"
    )


def test_without_nvidia_smi_there_are_no_clocks() -> None:
    asked: list[Sequence[str]] = []
    with Clocks(ask=lambda fields: asked.append(fields)) as clocks:
        pass
    assert clocks.summary() is None
    assert len(asked) <= 1


def test_lines_and_tables() -> None:
    said: list[str] = []
    display = Display(said.append, clock=lambda: 3.0)
    display.record("decode", {"kind": "progress", "text": "building"})
    display.summary("copy 4 TB/s", [("Decode", ["a", "bb"], [["xyz", "1"], ["u", "22"]])])
    assert said[0] == "   0 s  decode        building"
    assert said[2] == "\nDecode\na    bb\nxyz   1\nu    22"
    assert plain_table(["h"], []) == "h"
    skipped = {"kind": "skipped", "what": "norm", "why": "the time was up"}
    assert describe(skipped) == "skipped: norm: the time was up"
    row = {"of": "decode", "engine": "e", "variant": "v", "batch": 2, "step_ms": 1.5}
    assert describe({"kind": "figure", **row, "fraction": 0.5}).endswith(
        "batch 2: 1.50 ms a step, 50% of the byte floor"
    )
    ceiling = {"of": "ceiling", "name": "copy", "per_s": 4.1e12, "unit": "B/s"}
    assert describe({"kind": "figure", **ceiling}) == "copy: 4.10 TB/s"
