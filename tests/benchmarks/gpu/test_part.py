"""A part of `make gpu`: the content of its JSON at any moment, and when it has failed."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.part import Part, parse, parser


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_part(folder: Path, clock: Clock) -> Part:
    args = Namespace(output=folder, quick=False, seconds=10.0)
    return Part("rooflines", args, "NVIDIA H200", clock)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu-rooflines-nvidia-h200.json").read_text())
    return found


def test_a_part_that_is_stopped_leaves_what_it_found(tmp_path: Path) -> None:
    part = make_part(tmp_path, Clock())
    part.figure("a line", of="kernel", us=3.0)
    found = read(tmp_path)
    assert found["figures"] == [{"of": "kernel", "us": 3.0}]
    assert not found["complete"]
    assert part.finish() == 0
    assert read(tmp_path)["complete"]
    assert read(tmp_path)["versions"]["torch"]


def test_a_failure_fails_the_part_and_the_others_go_on(tmp_path: Path) -> None:
    part = make_part(tmp_path, Clock())
    with part.attempt("attention") as is_time:
        assert is_time
        raise RuntimeError("the device is lost")
    part.figure("another", of="kernel")
    assert part.finish() == 1
    assert read(tmp_path)["problems"] == ["attention: RuntimeError: the device is lost"]
    assert len(read(tmp_path)["figures"]) == 1


def test_what_no_time_was_left_for_fails_the_part(tmp_path: Path) -> None:
    clock = Clock()
    part = make_part(tmp_path, clock)
    clock.now_s = 10.0
    with part.attempt("experts") as is_time:
        assert not is_time
    assert part.finish() == 1
    assert read(tmp_path)["problems"] == ["experts: the time was up"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [(["--device", "cpu"], "add --quick"), (["--quick"], "add --output FOLDER")],
)
def test_results_without_speeds_are_refused(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(parser("rooflines", 1.0), flags)
    assert why in capsys.readouterr().err
