"""The process that starts an engine's roles, watches them and stops them in order.

Owns their processes: output forwarded line by line under the role's name, the first exit or signal
noticed at once, an orderly stop that ends in SIGKILL and leaves no process. Knows neither the
roles' work nor when an engine is ready (app.launch.engine does). One thread, the main one:
Linux ties the parent-death signal to the thread that forked.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Literal, NamedTuple

from topspin.errors import EngineError
from topspin.logs import is_json
from topspin.process import PARENT_PID_VARIABLE

NUM_TAIL_LINES = 20
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
HEALTHY_S = 60.0
# A role that ends once more within this time is given up.
MAX_RESTARTS = 5
RESTARTS_WITHIN_S = 300.0

_READ_BYTES = 65536
_MAX_LINE_BYTES = 65536
_MAX_LAST_WORDS_BYTES = 2**20


Part = Literal["front", "coordinator", "worker", "optional", "helper"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleCommand:
    """How to start one role. `environment` is added to the supervisor's own.

    `part` decides when the role is asked to stop: the front (gateway) first, so that it can finish
    its requests while the others run; then the coordinator (scheduler), which tells the workers
    (nodes) to stop; a worker only if it was not told. Optional ones are workers that the others do
    without from the beginning, and helpers those that they can lose later.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    part: Part = "worker"


@dataclass(slots=True)
class _Restart:
    """The time of a role's next start (`due`), the delay after its next early end, and its ends."""

    command: RoleCommand
    due: float
    delay_s: float
    ends: list[float]


class RoleExit(NamedTuple):
    """A role that has ended: its wait status as subprocess gives it, and its last lines."""

    name: str
    returncode: int
    last_lines: tuple[str, ...]

    def describe(self) -> str:
        """Return `expert 1 was killed by SIGKILL` or `gateway exited with status 3`."""
        if self.returncode >= 0:
            return f"{self.name} exited with status {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"{self.name} was killed by {name}"


class _Child:
    """A started role. Invariant: while `is_running` its process is not reaped, so that no other
    process can have its pid or process group."""

    def __init__(self, command: RoleCommand) -> None:
        environment = {
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            **os.environ,
            **command.environment,
            PARENT_PID_VARIABLE: str(os.getpid()),
        }
        self.command = command
        try:
            # A separate process group: Ctrl-C in the terminal reaches the supervisor only.
            self.process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=command.pass_fds,
                process_group=0,
            )
        except OSError as error:
            raise EngineError(f"cannot start {command.name}: {error}") from error
        assert self.process.stdout is not None
        self.output_fd = self.process.stdout.fileno()
        os.set_blocking(self.output_fd, False)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.started = time.monotonic()
        self.is_running = True
        self.has_output = True
        self.last_lines: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._partial = bytearray()

    def read_lines(self) -> list[str]:
        """Return the lines that one read completes; at the end of output also the rest."""
        try:
            data = os.read(self.output_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        self._partial += data
        *complete, rest = bytes(self._partial).split(b"\n")
        if rest and (not data or len(rest) > _MAX_LINE_BYTES):
            complete.append(rest)
            rest = b""
        self._partial = bytearray(rest)
        self.has_output = bool(data)
        lines = [line.decode(errors="replace").rstrip("\r") for line in complete]
        self.last_lines.extend(lines)
        return lines

    def last_words(self) -> list[str]:
        """Return the last output of an ended process, without waiting for more.

        Bounded, since a process that left the group might go on writing.
        """
        lines: list[str] = []
        for _ in range(_MAX_LAST_WORDS_BYTES // _READ_BYTES):
            before = len(self._partial)
            lines += (new := self.read_lines())
            if not self.has_output or (not new and len(self._partial) == before):
                break
        if self._partial:
            lines.append(self._partial.decode(errors="replace"))
            self.last_lines.append(lines[-1])
            self._partial.clear()
        return lines

    def terminate(self) -> None:
        """Ask the role to stop."""
        # Not Popen.terminate, which reaps a process that has ended.
        if self.is_running:
            os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the role and all processes of its process group."""
        if self.is_running:
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> RoleExit:
        """Collect an ended process, after killing the rest of its process group."""
        self.kill()
        self.is_running = False
        returncode = self.process.wait()
        os.close(self.pidfd)
        return RoleExit(self.command.name, returncode, ())

    def close(self) -> None:
        """Close this end of the output pipe."""
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class StopGraces:
    """Time limits of a stop: for the front alone, then for all after the coordinator was asked,
    then for all after every role was asked, then for the system to clean up killed ones."""

    front_s: float = 2.0
    coordinated_s: float = 2.0
    stop_s: float = 5.0
    kill_s: float = 5.0


class Supervisor:
    """Runs roles until the caller stops them; a context manager that leaves no process.

    Invariant: outside `start` every started process is watched or reaped. While entered it
    owns SIGINT, SIGTERM and SIGHUP: the first one is reported by `signal_number`, a second
    one kills all roles at once. `emit` gets each output line, prefixed by the role's name.
    """

    def __init__(self, *, emit: Callable[[str], object], graces: StopGraces | None = None) -> None:
        self._emit = emit
        self._graces = StopGraces() if graces is None else graces
        self._children: list[_Child] = []
        self._exits: list[RoleExit] = []
        self._signals: list[int] = []
        self._restarts: dict[str, _Restart] = {}
        self._restarting: set[Part] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._old_handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._old_wakeup_fd: int | None = None

    def __enter__(self) -> Supervisor:
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._old_wakeup_fd = signal.set_wakeup_fd(
            self._wake_writer.fileno(), warn_on_full_buffer=False
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            old = signal.getsignal(number)
            if number == signal.SIGHUP and old == signal.SIG_IGN:
                continue  # started under nohup
            self._old_handlers[number] = old
            signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            if self._old_wakeup_fd is not None:
                signal.set_wakeup_fd(self._old_wakeup_fd)
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    @property
    def exits(self) -> Sequence[RoleExit]:
        """Return the roles that have ended, in the order of detection."""
        return self._exits

    @property
    def signal_number(self) -> int | None:
        """Return the first signal that asked the supervisor to stop, if one has come."""
        return self._signals[0] if self._signals else None

    @property
    def was_forced(self) -> bool:
        """Return whether a second signal has killed the roles."""
        return len(self._signals) > 1

    @property
    def is_ending(self) -> bool:
        """Return whether a role has ended or a signal has come."""
        return bool(self._exits or self._signals)

    def restart(self, part: Part) -> None:
        """From now on restart a role of this part that ends, instead of reporting its exit.

        At once after a long life; each early end doubles the delay. One that ends too often
        (MAX_RESTARTS) is given up: its exit is reported, but for an optional one or a helper, which
        the others do without. An optional one that ends with status 0, or by SIGTERM, was asked to
        leave and is not restarted.
        """
        self._restarting.add(part)

    def kill(self, pid: int | None) -> None:
        """Kill the running node with process id `pid` (None: the coordinator), if there is one."""
        nodes: tuple[Part, ...] = ("worker", "optional", "helper")
        for child in self._running(self._of(*(nodes if pid is not None else ("coordinator",)))):
            if pid in (None, child.process.pid):
                who = f"{child.command.name} (pid {child.process.pid})"
                self._emit(f"{who} is taken for dead and is killed")
                child.kill()

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` in step() whenever `fd` can be read, until forget()."""
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`."""
        self._selector.unregister(fd)

    def start(self, command: RoleCommand) -> None:
        """Start one role; raises EngineError if the system cannot."""
        child = _Child(command)
        self._children.append(child)
        self._selector.register(child.output_fd, selectors.EVENT_READ, child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def step(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` (None: for ever) for output, exits and signals; handle them."""
        ended: list[_Child] = []
        for key, _ in self._selector.select(self._until_restart(timeout_s)):
            if key.fileobj is self._wake_reader:
                self._drain_wakeups()
                continue
            if not isinstance(key.data, _Child):
                key.data()
                continue
            child: _Child = key.data
            if key.fd == child.pidfd:
                ended.append(child)
            elif child.has_output:
                self._forward(child, child.read_lines())
                if not child.has_output:
                    self._selector.unregister(child.output_fd)
        # If several exits are found at once, one killed by a signal is the likelier cause.
        exits = {child: self._collect(child) for child in ended}
        for child, gone in sorted(exits.items(), key=lambda item: item[1].returncode >= 0):
            if child.command.part in self._restarting and not self.was_forced:
                self._plan_restart(child, gone)
            else:
                self._exits.append(gone)
        self._restart_due()

    def _until_restart(self, timeout_s: float | None) -> float | None:
        """Return the time to wait: `timeout_s`, or less if a role's start is due earlier."""
        now = time.monotonic()
        waits = [restart.due - now for restart in self._restarts.values() if restart.due]
        if timeout_s is not None:
            waits.append(timeout_s)
        return max(0.0, min(waits)) if waits else None

    def _plan_restart(self, child: _Child, gone: RoleExit) -> None:
        self._children.remove(child)
        now = time.monotonic()
        if child.command.part == "optional" and gone.returncode in (0, -signal.SIGTERM):
            self._emit(f"topspin: {gone.name} has left")
            return
        before = self._restarts.get(gone.name)
        ends = [end for end in before.ends if now - end < RESTARTS_WITHIN_S] if before else []
        if len(ends) >= MAX_RESTARTS:
            self._emit(
                f"topspin: {gone.describe()}, after {len(ends)} restarts in {now - ends[0]:.0f} s; "
                "it is not started again"
            )
            if child.command.part not in ("optional", "helper"):
                self._exits.append(gone)
            return
        healthy = before is None or now - child.started > HEALTHY_S
        delay_s = FIRST_DELAY_S if before is None or healthy else before.delay_s
        self._restarts[gone.name] = _Restart(
            child.command, now + delay_s, min(2 * delay_s, MAX_DELAY_S), [*ends, now]
        )
        self._emit(f"topspin: {gone.describe()}; it is started again in {delay_s:g} s")

    def _restart_due(self) -> None:
        now = time.monotonic()
        for restart in self._restarts.values():
            if restart.due and restart.due <= now and not self.was_forced:
                restart.due = 0.0
                self.start(restart.command)

    def stop(self) -> None:
        """End all roles: SIGTERM in order, SIGKILL for those that stay. Idempotent."""
        front = self._of("front")
        self._restarting.discard("front")
        self._terminate(front)
        # Its requests may outlive others' ends as before.
        self._step_until_ended(front, self._graces.front_s)
        self._restarting.clear()
        self._restarts.clear()
        # A front that is still busy gets as long as the others: it may be answering clients.
        if self._terminate(self._of("coordinator")):
            self._step_until_ended(self._children, self._graces.coordinated_s)
        self._terminate(self._of("worker", "optional", "helper"))
        self._step_until_ended(self._children, self._graces.stop_s)
        for child in self._running(self._children):
            self._emit(f"{child.command.name} did not stop in time and is killed")
            child.kill()
        self._step_until_ended(self._children, self._graces.kill_s)
        for child in self._running(self._children):
            self._emit(f"{child.command.name} (pid {child.process.pid}) survived SIGKILL")

    @staticmethod
    def _running(children: Sequence[_Child]) -> list[_Child]:
        return [child for child in children if child.is_running]

    def _of(self, *parts: Part) -> list[_Child]:
        return [child for child in self._children if child.command.part in parts]

    def _terminate(self, children: Sequence[_Child]) -> bool:
        """Ask the running ones to stop; return whether there was one."""
        running = self._running(children)
        for child in running:
            child.terminate()
        return bool(running)

    def _step_until_ended(self, children: Sequence[_Child], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._running(children) and (left := deadline - time.monotonic()) > 0:
            self.step(left)

    def _forward(self, child: _Child, lines: Sequence[str]) -> None:
        for line in lines:
            # JSON names the role itself.
            self._emit(line if is_json(line) else f"{child.command.name} | {line}")

    def _collect(self, child: _Child) -> RoleExit:
        """Reap an ended child and forward its last words."""
        self._selector.unregister(child.pidfd)
        gone = child.reap()
        if child.has_output:
            self._selector.unregister(child.output_fd)
            self._forward(child, child.last_words())
        child.close()
        return gone._replace(last_lines=tuple(child.last_lines))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self.was_forced:
            for child in tuple(self._children):
                child.kill()

    def _drain_wakeups(self) -> None:
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            return
