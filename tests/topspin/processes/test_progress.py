"""A long step is reported regularly from within; a short or hung one never.

Who reads the progress word learns whether a process is alive, and ready.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.cli.main import main
from tests.m2n_comm.harness import make_ticket
from tests.mutations import damaged
from topspin.errors import ConfigError
from topspin.messages import Progress
from topspin.processes.progress import (
    FILE_VARIABLE,
    INTERVAL_S,
    ProgressReading,
    ProgressWord,
    StepProgress,
    _began,
    read_progress,
    trouble,
)


class FakeControl:
    """Keeps the sent messages."""

    def __init__(self) -> None:
        self.sent: list[Progress] = []

    def send(self, message: Progress) -> None:
        self.sent.append(message)


class World:
    """A reporter on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("topspin.processes.progress.time.monotonic", lambda: self.now_s)
        self._control: Any = FakeControl()
        self.progress = StepProgress(self._control, role="expert", index=3)

    def states(self) -> list[str]:
        """Return the states reported since the last call."""
        sent, self._control.sent = self._control.sent, []
        assert all((m.role, m.index, m.generation) == ("expert", 3, 1) for m in sent)
        return [message.state for message in sent]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_one_message_per_interval_and_none_for_short_steps(world: World) -> None:
    for step in range(1, 50):  # long in all, each of them short
        world.progress.begin(make_ticket(step))
        world.now_s += INTERVAL_S * 0.9
        world.progress.beat()
    assert world.states() == []
    world.progress.begin(make_ticket(50))
    for _ in range(40):
        world.now_s += INTERVAL_S / 4
        world.progress.beat()
    assert world.states() == ["working"] * 10


def test_a_long_wait_is_told_and_taken_back_at_once(world: World) -> None:
    world.progress.begin(make_ticket(1))
    for _ in range(10):
        world.now_s += INTERVAL_S / 4
        world.progress.waiting()
    assert world.states() == ["waiting"] * 2
    world.progress.beat()
    assert world.states() == ["working"]
    for _ in range(20):  # each wait is short
        world.now_s += INTERVAL_S * 0.8
        world.progress.waiting()
        world.progress.beat()
    assert set(world.states()) == {"working"}


def test_an_end_is_told_once_and_only_if_nothing_follows(world: World) -> None:
    world.progress.idle()
    assert not world.progress.owes_end
    world.progress.begin(make_ticket(1))
    world.progress.end()
    assert world.progress.owes_end
    world.progress.idle()
    world.progress.begin(make_ticket(2))
    assert not world.progress.owes_end
    world.progress.end()
    for _ in range(20):
        world.now_s += INTERVAL_S / 4
        world.progress.waiting()  # outside of a step
        world.progress.idle()
    assert world.states() == ["done"]
    assert not world.progress.owes_end


def test_an_end_without_a_step_is_not_reported(world: World) -> None:
    """A node that is taken in late leaves the generation before, in which it had no step."""
    world.progress.end()
    world.now_s += 2 * INTERVAL_S
    assert not world.progress.owes_end
    world.progress.idle()
    assert world.states() == []


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
    imported = "from topspin.processes.progress import ProgressWord"
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


@settings(max_examples=50)
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
