"""The supervisor with dummy roles: output, exits, signals, the order of stopping."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.launch import supervisor as supervision
from app.launch.child_process import NUM_TAIL_LINES, Part, RoleCommand
from app.launch.supervisor import StopGraces, Supervisor
from tests.app.launch.roles import dummy, wait_until_gone
from tests.pairwise import few, slow_rows
from topspin.errors import EngineError

STEP_TIMEOUT_S = 20.0


class Watched(Supervisor):
    """A supervisor that keeps the lines of its roles."""

    def __init__(self, **graces: float) -> None:
        self.lines: list[str] = []
        super().__init__(emit=self.lines.append, graces=StopGraces(**graces))

    def run(self, *commands: RoleCommand, until: Callable[[], bool] | None = None) -> None:
        """Start roles; run until something is so, by default until an exit or a signal."""
        for command in commands:
            self.start(command)
        while not (self.is_ending if until is None else until()):
            assert until is None or not self.is_ending, self.lines
            self.step(STEP_TIMEOUT_S)

    def run_until_said(self, *commands: RoleCommand, words: str, times: int = 1) -> None:
        """Start roles; run until so many lines have `words`."""
        self.run(*commands, until=lambda: self.count(words) >= times)

    def count(self, words: str) -> int:
        """Return how many lines have `words`."""
        return sum(words in line for line in self.lines)

    def pid(self, name: str) -> int:
        """Return the process id that the role `name` said last."""
        said = [line for line in self.lines if line.startswith(f"{name} | pid ")]
        return int(said[-1].split()[-1])

    @property
    def ended(self) -> list[tuple[str, int]]:
        """Return who has ended, in order, with the status."""
        return [(gone.name, gone.returncode) for gone in self.exits]


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def test_output_is_forwarded_line_by_line_under_the_roles_name() -> None:
    with Watched() as watched:
        watched.run(dummy("expert 0", "raw_output"))
    lines = watched.lines
    assert lines[:3] == ["expert 0 | to stderr", "expert 0 | bad � byte", "expert 0 | "]
    assert lines[-1] == "expert 0 | no newline"
    # A line without end is cut, so that it cannot fill the memory; no byte of it is lost.
    assert sum(line.count("x") for line in lines[3:-1]) == 150_000 + len(lines[3:-1])
    assert max(map(len, lines)) < 150_000


@pytest.mark.parametrize(
    ("behaviour", "ending", "num_lines"),
    [("crash", "exited with status 3", 25), ("die_by_signal", "was killed by SIGKILL", 0)],
)
def test_an_exit_is_told_with_its_cause_and_last_lines(
    behaviour: str, ending: str, num_lines: int
) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with Watched() as watched:
        watched.run(dummy("expert 1", behaviour))
        (gone,) = watched.exits
    assert gone.describe() == f"expert 1 {ending}"
    said = [f"line {n}" for n in range(num_lines)]
    assert gone.last_lines == tuple(said[-NUM_TAIL_LINES:])
    assert watched.lines == [f"expert 1 | {line}" for line in said]
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_gateway_is_asked_to_stop_first_then_the_scheduler_then_who_is_left() -> None:
    # No node here hears from the scheduler; the grace period for that ends at once.
    with Watched(coordinated_s=0.2) as watched:
        watched.run_until_said(
            dummy("expert 0", "wait"),
            dummy("scheduler", "wait", part="coordinator"),
            dummy("gateway", "wait", part="front"),
            words=" | pid ",
            times=3,
        )
        watched.stop()
        assert watched.ended == [("gateway", 0), ("scheduler", 0), ("expert 0", 0)]
    assert [line.split()[0] for line in watched.lines if "terminated" in line] == [
        *("gateway", "scheduler", "expert")
    ]


def test_nodes_that_hear_from_the_scheduler_need_no_signal(fifo: str) -> None:
    # With this grace period, a needless wait for a node would be noticed.
    with Watched(coordinated_s=20.0) as watched:
        watched.run_until_said(
            dummy("expert 0", "follow", fifo),
            dummy("scheduler", "hold", fifo, part="coordinator"),
            words=" | pid ",
            times=2,
        )
        watched.stop()
        assert watched.ended == [("scheduler", 0), ("expert 0", 0)]
    assert watched.lines[-1] == "expert 0 | saw the others end"


def test_a_busy_gateway_may_end_its_requests_while_the_others_stop(fifo: str) -> None:
    with Watched(front_s=0.05) as watched:
        gateway = dummy("gateway", "outlive", fifo, part="front")
        scheduler = dummy("scheduler", "hold", fifo, part="coordinator")
        watched.run(
            gateway,
            scheduler,
            until=lambda: min(map(watched.count, ("gateway | up", "scheduler | pid"))) > 0,
        )
        watched.stop()
        assert watched.ended == [("scheduler", 0), ("gateway", 0)]
    assert watched.lines[-1] == "gateway | saw the others end"


@pytest.mark.slow
def test_while_the_gateway_ends_its_requests_a_node_is_started_again(fifo: str) -> None:
    with Watched(front_s=20.0) as watched:
        watched.restart("worker")
        watched.restart("front")
        gateway = dummy("gateway", "end_with", fifo, part="front")
        watched.run_until_said(gateway, words="gateway | up")
        watched.start(dummy("expert 0", "hold_in_a_second_life", fifo))
        watched.stop()
        assert watched.ended == [("gateway", 0), ("expert 0", 0)]
    assert watched.count("expert 0 was killed by SIGKILL; it is started again") == 1


def test_who_ignores_sigterm_is_killed() -> None:
    with Watched(stop_s=0.2) as watched:
        watched.run_until_said(dummy("expert 0", "stubborn"), words="expert 0 | up")
        watched.stop()
        assert watched.ended == [("expert 0", -signal.SIGKILL)]
    assert watched.lines[-2:] == [
        "expert 0 | ignored",
        "expert 0 did not stop in time and is killed",
    ]


def test_a_role_takes_its_own_processes_along() -> None:
    with Watched() as watched:
        watched.run(dummy("expert 0", "leave_a_grandchild"))
    (line,) = watched.lines
    assert wait_until_gone(int(line.rpartition(" ")[2]))


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_in_order(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Watched() as watched:
        watched.run(dummy("poker", "signal_parent", str(int(number))))
        assert watched.signal_number == number
        assert not watched.exits
        assert not watched.was_forced
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("terminal_signals")
def test_in_the_background_a_lost_terminal_is_ignored_and_a_sigint_is_not() -> None:
    """As under nohup, where both are ignored at first."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with Watched() as watched:
        watched.run(
            dummy("poker", "signal_parent", str(int(signal.SIGHUP))),
            dummy("expert 0", "signal_parent", str(int(signal.SIGINT))),
        )
        assert watched.signal_number == signal.SIGINT
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_second_signal_kills_at_once() -> None:
    with Watched(stop_s=1e6) as watched:
        # On SIGTERM this role signals again instead of ending, so stop() would wait for long.
        watched.run(dummy("poker", "signal_parent", "2", "15"), dummy("expert 0", "stubborn"))
        watched.stop()
        assert watched.was_forced
        assert watched.signal_number == signal.SIGINT
        assert ("poker", -signal.SIGKILL) in watched.ended
        assert len(watched.exits) == 2


def test_what_a_role_inherits() -> None:
    with Watched() as watched:
        watched.run(dummy("expert 0", "inherited"))
    assert watched.lines == [
        "expert 0 | own group True",
        "expert 0 | stdin /dev/null",
        "expert 0 | flavour ginger",
    ]


def test_a_role_that_cannot_be_started_stops_the_others() -> None:
    watched = Watched()

    def start_both() -> None:
        with watched:
            watched.run_until_said(dummy("expert 0", "wait"), words=" | pid ")
            watched.start(RoleCommand(name="expert 1", argv=("/does/not/exist",)))

    with pytest.raises(EngineError, match=r"cannot start expert 1: .*/does/not/exist"):
        start_both()
    assert wait_until_gone(watched.pid("expert 0"), timeout_s=0)


def test_a_worker_that_ends_is_started_again_later_each_time() -> None:
    with Watched() as watched:
        watched.restart("worker")
        started = time.monotonic()
        watched.run_until_said(dummy("expert 1", "crash"), words="started again", times=3)
        assert time.monotonic() - started > 0.2 + 0.4
    cause = "topspin: expert 1 exited with status 3; it is started again in"
    told = [line for line in watched.lines if line.startswith("topspin:")]
    assert told[:2] == [f"{cause} 0.2 s", f"{cause} 0.4 s"]
    # The stop has cancelled the third restart.
    assert watched.count("expert 1 | line 24") == 3


@pytest.mark.parametrize("part", few(["worker", "coordinator", "front", "helper"], "worker"))
def test_a_role_that_ends_too_often_is_given_up(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(supervision, "MAX_RESTARTS", 1)
    with Watched() as watched:
        watched.restart(part)
        given_up = "exited with status 3, after 1 restarts in"
        watched.run(
            dummy("the role", "crash", part=part), until=lambda: watched.count(given_up) > 0
        )
        assert watched.ended == ([] if part == "helper" else [("the role", 3)])
    assert watched.count("the role | line 24") == 2
    assert watched.count("it is not started again") == 1


@pytest.mark.slow
def test_ends_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(supervision, "MAX_RESTARTS", 1)
    monkeypatch.setattr(supervision, "RESTARTS_WITHIN_S", 0.0)
    with Watched() as watched:
        watched.restart("worker")
        watched.run_until_said(dummy("expert 1", "crash"), words="started again", times=3)


@pytest.mark.parametrize(
    ("restarted", "part"),
    slow_rows([("worker", "coordinator"), ("helper", "worker")], beside=[("worker", "front")]),
)
def test_only_roles_of_that_part_are_started_again(restarted: Part, part: Part) -> None:
    with Watched() as watched:
        watched.restart(restarted)
        watched.run_until_said(dummy("one", "crash", part=restarted), words="started again")
        watched.run(dummy("another", "crash", part=part))
        assert watched.ended == [("another", 3)]


@pytest.mark.slow
def test_optional_workers_are_started_again_unless_they_have_left() -> None:
    with Watched() as watched:
        watched.restart("optional")
        watched.run_until_said(
            dummy("expert 1", "crash", part="optional"),
            dummy("expert 2", "wait", part="optional"),
            dummy("expert 3", "die_by_signal", "15", part="optional"),
            words="expert 2 | pid ",
        )
        os.kill(watched.pid("expert 2"), signal.SIGTERM)
        watched.run(
            until=lambda: watched.count("has left") == 2 and watched.count("started again") >= 2
        )
    for told in (
        "topspin: expert 1 exited with status 3; it is started again in 0.4 s",
        "topspin: expert 2 has left",
        "topspin: expert 3 has left",
    ):
        assert told in watched.lines


def test_a_worker_that_is_taken_for_dead_is_killed_though_it_is_frozen() -> None:
    with Watched() as watched:
        watched.restart("worker")
        watched.run_until_said(dummy("expert 1", "wait"), words=" | pid ")
        pid = watched.pid("expert 1")
        os.kill(pid, signal.SIGSTOP)
        watched.kill(os.getpid())  # not a worker
        watched.kill(pid)
        watched.run_until_said(words=" | pid ", times=2)
        watched.kill(pid)  # from an earlier life
        assert wait_until_gone(pid, timeout_s=0)
    assert watched.count(f"expert 1 (pid {pid}) is taken for dead and is killed") == 1
