"""One process of a role: how it begins, its output by lines, and its end.

Owns the process and this end of its pipe. It is executed anew, or forked by a standby process
(app.launch.standby), which saves the imports. Knows no other role and restarts nothing. Called by
app.launch.supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.launch.standby import Standby
from topspin.errors import EngineError
from topspin.process import PARENT_PID_VARIABLE

NUM_TAIL_LINES = 20

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

    `imports`: the modules that a standby process imports before it forks this role, whose `argv`
    then is that of a module and has no `pass_fds`; (): the role is always executed.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    part: Part = "worker"
    imports: tuple[str, ...] = ()


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


class ChildProcess:
    """A started role. Invariant: while `is_running` its process is not reaped, so that no other
    process can have its pid or process group."""

    def __init__(self, command: RoleCommand, standby: Standby | None = None) -> None:
        """Fork `standby` if it is given and can, else execute; raises EngineError."""
        environment = environment_of(command)
        self.command = command
        output, written = os.pipe2(os.O_CLOEXEC)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            pid = standby.fork(command.argv, environment, written) if standby else None
            if pid is None:
                # A separate process group: Ctrl-C in the terminal reaches the supervisor only.
                self._process = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=command.pass_fds,
                    process_group=0,
                )
                pid = self._process.pid
        except OSError as error:
            os.close(output)
            raise EngineError(f"cannot start {command.name}: {error}") from error
        finally:
            os.close(written)
        self.pid = pid
        self.output_fd = output
        os.set_blocking(self.output_fd, False)
        self.pidfd = os.pidfd_open(pid)
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
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the role and all processes of its process group."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> RoleExit:
        """Collect an ended process, after killing the rest of its process group."""
        self.kill()
        self.is_running = False
        if self._process is not None:
            returncode = self._process.wait()
        else:
            returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pidfd)
        return RoleExit(self.command.name, returncode, ())

    def close(self) -> None:
        """Close this end of the output pipe."""
        os.close(self.output_fd)


def environment_of(command: RoleCommand) -> dict[str, str]:
    """Return the whole environment of a role of this supervisor."""
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **os.environ,
        **command.environment,
        PARENT_PID_VARIABLE: str(os.getpid()),
    }
