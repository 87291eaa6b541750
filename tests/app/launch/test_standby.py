"""Standby processes: roles that they fork are like those that the supervisor executes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.launch import standby as standbys
from app.launch.child_process import RoleCommand
from tests.app.launch.roles import ROOT, dummy, wait_until_gone
from tests.app.launch.test_supervisor import Watched

DUMMY = "tests.app.launch.dummy_role"
STANDBY = "app.launch.standby_process"


def forked(name: str, behaviour: str, *arguments: str) -> RoleCommand:
    """Return the command of a dummy role that a standby process forks."""
    argv = (sys.executable, "-P", "-m", DUMMY, behaviour, *arguments)
    return replace(dummy(name, behaviour), argv=argv, imports=("json",))


def children() -> dict[int, list[str]]:
    """Return the words of the command lines of this process's children."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            words = (each / "cmdline").read_text().rstrip("\0").split("\0")
        except OSError:
            continue
        if parent == os.getpid():
            found[int(each.name)] = words
    return found


def standby_pids() -> list[int]:
    return [pid for pid, words in children().items() if STANDBY in words]


def test_a_forked_role_is_like_an_executed_one() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with Watched() as watched:
        watched.run(forked("expert 0", "inherited"))
        said = [*watched.lines]
        watched.start(forked("expert 1", "crash"))
        while len(watched.exits) < 2:
            watched.step(20.0)
        assert watched.ended == [("expert 0", 0), ("expert 1", 3)]
    assert said == [
        "expert 0 | own group True",
        "expert 0 | stdin /dev/null",
        "expert 0 | flavour ginger",
    ]
    assert watched.count("expert 1 | line 24") == 1
    assert not children()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_roles_with_one_environment_are_forked_by_one_process_and_shown_by_their_commands() -> None:
    with Watched() as watched:
        one, two = forked("expert 0", "wait"), forked("expert 1", "wait")
        cores = {**two.environment, "TOPSPIN_CORES": "0"}
        other = forked("expert 2", "wait")
        other = replace(other, environment={**other.environment, "OMP_NUM_THREADS": "7"})
        watched.run_until_said(
            one, replace(two, environment=cores), other, words=" | pid ", times=3
        )
        assert len(standby_pids()) == 2
        shown = children()
        for command in (one, two, other):
            assert shown[watched.pid(command.name)] == list(command.argv)


def test_a_role_is_forked_again_when_it_was_killed() -> None:
    with Watched() as watched:
        watched.restart("worker")
        watched.run_until_said(forked("expert 0", "wait"), words=" | pid ")
        before, pids = watched.pid("expert 0"), standby_pids()
        os.kill(before, signal.SIGKILL)
        watched.run_until_said(words=" | pid ", times=2)
        assert watched.pid("expert 0") != before
        assert standby_pids() == pids
    assert watched.count("expert 0 was killed by SIGKILL") == 1


@pytest.mark.slow
def test_without_its_standby_process_a_role_is_executed_and_the_next_one_forked_again() -> None:
    with Watched() as watched:
        watched.restart("worker")
        watched.run_until_said(forked("expert 0", "wait"), words=" | pid ")
        os.kill(standby_pids()[0], signal.SIGKILL)
        for life in (2, 3):
            os.kill(watched.pid("expert 0"), signal.SIGKILL)
            watched.run_until_said(words=" | pid ", times=life)
            assert len(standby_pids()) == life - 2


def with_import(command: RoleCommand, directory: Path, text: str) -> RoleCommand:
    """Return `command` with a standby process that imports a module of this text."""
    (directory / "made.py").write_text(text)
    environment = {**command.environment, "PYTHONPATH": f"{ROOT}:{directory}"}
    return replace(command, imports=("made",), environment=environment)


@pytest.mark.parametrize(
    "text",
    [
        "import no.such.module",
        pytest.param(
            "import threading\nthreading.Timer(60, print).start()", marks=pytest.mark.slow
        ),
    ],
)
def test_after_imports_that_fail_or_leave_threads_roles_are_executed(
    tmp_path: Path, text: str
) -> None:
    with Watched() as watched:
        command = with_import(forked("expert 0", "wait"), tmp_path, text)
        watched.run_until_said(command, words=" | pid ")
        watched.run_until_said(replace(command, name="expert 1"), words=" | pid ", times=2)
        assert not standby_pids()


def test_where_memory_is_short_there_is_no_standby_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "available_bytes", lambda: 2**30 - 1)
    with Watched() as watched:
        watched.run_until_said(forked("expert 0", "wait"), words=" | pid ")
        assert not standby_pids()


def test_a_stop_during_the_imports_starts_nothing(tmp_path: Path) -> None:
    with Watched() as watched:
        text = "import threading\nthreading.Event().wait()"
        watched.start(with_import(forked("expert 0", "wait"), tmp_path, text))
        assert len(standby_pids()) == 1
    assert not watched.lines
    assert not children()


def test_nothing_outlives_a_killed_supervisor() -> None:
    program = (
        "import os\n"
        "from tests.app.launch.test_standby import Watched, children, forked\n"
        "with Watched() as watched:\n"
        "    watched.run_until_said(forked('expert 0', 'wait'), words=' | pid ')\n"
        "    print(*children(), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    command = (sys.executable, "-c", program)
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    pids = [int(word) for word in ended.stdout.split()]
    assert (ended.returncode, len(pids)) == (-signal.SIGKILL, 2)
    assert all(map(wait_until_gone, pids))
