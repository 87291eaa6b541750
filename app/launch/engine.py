"""The composition root: starts an engine's roles as processes and serves until the end.

Owns the table of role commands (nodes' are app.launch.commands'), the state that each role
inherits (the engine plan in a memfd, the control address, the gateway's socket) and the condition
for ready (the gateway answers 200 on /health). app.launch.supervisor keeps their processes. Called
by `topspin serve`.
"""

from __future__ import annotations

import http.client
import os
import secrets
import shlex
import signal
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import FileIO
from typing import Any

import msgspec

from app.launch.child_process import RoleCommand
from app.launch.commands import (
    import_path,
    inherited_config,
    module_argv,
    node_commands,
    spare_commands,
)
from app.launch.display import CompiledKernels, Display, open_display
from app.launch.supervisor import StopGraces, Supervisor
from topspin.plan.settings import GatewaySection
from topspin.plan.spec import EnginePlan, ServeConfig
from topspin.process import CONFIG_ERROR_STATUS
from topspin.processes.listening import ALL_ADDRESSES, bind, has_ipv6, in_url

HEALTH_INTERVAL_S = 0.1
HEALTH_TIMEOUT_S = 1.0
# A scheduler writes its sign of life every second (nodes wait for another one after 2 s already).
TICK_S = 1.0
MAX_SILENT_TICKS = 5
# How long the gateway may take to stop beyond the time that its requests get.
STOP_MARGIN_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchContext:
    """The state shared by one engine's roles: settings, control plane and inherited files.

    `config_fd` holds `config` as JSON; the gateway listens at `listen_fd`; the scheduler writes to
    `dead_fd` the process ids of nodes that it considers dead, and 0 as a sign of its own life.
    """

    config: ServeConfig
    control: str
    config_fd: int
    listen_fd: int
    dead_fd: int


RoleTable = Callable[[LaunchContext], Sequence[RoleCommand]]


def role_commands(context: LaunchContext) -> list[RoleCommand]:
    """Return the commands of a real engine, in starting order."""
    config_path = ("--config", f"/dev/fd/{context.config_fd}")
    scheduler = RoleCommand(
        name="scheduler",
        argv=module_argv(
            "server.scheduler",
            *config_path,
            "--control",
            context.control,
            "--dead-fd",
            str(context.dead_fd),
        ),
        environment=import_path(os.environ),
        pass_fds=(context.config_fd, context.dead_fd),
        part="coordinator",
    )
    gateway = RoleCommand(
        name="gateway",
        argv=module_argv(
            "server.gateway",
            *config_path,
            "--control",
            context.control,
            "--listen-fd",
            str(context.listen_fd),
        ),
        environment=import_path(os.environ),
        pass_fds=(context.config_fd, context.listen_fd),
        part="front",
    )
    return [scheduler, *node_commands(context.config.plan, context.control), gateway]


def with_draft_addresses(plan: EnginePlan, control: str) -> EnginePlan:
    """Return `plan` with the addresses of its draft nodes, beside the scheduler's."""
    nodes = [
        msgspec.structs.replace(node, address=f"{control}-draft-{node.index}")
        if node.role == "draft"
        else node
        for node in plan.nodes
    ]
    return msgspec.structs.replace(plan, nodes=tuple(nodes))


def launch(
    config: ServeConfig,
    *,
    roles: RoleTable = role_commands,
    display: Display | None = None,
) -> int:
    """Run the engine of `config`, until a signal or a failure.

    With `failover.restart` each process is started again that ends once the engine has served;
    connections to the gateway's port wait meanwhile.
    Must run in the main thread. Returns the exit status: 0 after an orderly stop, 1 after
    a role has ended by itself, 2 if one did because its configuration cannot be served,
    128 + signal after a second signal cut the stop short.
    Raises EngineError if the system cannot start a process, ConfigError if the port cannot be used.
    No process is left behind.
    """
    started = time.monotonic()
    control = f"ipc://@topspin-{secrets.token_hex(16)}"
    config = msgspec.structs.replace(config, plan=with_draft_addresses(config.plan, control))
    display = open_display() if display is None else display
    restarts = config.plan.failover.restart
    with ExitStack() as stack:
        listener = stack.enter_context(bind(config.gateway))
        dead_reader_fd, dead_writer_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        dead_reader = stack.enter_context(os.fdopen(dead_reader_fd, "rb", buffering=0))
        stack.callback(os.close, dead_writer_fd)  # a scheduler that is restarted inherits it
        stack.callback(display.finish)
        kernels = CompiledKernels(display.line)
        graces = StopGraces(front_s=STOP_MARGIN_S + config.gateway.shutdown_timeout_s)
        if restarts:
            graces = replace(graces, coordinated_s=0.0)  # nodes do not end with their scheduler
        supervisor = stack.enter_context(Supervisor(emit=kernels.line, graces=graces))
        config_fd = inherited_config(config)
        stack.callback(os.close, config_fd)  # and this, too
        context = LaunchContext(
            config=config,
            control=control,
            config_fd=config_fd,
            listen_fd=listener.fileno(),
            dead_fd=dead_writer_fd,
        )
        supervisor.restart("optional")
        for command in roles(context):
            supervisor.start(command)
        start = EngineStart(config=config, port=listener.getsockname()[1], started=started)
        if start.follow(supervisor, display, kernels):
            kernels.finish()
            display.announce(start.announcement())
            supervisor.restart("helper")
            for command in spare_commands(config.plan, control):
                supervisor.start(command)
            if restarts:
                for part in ("worker", "coordinator", "front"):
                    supervisor.restart(part)
            dead = _Dead(supervisor, dead_reader)
            dead.watch(restarts=restarts)
        listener.close()  # no other gateway will come for those who connect now
        return _finish(supervisor, display)


class _Dead:
    """Kills the nodes that the scheduler considers dead, and a scheduler that is silent.

    They must not linger: stopped processes hold memory and addresses.
    """

    def __init__(self, supervisor: Supervisor, reader: FileIO) -> None:
        """`reader` is the non-blocking end of the pipe to which the scheduler writes."""
        self._supervisor = supervisor
        self._reader = reader
        # Ticks of this process since the scheduler's last word; None: it has not begun to speak.
        # The clock would count a pause of the whole machine.
        self._num_silent: int | None = None

    def watch(self, *, restarts: bool) -> None:
        """Run the engine until it is ending; `restarts`: also without its scheduler."""
        supervisor = self._supervisor
        supervisor.watch(self._reader.fileno(), self._on_readable)
        ticked_s = time.monotonic()
        while not supervisor.is_ending:
            supervisor.step(TICK_S if restarts else None)
            if time.monotonic() >= ticked_s + TICK_S and self._num_silent is not None:
                ticked_s = time.monotonic()
                self._num_silent += 1
                if restarts and self._num_silent > MAX_SILENT_TICKS:
                    self._num_silent = None
                    supervisor.kill(None)

    def _on_readable(self) -> None:
        for line in (self._reader.read() or b"").split():
            self._num_silent = 0
            # A line is far below PIPE_BUF, so it comes whole.
            self._supervisor.kill(int(line))


def _finish(supervisor: Supervisor, display: Display) -> int:
    """Show why the engine ends, stop the remaining roles, return the exit status."""
    display.finish()
    failed = () if supervisor.signal_number is not None else tuple(supervisor.exits)
    for gone in failed:
        display.line(f"topspin: {gone.describe()}; stopping the engine. Its last lines:")
        for line in gone.last_lines or ("(it wrote nothing)",):
            display.line(f"    {line}")
    if supervisor.signal_number is not None:
        name = signal.Signals(supervisor.signal_number).name
        display.line(f"topspin: {name}: stopping the engine (once more kills it)")
    supervisor.stop()
    if supervisor.was_forced:
        return 128 + (supervisor.signal_number or 0)
    if failed and any(gone.returncode == CONFIG_ERROR_STATUS for gone in supervisor.exits):
        return CONFIG_ERROR_STATUS  # the role that found it may not have been the first to end
    return 1 if failed else 0


class EngineStart:
    """Finds out when the engine is ready, by its gateway's /health.

    `port` is where the gateway will listen. `started`: when the start began, by time.monotonic().
    """

    def __init__(self, *, config: ServeConfig, port: int, started: float) -> None:
        self._config = config
        self._port = port
        self._started = started

    def follow(self, supervisor: Supervisor, display: Display, kernels: CompiledKernels) -> bool:
        """Return True once the engine serves, False if a role or the user ended it."""
        while not supervisor.is_ending:
            state = self._look()
            if state is None:
                return True
            display.progress(kernels.state(state), self._elapsed_s())
            next_look = time.monotonic() + HEALTH_INTERVAL_S
            while not supervisor.is_ending and (left := next_look - time.monotonic()) > 0:
                supervisor.step(left)
        return False

    def announcement(self) -> str:
        """Return the text that tells a person how to reach the engine."""
        plan, model = self._config.plan, self._config.gateway.served_names[0]
        gateway = self._config.gateway
        scheme = "http" if gateway.ssl_certfile is None else "https"
        url = gateway_url(gateway.host, self._port, scheme=scheme)
        example = msgspec.json.encode(
            {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
        ).decode()
        nodes = f"{len(plan.attention)} attention + {len(plan.experts)} expert nodes"
        if plan.stages:
            nodes = nodes.replace(" +", f" + {len(plan.stages)} stage +")
        if plan.drafts:
            nodes = nodes.replace(" +", f" + {len(plan.drafts)} draft +")
        if num_optional := sum(node.optional for node in plan.nodes):
            nodes += f" ({num_optional} of them optional)"
        if plan.link.transport == "local":
            nodes += " in one process"
        devices = dict.fromkeys(node.device for node in plan.nodes)
        if any(node.place.is_gpu for node in plan.nodes):
            nodes += f" on {' + '.join(devices)}"
        return (
            f"Topspin is ready at {url} (model {model}, {nodes} over "
            f"{plan.link.transport}), started in {self._elapsed_s():.1f} s\n"
            f"Try: curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(example)}"
        )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _look(self) -> str | None:
        """Return the state that the engine still waits for, or None if it serves."""
        host = _reachable_host(self._config.gateway.host)
        connection = _connection(self._config.gateway, host, self._port)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return None if response.status == 200 else _describe_health(response.read())
        except (OSError, http.client.HTTPException):
            return "starting: the gateway does not answer yet"
        finally:
            connection.close()


def _describe_health(body: bytes) -> str:
    """Return the state in the /health body of a gateway that is not ready."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "starting"
    return str(fields.get("detail") or fields.get("state") or "starting")


def _reachable_host(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    if host == ALL_ADDRESSES and has_ipv6():
        return "::1"
    return "127.0.0.1" if host in ("", "0.0.0.0", ALL_ADDRESSES) else host


def _connection(gateway: GatewaySection, host: str, port: int) -> http.client.HTTPConnection:
    """Return a connection for /health, which needs no key; a certificate may be any."""
    if gateway.ssl_certfile is None:
        return http.client.HTTPConnection(host, port, timeout=HEALTH_TIMEOUT_S)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=HEALTH_TIMEOUT_S, context=context)


def gateway_url(host: str, port: int, *, scheme: str = "http") -> str:
    """Return the URL at which this machine reaches a gateway that listens on `host`."""
    return f"{scheme}://{in_url(_reachable_host(host))}:{port}"
