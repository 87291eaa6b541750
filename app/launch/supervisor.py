"""The process that starts an engine's roles, watches them and stops them in order.

Owns their processes: output forwarded line by line under the role's name, the first exit or signal
noticed at once, an orderly stop that ends in SIGKILL and leaves no process. Knows neither the
roles' work nor when an engine is ready (app.launch.engine does). One thread, the main one:
Linux ties the parent-death signal to the thread that forked.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

from app.launch.child_process import ChildProcess, Part, RoleCommand, RoleExit, environment_of
from app.launch.standby import Standby, Standbys
from topspin.logs import is_json

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
HEALTHY_S = 60.0
# A role that ends once more within this time is given up.
MAX_RESTARTS = 5
RESTARTS_WITHIN_S = 300.0


@dataclass(slots=True)
class _Restart:
    """The time of a role's next start (`due`), the delay after its next early end, and its ends."""

    command: RoleCommand
    due: float
    delay_s: float
    ends: list[float]


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
        self._children: list[ChildProcess] = []
        self._standbys = Standbys()
        # Roles whose standby process has not imported everything yet; these processes are watched.
        self._waiting: list[tuple[RoleCommand, Standby]] = []
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
            if pid in (None, child.pid):
                who = f"{child.command.name} (pid {child.pid})"
                self._emit(f"{who} is taken for dead and is killed")
                child.kill()

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` in step() whenever `fd` can be read, until forget()."""
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`."""
        self._selector.unregister(fd)

    def start(self, command: RoleCommand) -> None:
        """Start one role, once its standby process is ready; raises EngineError if it cannot."""
        standby = self._standby_of(command)
        if standby is not None and standby.is_importing:
            self._waiting.append((command, standby))
            return
        child = ChildProcess(command, standby)
        self._children.append(child)
        self._selector.register(child.output_fd, selectors.EVENT_READ, child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _standby_of(self, command: RoleCommand) -> Standby | None:
        """Return the standby process that forks a role, watched until it is ready; None: none."""
        if not command.imports:
            return None
        standby = self._standbys.find(command.imports, environment_of(command))
        is_watched = any(awaited is standby for _, awaited in self._waiting)
        if standby is not None and standby.is_importing and not is_watched:
            self._selector.register(standby.socket, selectors.EVENT_READ, standby)
        return standby

    def _read_standby(self, standby: Standby) -> None:
        """Start the roles that have waited for a standby process, which is ready or has ended."""
        self._selector.unregister(standby.socket)
        standby.read()
        started = [command for command, awaited in self._waiting if awaited is standby]
        self._waiting = [each for each in self._waiting if each[1] is not standby]
        for command in started:
            if not self.was_forced:
                self.start(command)

    def step(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` (None: for ever) for output, exits and signals; handle them."""
        ended: list[ChildProcess] = []
        for key, _ in self._selector.select(self._until_restart(timeout_s)):
            if key.fileobj is self._wake_reader:
                self._drain_wakeups()
                continue
            if isinstance(key.data, Standby):
                self._read_standby(key.data)
                continue
            if not isinstance(key.data, ChildProcess):
                key.data()
                continue
            child: ChildProcess = key.data
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

    def _plan_restart(self, child: ChildProcess, gone: RoleExit) -> None:
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
        for standby in {standby for _, standby in self._waiting}:
            self._selector.unregister(standby.socket)
        self._waiting.clear()
        self._standbys.end()
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
            self._emit(f"{child.command.name} (pid {child.pid}) survived SIGKILL")

    @staticmethod
    def _running(children: Sequence[ChildProcess]) -> list[ChildProcess]:
        return [child for child in children if child.is_running]

    def _of(self, *parts: Part) -> list[ChildProcess]:
        return [child for child in self._children if child.command.part in parts]

    def _terminate(self, children: Sequence[ChildProcess]) -> bool:
        """Ask the running ones to stop; return whether there was one."""
        running = self._running(children)
        for child in running:
            child.terminate()
        return bool(running)

    def _step_until_ended(self, children: Sequence[ChildProcess], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._running(children) and (left := deadline - time.monotonic()) > 0:
            self.step(left)

    def _forward(self, child: ChildProcess, lines: Sequence[str]) -> None:
        for line in lines:
            # JSON names the role itself.
            self._emit(line if is_json(line) else f"{child.command.name} | {line}")

    def _collect(self, child: ChildProcess) -> RoleExit:
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
