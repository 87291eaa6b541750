"""A server started for a measurement and stopped after it, so that two never share the cores.

Owns one child process group, its log file, the wait until it answers, and its end. Knows no
engine: the caller gives the command and the URL. Called by benchmarks.load.compare and by
benchmarks.servers.topspin.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from benchmarks.load.client.targets import ServerUnreachable, check_ready
from topspin.errors import ConfigError, EngineUnavailable

POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
_LOG_TAIL_LINES = 10


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class StartedServer:
    """Runs `command` while its `with` block runs; ready when the block is entered."""

    def __init__(
        self, command: str, *, url: str, log: Path, ready_timeout_s: float, cwd: Path | None = None
    ) -> None:
        """Set the command, which is split by shell rules but not run by a shell.

        Raises ConfigError for an empty or unbalanced command.
        """
        try:
            self.words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--start {command!r}: {error}") from error
        if not self.words:
            raise ConfigError("--start needs a command: NAME='command'")
        self.url = url
        self._log = log
        self._ready_timeout_s = ready_timeout_s
        self._cwd = cwd

    @property
    def pid(self) -> int:
        """The process that was started; its children may serve."""
        return self._process.pid

    def __enter__(self) -> Self:
        """Start the server and wait until it answers.

        Raises ConfigError if something already answers there (it would be measured instead),
        EngineUnavailable with the end of its log if it dies or is not ready in time.
        """
        with contextlib.suppress(ServerUnreachable):
            check_ready(self.url)
            raise ConfigError(f"{self.url} already answers; stop that server, or drop --start")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            log.write(f"$ {shlex.join(self.words)}\n".encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    self.words,
                    cwd=self._cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"--start: cannot run {self.words[0]!r}: {error}") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def check(self, *, patience_s: float = 0.0) -> None:
        """Raise EngineUnavailable, with the end of its log, if the server has died.

        `patience_s` gives a server whose connections have just broken time to end.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(patience_s)
            raise EngineUnavailable(
                f"the server for {self.url} ended with status {status}; the end of "
                f"{self._log}:\n{self._tail()}"
            )

    def stop(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL for remaining processes."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            # Reap the leader first: until then its group exists, though nothing runs.
            if self._process.poll() is not None and not self._group_lives():
                return
            time.sleep(POLL_S / 2)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        while True:
            with contextlib.suppress(ServerUnreachable):
                return check_ready(self.url)
            self.check()
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"{self.url} did not answer within {self._ready_timeout_s:g} s; the end of "
                    f"{self._log}:\n{self._tail()}"
                )
            time.sleep(POLL_S)

    def _group_lives(self) -> bool:
        """Return whether a process of the group runs; an unreaped one does not count."""
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name, in parentheses, may hold spaces: pid (name) state parent group.
                state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == self._process.pid and state not in "ZX":
                return True
        return False

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])
