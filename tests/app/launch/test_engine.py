"""Launching an engine of dummy roles: readiness, failures, signals, no process left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.launch import engine as launcher
from app.launch.commands import node_command
from app.launch.engine import (
    LaunchContext,
    RoleTable,
    gateway_url,
    launch,
    role_commands,
)
from app.launch.supervisor import RoleCommand
from tests.app.launch.roles import ROOT, dummy, wait_until_gone
from tests.structs import changed
from tests.topspin.plans import plan
from topspin.cores import CORES_VARIABLE, Layout
from topspin.errors import EngineError
from topspin.plan.settings import (
    GatewaySection,
    Transport,
)
from topspin.plan.spec import ServeConfig


class RecordingDisplay:
    """Keeps the shown lines; `states` are the progress texts without repetitions."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.states: list[str] = []
        self.announcements: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, state: str, elapsed_s: float) -> None:
        if self.states[-1:] != [state]:
            self.states.append(state)

    def finish(self) -> None:
        pass

    def announce(self, text: str) -> None:
        self.announcements.append(text)


class StoppingDisplay(RecordingDisplay):
    """Asks the engine to stop (as Ctrl-C does) as soon as it is announced."""

    def __init__(self) -> None:
        super().__init__()
        self.health_status = 0

    def announce(self, text: str) -> None:
        super().announce(text)
        url = text.split()[4]
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            self.health_status = response.status
        os.kill(os.getpid(), signal.SIGINT)


def engine(
    *,
    transport: Transport = "shm",
    attention: int = 1,
    experts: int = 2,
    threads: int | None = None,
    devices: tuple[str, str] = ("cpu", "cpu"),
    layout: Layout = "shared",
) -> ServeConfig:
    made = plan(
        path="/models/it's tiny",
        attention_nodes=attention,
        expert_nodes=experts,
        transport=transport,
        restart=False,
        num_threads=threads,
        attention_device=devices[0],
        expert_device=devices[1],
        layout=layout,
    )
    return ServeConfig(plan=made, gateway=GatewaySection(port=0, served_names=("it's tiny",)))


def gateway(context: LaunchContext, *, num_refusals: int = 1) -> RoleCommand:
    return dummy(
        "gateway",
        "gateway",
        f"/dev/fd/{context.config_fd}",
        context.control,
        str(context.port_fd),
        str(num_refusals),
        pass_fds=(context.config_fd, context.port_fd),
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


def test_the_announcement_names_the_devices_of_nodes_on_gpus_and_how_many_may_be_missing() -> None:
    display = StoppingDisplay()
    config = engine(devices=("cuda", "cpu"))
    *others, last = config.plan.nodes
    config = changed(config, {"plan.nodes": (*others, replace(last, optional=True))})
    assert launch(config, roles=with_gateway(dummy("expert 0", "wait")), display=display) == 0
    assert (
        "2 expert nodes (1 of them optional) on cuda:0 + cpu over shm)"
        in (display.announcements[0])
    )


def test_an_engine_is_announced_when_it_is_healthy_and_stops_with_status_0() -> None:
    display = StoppingDisplay()
    with nothing_left_open():
        assert launch(engine(), roles=with_gateway(dummy("expert 0", "wait")), display=display) == 0
    assert display.health_status == 200
    (announcement,) = display.announcements
    ready, example = announcement.splitlines()
    assert re.fullmatch(
        r"Topspin is ready at http://127\.0\.0\.1:[0-9]+ \(model it's tiny, 1 attention \+ "
        r"2 expert nodes over shm\), started in [0-9]+\.[0-9] s",
        ready,
    )
    # Before it was healthy it reported what it waited for.
    assert display.states[-1] == "waiting for expert 0"
    assert "topspin: SIGINT: stopping the engine (once more kills it)" in display.lines
    # The shell turns the example's argument into valid JSON for any model name.
    shell = subprocess.run(
        ["bash", "-c", example.replace("Try: curl", "printf '%s\\n'")],
        capture_output=True,
        check=True,
    )
    body = json.loads(shell.stdout.splitlines()[-1])
    assert body["model"] == "it's tiny"


def test_roles_receive_the_configuration_and_an_abstract_control_address() -> None:
    display = StoppingDisplay()
    launch(engine(), roles=with_gateway(), display=display)
    line = next(line for line in display.lines if " control " in line)
    assert re.fullmatch(
        r"gateway \| model /models/it's tiny control ipc://@topspin-[0-9a-f]{32}", line
    )


def test_a_role_that_fails_while_starting_ends_the_start() -> None:
    display = RecordingDisplay()
    with nothing_left_open():
        status = launch(
            engine(),
            roles=with_gateway(
                dummy("expert 0", "wait"), dummy("expert 1", "crash"), num_refusals=10**9
            ),
            display=display,
        )
    assert status == 1
    assert not display.announcements
    told = display.lines.index(
        "topspin: expert 1 exited with status 3; stopping the engine. Its last lines:"
    )
    assert display.lines[told + 1 : told + 21] == [f"    line {n}" for n in range(5, 25)]


def test_a_role_that_cannot_do_what_it_was_told_makes_it_a_configuration_error() -> None:
    with nothing_left_open():
        status = launch(
            engine(),
            roles=with_gateway(dummy("expert 0", "refuse_configuration"), num_refusals=10**9),
            display=RecordingDisplay(),
        )
    assert status == 2


def test_a_role_that_dies_later_ends_the_engine(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    class KillingDisplay(RecordingDisplay):
        def announce(self, text: str) -> None:
            super().announce(text)
            fifo.open("wb").close()

    display = KillingDisplay()
    roles = with_gateway(dummy("expert 0", "die_on_request", str(fifo)))
    assert launch(engine(), roles=roles, display=display) == 1
    assert display.announcements
    told = display.lines.index(
        "topspin: expert 0 was killed by SIGKILL; stopping the engine. Its last lines:"
    )
    assert display.lines[told + 1] == "    (it wrote nothing)"


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


def test_a_signal_during_the_start_stops_it() -> None:
    display = RecordingDisplay()
    roles = [dummy("poker", "signal_parent", "15"), dummy("expert 0", "wait")]
    assert launch(engine(), roles=lambda context: roles, display=display) == 0
    assert not display.announcements


def test_a_second_signal_gives_the_shells_status() -> None:
    roles = [dummy("poker", "signal_parent", "2", "15")]
    assert launch(engine(), roles=lambda context: roles, display=RecordingDisplay()) == 128 + 2


def test_a_gateway_that_reports_rubbish_is_an_error_and_all_are_stopped() -> None:
    display = RecordingDisplay()

    def roles(context: LaunchContext) -> list[RoleCommand]:
        port_fd = context.port_fd
        return [dummy("gateway", "rubbish_port", str(port_fd), pass_fds=(port_fd,))]

    with nothing_left_open(), pytest.raises(EngineError, match="'eighty"):
        launch(engine(), roles=roles, display=display)


DRIVER = """
import sys
from tests.app.launch.test_engine import engine, with_gateway
from tests.structs import changed
from tests.app.launch.roles import dummy
from app.launch.engine import launch
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_ends_in_order_on_a_signal(number: signal.Signals) -> None:
    with running_engine() as (process, pids):
        process.send_signal(number)
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


def test_a_launcher_whose_output_nobody_reads_goes_on() -> None:
    with running_engine() as (process, pids):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        os.kill(pids["gateway"], signal.SIGTERM)  # there is something to write
        assert process.wait(timeout=20) == 1
        assert all(wait_until_gone(pid, timeout_s=0) for pid in pids.values())


def names_and_arguments(config: ServeConfig) -> dict[str, tuple[str, ...]]:
    context = LaunchContext(config=config, control="ipc://@c", config_fd=7, port_fd=8, dead_fd=9)
    commands = role_commands(context)
    assert all(command.argv[:3] == (sys.executable, "-P", "-m") for command in commands)
    assert {command.name: command.part for command in commands if command.part != "worker"} == {
        "scheduler": "coordinator",
        "gateway": "front",
    }
    return {command.name: command.argv[3:] for command in commands}


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
def test_the_commands_of_separate_nodes(transport: Transport) -> None:
    node = ("--control", "ipc://@c", "--model", "/models/it's tiny")
    assert names_and_arguments(engine(transport=transport, attention=2, experts=1)) == {
        "scheduler": (
            *("server.scheduler", "--config", "/dev/fd/7", "--control", "ipc://@c"),
            *("--dead-fd", "9"),
        ),
        "expert 0": ("expert_nodes", *node, "--index", "0", "--transport", transport),
        "attention 0": ("attention_nodes", *node, "--index", "0"),
        "attention 1": ("attention_nodes", *node, "--index", "1"),
        "gateway": (
            *("server.gateway", "--config", "/dev/fd/7", "--control", "ipc://@c"),
            *("--port-fd", "8"),
        ),
    }


def test_the_launcher_knows_which_nodes_are_optional() -> None:
    plan = engine(transport="shm", attention=2, experts=1).plan
    nodes = [replace(node, optional=node.index == 1) for node in plan.attention]
    parts = [node_command(plan, node, "ipc://@c").part for node in nodes]
    assert parts == ["worker", "optional"]


def test_nodes_that_are_restarted_notice_a_silent_scheduler_soon() -> None:
    for transport, told in (("shm", {"attention 0", "expert 0"}), ("local", {"local node"})):
        config = engine(transport=transport, attention=1, experts=1)  # type: ignore[arg-type]
        plain = names_and_arguments(config)
        restarting = names_and_arguments(changed(config, {"plan.failover.restart": True}))
        nodes = {name for name, arguments in restarting.items() if "--failover" in arguments}
        assert nodes == told
        assert not any("--failover" in arguments for arguments in plain.values())


def test_the_commands_of_nodes_in_one_process() -> None:
    commands = names_and_arguments(engine(transport="local", attention=2, experts=3))
    assert set(commands) == {"scheduler", "local node", "gateway"}
    assert commands["local node"] == (
        *("app.launch.local_node", "--control", "ipc://@c", "--model", "/models/it's tiny"),
        *("--attention-nodes", "2", "--expert-nodes", "3"),
    )


def test_only_the_roles_that_read_the_configuration_inherit_it() -> None:
    context = LaunchContext(config=engine(), control="c", config_fd=7, port_fd=8, dead_fd=9)
    inherited = {command.name: command.pass_fds for command in role_commands(context)}
    assert inherited == {
        "scheduler": (7, 9),
        "gateway": (7, 8),
        "attention 0": (),
        "expert 0": (),
        "expert 1": (),
    }


def test_a_folder_called_kernels_where_topspin_is_started_is_not_taken(tmp_path: Path) -> None:
    for name in ("kernels", "models", "server"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    context = LaunchContext(config=engine(), control="c", config_fd=7, port_fd=8, dead_fd=9)
    command = role_commands(context)[0]
    ask = "import kernels, models, server; print(kernels.__file__)"
    answer = subprocess.run(
        [*command.argv[:2], "-c", ask],
        env={**os.environ, **command.environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == str(ROOT / "kernels" / "__init__.py")


def test_only_nodes_get_openmp_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    context = LaunchContext(
        config=engine(threads=3), control="c", config_fd=7, port_fd=8, dead_fd=9
    )
    threads = {c.name: c.environment.get("OMP_NUM_THREADS") for c in role_commands(context)}
    assert threads == {
        "scheduler": None,
        "gateway": None,
        "attention 0": "3",
        "expert 0": "3",
        "expert 1": "3",
    }


def test_every_node_gets_its_own_threads_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = engine(attention=2, experts=1).plan
    own: list[tuple[tuple[int, ...], int | None]] = [((0,), None), ((1, 2, 3), 2), ((4, 5), None)]
    nodes = tuple(
        replace(node, cores=cores, num_threads=threads)
        for node, (cores, threads) in zip(made.nodes, own, strict=True)
    )
    config = ServeConfig(plan=replace(made, nodes=nodes))
    context = LaunchContext(config=config, control="c", config_fd=7, port_fd=8, dead_fd=9)
    given = {
        c.name: (c.environment[CORES_VARIABLE], c.environment["OMP_NUM_THREADS"])
        for c in role_commands(context)
        if c.part == "worker"
    }
    assert given == {
        "attention 0": ("0", "1"),
        "attention 1": ("1,2,3", "2"),
        "expert 0": ("4,5", "2"),
    }


def test_only_nodes_get_heaps_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    context = LaunchContext(config=engine(), control="c", config_fd=7, port_fd=8, dead_fd=9)
    for command in role_commands(context):
        tunables = command.environment.get("GLIBC_TUNABLES", "")
        is_node = command.name not in ("scheduler", "gateway")
        assert ("glibc.malloc.hugetlb=1" in tunables.split(":")) == is_node


def test_a_split_pins_nodes() -> None:
    config = engine(layout="split")
    context = LaunchContext(config=config, control="c", config_fd=7, port_fd=8, dead_fd=9)
    cores = {c.name: c.environment.get(CORES_VARIABLE) for c in role_commands(context)}
    assert cores == {
        "scheduler": None,
        "expert 0": "1",
        "expert 1": "2,3",
        "attention 0": "0",
        "gateway": None,
    }


@pytest.mark.parametrize(
    ("devices", "transport", "on_cpu"),
    [
        (("cuda", "cpu"), "shm", {"expert 0", "expert 1"}),
        (("cpu", "cuda"), "tcp", {"attention 0"}),
        (("cuda", "cuda"), "cuda_ipc", set()),
        (("cuda", "cuda"), "local", set()),
        (("cuda", "cpu"), "local", {"local node"}),
        (("cpu", "cuda"), "local", {"local node"}),
    ],
)
def test_nodes_on_a_gpu_leave_cores_and_huge_pages_to_those_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    devices: tuple[str, str],
    transport: Transport,
    on_cpu: set[str],
) -> None:
    for name in ("GLIBC_TUNABLES", "OMP_NUM_THREADS", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)
    config = engine(transport=transport, devices=devices)
    context = LaunchContext(config=config, control="c", config_fd=7, port_fd=8, dead_fd=9)
    roles = [role for role in role_commands(context) if role.name not in ("scheduler", "gateway")]
    assert {role.name for role in roles if "GLIBC_TUNABLES" in role.environment} == on_cpu
    bound = {role.name for role in roles if "OMP_PROC_BIND" in role.environment}
    assert bound == on_cpu - {"local node"}


def test_the_address_shown_can_be_reached_from_here() -> None:
    cases: list[tuple[str, str]] = [
        ("127.0.0.1", "http://127.0.0.1:81"),
        ("0.0.0.0", "http://127.0.0.1:81"),
        ("::", "http://[::1]:81"),
        ("::1", "http://[::1]:81"),
        ("localhost", "http://localhost:81"),
    ]
    for host, url in cases:
        assert gateway_url(host, 81) == url
