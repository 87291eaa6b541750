"""The progress word: who reads it learns whether a process is alive, and ready."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.cli.main import main
from tests.mutations import damaged
from topspin.errors import ConfigError
from topspin.processes.progress_word import (
    FILE_VARIABLE,
    ProgressReading,
    ProgressWord,
    _began,
    read_progress,
    trouble,
)


@pytest.mark.parametrize(
    ("state", "age_s", "alive", "ready"),
    [
        ("starting", 900.0, True, False),
        ("loading", 900.0, True, False),
        ("idle", 900.0, True, True),
        ("working", 9.0, True, True),
        ("working", 11.0, False, False),
    ],
)
def test_what_makes_a_process_alive_and_ready(
    state: str, age_s: float, alive: bool, ready: bool
) -> None:
    found = ProgressReading(os.getpid(), _began(os.getpid()), state, age_s)  # type: ignore[arg-type]
    assert (trouble(found, ready=False, within_s=10.0) is None) == alive
    assert (trouble(found, ready=True, within_s=10.0) is None) == ready


def test_a_word_is_read_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    word = ProgressWord.of_process()
    assert [each.name for each in tmp_path.iterdir()] == ["progress"]
    for state, status in (("starting", 1), ("loading", 1), ("idle", 0), ("working", 0)):
        word.set(state)  # type: ignore[arg-type]
        assert main(["probe", str(file), "--ready"]) == status
        assert f"{os.getpid()} is {state}" in capsys.readouterr().out
        assert main(["probe", str(file)]) == 0
    before = read_progress(file)
    word.touch()
    after = read_progress(file)
    assert after.state == before.state == "working"
    assert after.age_s < before.age_s + 1
    time.sleep(0.02)
    assert main(["probe", str(file), "--within", "0.01"]) == 1
    assert "did not get on for 0 s" in capsys.readouterr().out


def test_the_file_of_a_process_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "progress"
    imported = "from topspin.processes.progress_word import ProgressWord"
    code = f"{imported}; ProgressWord.of_process().set('working')"
    environment = {**os.environ, FILE_VARIABLE: str(file)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert main(["probe", str(file)]) == 1
    assert "has ended" in capsys.readouterr().out


def test_a_process_with_the_number_of_one_that_has_ended(tmp_path: Path) -> None:
    """As in containers, where the process that is started again is process 7 again."""
    ProgressWord(tmp_path / "word").set("idle")
    found = read_progress(tmp_path / "word")
    assert trouble(found, ready=True, within_s=1.0) is None
    earlier = found._replace(began=found.began - 1)
    assert trouble(earlier, ready=False, within_s=1.0) == f"process {os.getpid()} has ended"


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    for data in (b"", b"x" * 32, bytes(40)):
        (tmp_path / "other").write_bytes(data)
        assert main(["probe", str(tmp_path / "other")]) == 2
        assert "it is not one" in capsys.readouterr().err
    assert main(["probe", str(tmp_path / "other"), "--within", "0"]) == 2
    with pytest.raises(ConfigError, match=r"progress file .*: Not a directory"):
        ProgressWord(tmp_path / "other" / "progress")


GOOD = struct.pack("<QQQQ", os.getpid(), _began(os.getpid()), 3, time.monotonic_ns())


@settings(max_examples=100, deadline=None)
@given(data=damaged([GOOD]) | st.binary(max_size=40))
@example(data=struct.pack("<QQQQ", 2**63, 1, 3, 1))
@example(data=struct.pack("<QQQQ", 0, 0, 3, 1))
@example(data=GOOD + bytes(1000))
def test_any_file_is_a_word_or_a_config_error(some_file: Path, data: bytes) -> None:
    some_file.write_bytes(data)
    try:
        found = read_progress(some_file)
    except ConfigError as error:
        shown = str(error)
        assert "it is not one" in shown
        return
    trouble(found, ready=True, within_s=1.0)


@pytest.fixture(scope="module")
def some_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("progress") / "word"
