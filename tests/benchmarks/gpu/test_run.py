"""A part's process: its records as they come, its log, and its end when its time is over."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_records import Deadline, Recorder, read_record
from benchmarks.gpu_run import Outcome, part_command, run_part


def run(script: str, tmp_path: Path, limit_s: float = 60.0) -> tuple[Outcome, list[str]]:
    seen: list[str] = []
    outcome = run_part(
        [sys.executable, "-c", script],
        os.environ,
        limit_s,
        tmp_path / "log",
        lambda record: seen.append(record["text"]),
    )
    return outcome, seen


def test_records_are_handed_on_and_the_rest_is_logged(tmp_path: Path) -> None:
    outcome, seen = run(
        "import sys\n"
        "from benchmarks.gpu_records import Recorder\n"
        "Recorder().progress('begun')\n"
        "print('chatter')\n"
        "print('to errors', file=sys.stderr)\n"
        "Recorder().write('progress', text='over')\n",
        tmp_path,
    )
    assert seen == ["begun", "over"]
    assert outcome.status == 0
    assert outcome.is_good
    assert sorted(outcome.tail) == ["chatter", "to errors"]


def test_a_failure_keeps_what_was_found_before_it(tmp_path: Path) -> None:
    outcome, seen = run(
        "from benchmarks.gpu_records import Recorder\n"
        "Recorder().progress('found')\n"
        "raise SystemExit('a fault')\n",
        tmp_path,
    )
    assert seen == ["found"]
    assert outcome.status == 1
    assert not outcome.is_good
    assert outcome.tail == ["a fault"]


def test_a_problem_is_no_good_end(tmp_path: Path) -> None:
    outcome = run_part(
        [
            *(sys.executable, "-c"),
            "from benchmarks.gpu_records import Recorder; Recorder().problem('a test', 'failed')",
        ],
        os.environ,
        60.0,
        tmp_path / "log",
        lambda _: None,
    )
    assert outcome.status == 0
    assert not outcome.is_good
    assert outcome.of_kind("problem") == [{"kind": "problem", "what": "a test", "why": "failed"}]


def test_what_outlasts_its_time_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import time; held = open({str(fifo)!r}, 'w'); time.sleep(600)"
    outcome, _ = run(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}]).wait()\n",
        tmp_path,
        limit_s=2.0,
    )
    assert outcome.status is None
    assert not outcome.is_good
    # The pipe ends when nobody holds its other end any more.
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_records_have_a_kind_and_finite_numbers() -> None:
    assert read_record('{"kind": "figure", "of": "x"}') == {"kind": "figure", "of": "x"}
    for line in ("", "text", "3", '{"kind": "other"}', "{}"):
        assert read_record(line) is None
    with pytest.raises(ValueError, match="JSON compliant"):
        Recorder().write("figure", value=float("nan"))


def test_a_deadline_goes_by_its_clock() -> None:
    now = [10.0]
    deadline = Deadline(5.0, clock=lambda: now[0])
    assert deadline.has(5.0)
    now[0] = 16.0
    assert deadline.left == -1.0
    assert not deadline.has(0.0)


def test_work_begins_only_if_it_can_end() -> None:
    now = [0.0]
    deadline = Deadline(10.0, clock=lambda: now[0])
    assert deadline.has_another
    for seconds in (4.0, 1.0):
        with deadline.measured():
            now[0] += seconds
    assert deadline.has_another
    now[0] = 6.5
    assert not deadline.has_another
    assert deadline.has(3.0)


def test_a_parts_command() -> None:
    command = part_command("benchmarks.gpu_decode", device="cuda:1", is_quick=True, seconds=12.34)
    assert command[1:] == [
        *("-m", "benchmarks.gpu_decode", "--device", "cuda:1", "--seconds", "12.3", "--quick"),
    ]
