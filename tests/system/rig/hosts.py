"""Hosts as network namespaces, and the roles of an engine that run on them.

Owns the namespaces, the virtual cables between them and this one, which can be pulled, and keeping
processes running as a supervisor of services does. Knows no test.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

DEADLINE_S = 120.0


class Host:
    """Another host: a network namespace with the address `address`, reached from `gateway`.

    Use as a context manager. This process's namespace is at `gateway`.
    """

    def __init__(self) -> None:
        self.name, self._there = f"topspin-{secrets.token_hex(3)}", "eth0"

    def __enter__(self) -> Host:
        run_ip("netns", "add", self.name)
        try:
            peer = ("type", "veth", "peer", "name", self._there, "netns", self.name)
            here, number = add_link("tsa", *peer)
            self.gateway, self.address = f"10.213.{number}.1", f"10.213.{number}.2"
            run_ip("address", "add", f"{self.gateway}/30", "dev", here)
            run_ip("link", "set", here, "up")
            run_ip("-n", self.name, "link", "set", "lo", "up")
            run_ip("-n", self.name, "address", "add", f"{self.address}/30", "dev", self._there)
            run_ip("-n", self.name, "link", "set", self._there, "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)

    def pull_cable(self) -> None:
        """Lose all packets from now on; nobody is told."""
        # With the link down the kernel would report errors at this end; so the far end goes.
        run_ip("-n", self.name, "link", "set", self._there, "down")

    def plug_in(self) -> None:
        """Join the cable again."""
        run_ip("-n", self.name, "link", "set", self._there, "up")

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on this host."""
        return ["ip", "netns", "exec", self.name, *argv]


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def add_link(prefix: str, *kind: str) -> tuple[str, int]:
    """Add a link of the first number that no other has; returns its name and number.

    Networks are numbered by their links, as the kernel refuses a second link of one name but would
    give two links one network, and send all packets to the first.
    """
    for number in range(20, 220):
        name = f"{prefix}{number}"
        added = subprocess.run(
            ["ip", "link", "add", name, *kind], check=False, capture_output=True, text=True
        )
        if added.returncode == 0:
            return name, number
        assert "File exists" in added.stderr, added.stderr
    raise AssertionError(f"all networks are taken: end the tests' links ({prefix}...) by hand")


class Service:
    """`topspin` with some arguments, started again whenever it ends. Use as a context manager."""

    def __init__(self, directory: Path, *arguments: str, host: Host | None = None) -> None:
        self.arguments = arguments
        name = "-".join(each for each in arguments[:4] if not each.startswith(("-", "/")))
        self.output_path = directory / f"{name}-{time.monotonic_ns()}.log"
        argv = [sys.executable, "-m", "topspin", *arguments]
        self._argv = argv if host is None else host.command(argv)
        self._is_stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self._thread = threading.Thread(target=self._keep, daemon=True)

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def __enter__(self) -> Service:
        self._start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_stopping.set()
        self.kill(signal.SIGKILL)
        self._thread.join(DEADLINE_S)
        if kind is not None:
            print(f"--- {' '.join(self.arguments)}\n{self.output}")

    def _start(self) -> None:
        with self.output_path.open("a") as output:
            self._process = subprocess.Popen(
                self._argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.num_starts += 1

    def _keep(self) -> None:
        assert self._process is not None
        while True:
            self._process.wait()
            if self._is_stopping.wait(0.2):
                return
            self._start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; the role runs in the process that was started."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait_for(self, pattern: str, *, after: int = 0) -> str:
        """Wait until the output behind its first `after` characters has the pattern.

        Returns the last group of the pattern that was found, or all of it.
        """
        end_s = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.output[after:])):
            assert time.monotonic() < end_s, f"no {pattern!r} in {self.output}"
            time.sleep(0.05)
        return found[found.lastindex or 0]
