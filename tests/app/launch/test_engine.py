"""Launching an engine of dummy roles: readiness, failures, signals, no process left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.launch import engine as launcher
from app.launch.child_process import RoleCommand
from app.launch.display import Display
from app.launch.engine import LaunchContext, RoleTable, gateway_url, launch
from tests.app.launch.engines import engine
from tests.app.launch.roles import ROOT, dummy, wait_until_gone
from tests.structs import changed
from topspin.errors import ConfigError


class RecordingDisplay(Display):
    """Keeps the shown lines; `states` are the progress texts without repetitions."""

    def __init__(self, *, announced: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.states: list[str] = []
        self.announcements: list[str] = []
        self._announced = announced

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, state: str, elapsed_s: float) -> None:
        if self.states[-1:] != [state]:
            self.states.append(state)

    def announce(self, text: str) -> None:
        self.announcements.append(text)
        self._announced(text)


def interrupt(text: str) -> None:
    """Ask the engine to stop, as Ctrl-C does, once it is healthy."""
    url = text.split()[4]
    with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
        assert response.status == 200
    os.kill(os.getpid(), signal.SIGINT)


def gateway(context: LaunchContext, *, num_refusals: int = 1) -> RoleCommand:
    return dummy(
        "gateway",
        "gateway",
        f"/dev/fd/{context.config_fd}",
        context.control,
        str(context.listen_fd),
        str(num_refusals),
        pass_fds=(context.config_fd, context.listen_fd),
        part="front",
    )


def with_gateway(*commands: RoleCommand, num_refusals: int = 1) -> RoleTable:
    return lambda context: [*commands, gateway(context, num_refusals=num_refusals)]


@contextmanager
def nothing_left_open() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_engine_is_announced_when_it_is_healthy_and_stops_with_status_0() -> None:
    config = engine(attention_device="cuda")
    *others, last = config.plan.nodes
    config = changed(config, {"plan.nodes": (*others, replace(last, optional=True))})
    display = RecordingDisplay(announced=interrupt)
    with nothing_left_open():
        assert launch(config, roles=with_gateway(dummy("expert 0", "wait")), display=display) == 0
    (announcement,) = display.announcements
    ready, example = announcement.splitlines()
    assert re.fullmatch(
        r"Topspin is ready at http://127\.0\.0\.1:[0-9]+ \(model it's tiny, 1 attention \+ "
        r"2 expert nodes \(1 of them optional\) on cuda:0 \+ cpu over shm\), "
        r"started in [0-9]+\.[0-9] s",
        ready,
    )
    # Before it was healthy it reported what it waited for.
    assert display.states[-1] == "waiting for expert 0"
    assert "topspin: SIGINT: stopping the engine (once more kills it)" in display.lines
    told = next(line for line in display.lines if " control " in line)
    pattern = r"gateway \| model /models/it's tiny control ipc://@topspin-[0-9a-f]{32}"
    assert re.fullmatch(pattern, told)
    # The shell turns the example's argument into valid JSON for any model name.
    shell = subprocess.run(
        ["bash", "-c", example.replace("Try: curl", "printf '%s\\n'")],
        capture_output=True,
        check=True,
    )
    body = json.loads(shell.stdout.splitlines()[-1])
    assert body["model"] == "it's tiny"


@pytest.mark.parametrize(
    ("behaviour", "status", "ending", "last_lines"),
    [
        ("crash", 1, "status 3", [f"line {n}" for n in range(5, 25)]),
        pytest.param(
            *("refuse_configuration", 2, "status 2", ["--port 1: Permission denied"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_role_that_fails_while_starting_ends_the_start(
    behaviour: str, status: int, ending: str, last_lines: list[str]
) -> None:
    display = RecordingDisplay()
    failing = dummy("expert 1", behaviour)
    roles = with_gateway(dummy("expert 0", "wait"), failing, num_refusals=10**9)
    with nothing_left_open():
        assert launch(engine(), roles=roles, display=display) == status
    assert not display.announcements
    told = display.lines.index(
        f"topspin: expert 1 exited with {ending}; stopping the engine. Its last lines:"
    )
    shown = display.lines[told + 1 : told + 1 + len(last_lines)]
    assert shown == [f"    {line}" for line in last_lines]


def test_a_role_that_dies_later_ends_the_engine(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    display = RecordingDisplay(announced=lambda text: fifo.open("wb").close())
    roles = with_gateway(dummy("expert 0", "die_on_request", str(fifo)))
    assert launch(engine(), roles=roles, display=display) == 1
    assert display.announcements
    told = display.lines.index(
        "topspin: expert 0 was killed by SIGKILL; stopping the engine. Its last lines:"
    )
    assert display.lines[told + 1] == "    (it wrote nothing)"


@pytest.mark.slow
def test_a_silent_scheduler_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "TICK_S", 0.05)
    display = RecordingDisplay()

    def roles(context: LaunchContext) -> list[RoleCommand]:
        fds = (context.dead_fd, context.config_fd)
        arguments = ("speak_and_freeze", str(context.dead_fd), str(tmp_path / "marker"))
        return [
            dummy("scheduler", *arguments, pass_fds=fds, part="coordinator"),
            gateway(context),
        ]

    with nothing_left_open():
        config = changed(engine(), {"plan.failover.restart": True})
        assert launch(config, roles=roles, display=display) == 0, display.lines
    assert sum("is taken for dead and is killed" in line for line in display.lines) == 1
    told = "topspin: scheduler was killed by SIGKILL; it is started again in 0.2 s"
    assert display.lines.count(told) == 1


@pytest.mark.parametrize(("signals", "status"), [(["15"], 0), (["2", "15"], 128 + 2)])
def test_a_signal_stops_a_start_and_a_second_one_gives_the_shells_status(
    signals: list[str], status: int
) -> None:
    display = RecordingDisplay()
    roles = [dummy("poker", "signal_parent", *signals), dummy("expert 0", "wait")]
    assert launch(engine(), roles=lambda context: roles, display=display) == status
    assert not display.announcements


def test_a_port_that_is_taken_ends_the_start_before_any_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = changed(engine(), {"gateway.port": port})
        with (
            nothing_left_open(),
            pytest.raises(ConfigError, match=rf"--port {port}: Address already in use"),
        ):
            launch(config, roles=lambda context: pytest.fail("started"))


def test_who_connects_while_no_gateway_lives_is_served_by_the_next() -> None:
    display = RecordingDisplay()
    served: list[int] = []

    def lose_a_gateway(text: str) -> None:
        """Have the supervisor find a dead gateway, and a client that has connected after it."""
        url = text.split()[4]
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            first = int(response.headers["Pid"])
        os.kill(first, signal.SIGKILL)
        assert wait_until_gone(first)

        def ask() -> None:
            with urllib.request.urlopen(f"{url}/health", timeout=20) as response:
                served.extend((first, int(response.headers["Pid"])))
            os.kill(os.getpid(), signal.SIGINT)

        client = threading.Thread(target=ask)
        clients.append(client)
        client.start()

    clients: list[threading.Thread] = []
    display = RecordingDisplay(announced=lose_a_gateway)
    config = changed(engine(), {"plan.failover.restart": True})
    with nothing_left_open():
        roles = with_gateway(dummy("scheduler", "wait"), num_refusals=0)
        assert launch(config, roles=roles, display=display) == 0, display.lines
        clients[0].join()
    first, second = served
    assert first != second
    told = "topspin: gateway was killed by SIGKILL; it is started again in 0.2 s"
    assert display.lines.count(told) == 1


DRIVER = """
import sys
from app.launch.engine import launch
from tests.app.launch.engines import engine
from tests.app.launch.roles import dummy
from tests.app.launch.test_engine import with_gateway
roles = with_gateway(dummy("scheduler", "wait"), dummy("expert 0", "wait"))
sys.exit(launch(engine(), roles=roles))
"""


@contextmanager
def running_engine() -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """Run an engine of dummy roles in its own process; yield it and its roles' pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        ready = process.stdout.readline()
        assert ready.startswith("Topspin is ready at "), process.stderr.read()
        assert process.stdout.readline().startswith("Try: curl http://127.0.0.1:")
        pids: dict[str, int] = {}
        while not {"scheduler", "expert 0"} <= pids.keys():
            # "expert 0 | pid 123", printed by each role once it can handle SIGTERM
            role, _, said = process.stderr.readline().rstrip().partition(" | pid ")
            if said:
                pids[role] = int(said)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        (pids["gateway"],) = {int(pid) for pid in children.split()} - set(pids.values())
        yield process, pids
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.slow
def test_the_launcher_ends_in_order_on_a_signal() -> None:
    with running_engine() as (process, pids):
        process.send_signal(signal.SIGTERM)
        assert wait_until_gone(process.pid)
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait() == 0, errors
        assert "scheduler | terminated" in errors
        assert "expert 0 | terminated" in errors
        assert all(wait_until_gone(pid, timeout_s=0) for pid in pids.values())


def test_roles_die_with_a_killed_launcher() -> None:
    with running_engine() as (process, pids):
        process.kill()
        assert all(wait_until_gone(pid) for pid in pids.values())


@pytest.mark.slow
def test_a_launcher_whose_output_nobody_reads_goes_on() -> None:
    with running_engine() as (process, pids):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        os.kill(pids["gateway"], signal.SIGTERM)  # there is something to write
        assert process.wait(timeout=20) == 1
        assert all(wait_until_gone(pid, timeout_s=0) for pid in pids.values())


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        *(("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")),
        *(("::", "[::1]"), ("::1", "[::1]")),
    ],
)
def test_the_address_shown_can_be_reached_from_here(host: str, shown: str) -> None:
    assert gateway_url(host, 81) == f"http://{shown}:81"
