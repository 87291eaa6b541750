"""The supervisor with dummy roles: output, exits, signals, the order of stopping."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from app.launch import supervisor as supervision
from app.launch.supervisor import (
    NUM_TAIL_LINES,
    Part,
    RoleCommand,
    RoleExit,
    StopGraces,
    Supervisor,
)
from tests.app.launch.roles import dummy, wait_until_gone
from topspin.errors import EngineError

STEP_TIMEOUT_S = 20.0


def run_until_an_exit(supervisor: Supervisor, commands: Iterable[RoleCommand]) -> None:
    for command in commands:
        supervisor.start(command)
    step_until_ending(supervisor)


def step_until_ending(supervisor: Supervisor) -> None:
    while not supervisor.is_ending:
        supervisor.step(STEP_TIMEOUT_S)


def step_until_said(supervisor: Supervisor, lines: list[str], *wanted: str) -> None:
    while not set(wanted) <= set(lines):
        assert not supervisor.is_ending, lines
        supervisor.step(STEP_TIMEOUT_S)


def test_output_is_forwarded_line_by_line_under_the_roles_name() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        run_until_an_exit(supervisor, [dummy("expert 0", "raw_output")])
    assert lines[:3] == ["expert 0 | to stderr", "expert 0 | bad � byte", "expert 0 | "]
    assert lines[-1] == "expert 0 | no newline"
    # A line without end is cut, so that it cannot fill the memory; no byte of it is lost.
    assert sum(line.count("x") for line in lines[3:-1]) == 150_000 + len(lines[3:-1])
    assert max(map(len, lines)) < 150_000


def test_an_exit_is_told_with_status_and_last_lines() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        run_until_an_exit(supervisor, [dummy("expert 1", "crash")])
        (gone,) = supervisor.exits
    assert gone.describe() == "expert 1 exited with status 3"
    assert gone.last_lines == tuple(f"line {n}" for n in range(25 - NUM_TAIL_LINES, 25))
    assert lines == [f"expert 1 | line {n}" for n in range(25)]


def test_a_signal_is_told_by_name() -> None:
    with Supervisor(emit=lambda line: None) as supervisor:
        run_until_an_exit(supervisor, [dummy("attention 0", "die_by_signal")])
        assert supervisor.exits == [RoleExit("attention 0", -9, ())]
        assert supervisor.exits[0].describe() == "attention 0 was killed by SIGKILL"


def start_and_wait_until_up(
    supervisor: Supervisor, lines: list[str], *commands: RoleCommand
) -> None:
    for command in commands:
        supervisor.start(command)
    while sum(" | pid " in line for line in lines) < len(commands):
        supervisor.step(STEP_TIMEOUT_S)


def test_the_gateway_is_asked_to_stop_first_then_the_scheduler_then_who_is_left() -> None:
    lines: list[str] = []
    # No node here hears from the scheduler; the grace period for that ends at once.
    with Supervisor(emit=lines.append, graces=StopGraces(coordinated_s=0.5)) as supervisor:
        start_and_wait_until_up(
            supervisor,
            lines,
            dummy("expert 0", "wait"),
            dummy("scheduler", "wait", part="coordinator"),
            dummy("gateway", "wait", part="front"),
        )
        supervisor.stop()
        assert [line for line in lines if "terminated" in line] == [
            "gateway | terminated",
            "scheduler | terminated",
            "expert 0 | terminated",
        ]
        assert [(gone.name, gone.returncode) for gone in supervisor.exits] == [
            ("gateway", 0),
            ("scheduler", 0),
            ("expert 0", 0),
        ]


def test_nodes_that_hear_from_the_scheduler_need_no_signal(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    lines: list[str] = []
    # With this grace period, a needless wait for a node would be noticed.
    with Supervisor(emit=lines.append, graces=StopGraces(coordinated_s=20.0)) as supervisor:
        start_and_wait_until_up(
            supervisor,
            lines,
            dummy("expert 0", "follow", str(fifo)),
            dummy("scheduler", "hold", str(fifo), part="coordinator"),
        )
        supervisor.stop()
        assert [(gone.name, gone.returncode) for gone in supervisor.exits] == [
            ("scheduler", 0),
            ("expert 0", 0),
        ]
    assert lines[-1] == "expert 0 | saw the others end"


def test_a_busy_gateway_may_end_its_requests_while_the_others_stop(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    lines: list[str] = []
    with Supervisor(emit=lines.append, graces=StopGraces(front_s=0.05)) as supervisor:
        supervisor.start(dummy("gateway", "outlive", str(fifo), part="front"))
        supervisor.start(dummy("scheduler", "hold", str(fifo), part="coordinator"))
        step_until_said(supervisor, lines, "gateway | up")
        while not any(line.startswith("scheduler | pid") for line in lines):
            supervisor.step(STEP_TIMEOUT_S)
        supervisor.stop()
        assert [gone.name for gone in supervisor.exits] == ["scheduler", "gateway"]
        assert [gone.returncode for gone in supervisor.exits] == [0, 0]
    assert lines[-1] == "gateway | saw the others end"


def test_who_ignores_sigterm_is_killed() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append, graces=StopGraces(stop_s=0.2)) as supervisor:
        supervisor.start(dummy("expert 0", "stubborn"))
        step_until_said(supervisor, lines, "expert 0 | up")
        supervisor.stop()
        assert [gone.describe() for gone in supervisor.exits] == ["expert 0 was killed by SIGKILL"]
    assert lines[-2:] == ["expert 0 | ignored", "expert 0 did not stop in time and is killed"]


def test_a_role_takes_its_own_processes_along() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        run_until_an_exit(supervisor, [dummy("expert 0", "leave_a_grandchild")])
    (line,) = lines
    assert wait_until_gone(int(line.rpartition(" ")[2]))


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_in_order(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Supervisor(emit=lambda line: None) as supervisor:
        run_until_an_exit(supervisor, [dummy("poker", "signal_parent", str(int(number)))])
        assert supervisor.signal_number == number
        assert not supervisor.exits
        assert not supervisor.was_forced
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("terminal_signals")
def test_in_the_background_a_lost_terminal_is_ignored_and_a_sigint_is_not() -> None:
    """As under nohup, where both are ignored at first."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with Supervisor(emit=lambda line: None) as supervisor:
        commands = [dummy("poker", "signal_parent", str(int(signal.SIGHUP)))]
        commands += [dummy("expert 0", "signal_parent", str(int(signal.SIGINT)))]
        run_until_an_exit(supervisor, commands)
        assert supervisor.signal_number == signal.SIGINT
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_second_signal_kills_at_once() -> None:
    with Supervisor(emit=lambda line: None, graces=StopGraces(stop_s=1e6)) as supervisor:
        # On SIGTERM this role signals again instead of ending, so stop() would wait for long.
        commands = [dummy("poker", "signal_parent", "2", "15"), dummy("expert 0", "stubborn")]
        run_until_an_exit(supervisor, commands)
        supervisor.stop()
        assert supervisor.was_forced
        assert supervisor.signal_number == signal.SIGINT
        assert {gone.describe() for gone in supervisor.exits} >= {"poker was killed by SIGKILL"}
        assert len(supervisor.exits) == 2


def test_what_a_role_inherits() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        run_until_an_exit(supervisor, [dummy("expert 0", "inherited")])
    assert lines == [
        "expert 0 | own group True",
        "expert 0 | stdin /dev/null",
        "expert 0 | flavour ginger",
    ]


def test_a_role_that_cannot_be_started_stops_the_others() -> None:
    lines: list[str] = []
    missing = RoleCommand(name="expert 1", argv=("/does/not/exist",))

    def start_both() -> None:
        with Supervisor(emit=lines.append) as supervisor:
            supervisor.start(dummy("expert 0", "wait"))
            while not lines:
                supervisor.step(STEP_TIMEOUT_S)
            supervisor.start(missing)

    with pytest.raises(EngineError, match=r"cannot start expert 1: .*/does/not/exist"):
        start_both()
    assert wait_until_gone(int(lines[0].rpartition(" ")[2]), timeout_s=0)


def test_nothing_stays_open() -> None:
    def open_fds() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    before = open_fds()
    with Supervisor(emit=lambda line: None) as supervisor:
        run_until_an_exit(supervisor, [dummy("a", "crash"), dummy("b", "wait")])
    assert open_fds() == before


def test_a_worker_that_ends_is_started_again_later_each_time() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        supervisor.restart("worker")
        started = time.monotonic()
        supervisor.start(dummy("expert 1", "crash"))
        while sum("started again" in line for line in lines) < 3:  # it ran three times
            supervisor.step(STEP_TIMEOUT_S)
        assert time.monotonic() - started > 0.2 + 0.4
        assert not supervisor.is_ending
    told = [line for line in lines if line.startswith("topspin:")]
    cause = "topspin: expert 1 exited with status 3; it is started again in"
    assert told[:2] == [f"{cause} 0.2 s", f"{cause} 0.4 s"]


@pytest.mark.parametrize("part", ["worker", "coordinator", "helper"])
def test_a_role_that_ends_too_often_is_given_up(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(supervision, "MAX_RESTARTS", 1)
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        supervisor.restart(part)
        supervisor.start(dummy("the role", "crash", part=part))
        while not any("it is not started again" in line for line in lines):
            supervisor.step(STEP_TIMEOUT_S)
        ended = [gone.name for gone in supervisor.exits]
        assert ended == ([] if part == "helper" else ["the role"])
        assert lines.count("the role | line 24") == 2
    assert sum("exited with status 3, after 1 restarts in" in line for line in lines) == 1


def test_ends_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(supervision, "MAX_RESTARTS", 1)
    monkeypatch.setattr(supervision, "RESTARTS_WITHIN_S", 0.0)
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        supervisor.restart("worker")
        supervisor.start(dummy("expert 1", "crash"))
        while sum("started again" in line for line in lines) < 3:
            supervisor.step(STEP_TIMEOUT_S)
        assert not supervisor.is_ending


@pytest.mark.parametrize("part", ["front", "coordinator"])
def test_only_workers_are_started_again(part: Part) -> None:
    with Supervisor(emit=lambda line: None) as supervisor:
        supervisor.restart("worker")
        run_until_an_exit(supervisor, [dummy("gateway", "crash", part=part)])
        assert [gone.name for gone in supervisor.exits] == ["gateway"]


def test_helpers_are_started_again_where_workers_are_not() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        supervisor.restart("helper")
        supervisor.start(dummy("draft 0", "crash", part="helper"))
        while not any("started again" in line for line in lines):
            supervisor.step(STEP_TIMEOUT_S)
        assert not supervisor.is_ending
        run_until_an_exit(supervisor, [dummy("expert 1", "crash")])
        assert [gone.name for gone in supervisor.exits] == ["expert 1"]


def test_optional_workers_are_started_again_unless_they_have_left() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        supervisor.restart("optional")
        supervisor.start(dummy("expert 1", "crash", part="optional"))
        supervisor.start(dummy("expert 2", "wait", part="optional"))
        supervisor.start(dummy("expert 3", "die_by_signal", "15", part="optional"))
        while not (pids := [line for line in lines if line.startswith("expert 2 | pid ")]):
            supervisor.step(STEP_TIMEOUT_S)
        os.kill(int(pids[0].split()[-1]), signal.SIGTERM)
        cause = "topspin: expert 1 exited with status 3; it is started again in"
        left = [f"topspin: expert {number} has left" for number in (2, 3)]
        step_until_said(supervisor, lines, f"{cause} 0.2 s", f"{cause} 0.4 s", *left)
    assert sum("is started again" in line for line in lines) == 2


def test_a_stop_cancels_restarts() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        supervisor.restart("worker")
        supervisor.start(dummy("expert 1", "crash"))
        while not any("started again" in line for line in lines):
            supervisor.step(STEP_TIMEOUT_S)
    assert lines.count("expert 1 | line 24") == 1


def test_a_worker_that_is_taken_for_dead_is_killed_though_it_is_frozen() -> None:
    lines: list[str] = []
    with Supervisor(emit=lines.append) as supervisor:
        supervisor.restart("worker")
        supervisor.start(dummy("expert 1", "wait"))
        while not any(" | pid " in line for line in lines):
            supervisor.step(STEP_TIMEOUT_S)
        pid = int(lines[0].split()[-1])
        os.kill(pid, signal.SIGSTOP)
        supervisor.kill(os.getpid())  # not a worker
        supervisor.kill(pid)
        while sum(" | pid " in line for line in lines) < 2:
            supervisor.step(STEP_TIMEOUT_S)
        supervisor.kill(pid)  # from an earlier life
        assert wait_until_gone(pid, timeout_s=0)
    assert f"expert 1 (pid {pid}) is taken for dead and is killed" in lines
