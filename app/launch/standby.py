"""Standby processes: each has imported a node's modules, and becomes a node by forking itself.

Owns the supervisor's end: their start, their one message, the request to fork. Imports are most of
a node's start (torch alone takes seconds), and forks share the memory of what was imported. The
libraries read OMP_*, GOMP_* and GLIBC_TUNABLES when a process starts, so there is a standby process
for each environment. The other end is app.launch.standby_process. Knows no role.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from topspin.cores import CORES_VARIABLE
from topspin.process import available_bytes

MIN_AVAILABLE_BYTES: Final = 2**30
"""Of memory on this host without which there is no standby process, which holds some 0.2 GB."""

FORK_LIMIT_S: Final = 5.0
READY: Final = b"ready"
MAX_REQUEST_BYTES: Final = 2**20

_PR_SET_CHILD_SUBREAPER = 36
_ARGV = (sys.executable, "-P", "-m", "app.launch.standby_process")
_ROOM = " " * 1024
# numpy's threads would be lost in a fork; nodes compute with torch.
_OWN_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


class NodeFork(msgspec.Struct, frozen=True):
    """What a forked process becomes: `argv` is that of `python -P -m module`."""

    argv: tuple[str, ...]
    environment: dict[str, str]


class Standby:
    """One standby process, of this process's own.

    `is_ready`: its imports are done. `has_ended`: it forks nothing any more, nor will it.
    """

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it, with the modules to import. Raises OSError if the system cannot."""
        self.is_ready = False
        self.has_ended = False
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                # Its errors are those of the node, which is executed then and tells them.
                self._process = subprocess.Popen(
                    (*_ARGV, str(theirs.fileno()), _ROOM, *imports),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_OWN_ENVIRONMENT | dict(environment),
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            except OSError:
                self.socket.close()
                raise

    @property
    def is_importing(self) -> bool:
        """Return whether read() has not yet said that it is ready or has ended."""
        return not (self.is_ready or self.has_ended)

    def read(self) -> None:
        """Read the one message that comes unasked, or the end of the process."""
        try:
            if self.socket.recv(len(READY)) == READY:
                self.is_ready = True
                return
        except ConnectionResetError:
            pass
        self.end()

    def fork(self, argv: Sequence[str], environment: Mapping[str, str], output: int) -> int | None:
        """Return the pid of a new child of *this* process, which runs `argv`.

        It has a process group of its own, and writes to `output`. None: the standby process could
        not, and has ended. Must be called by the thread that called __init__.
        """
        if not self.is_ready or self.has_ended:
            return None
        request = msgspec.json.encode(NodeFork(tuple(argv), dict(environment)))
        try:
            self.socket.settimeout(FORK_LIMIT_S)
            with _adopting():
                socket.send_fds(self.socket, [request], [output])
                if answer := self.socket.recv(32):
                    return int(answer)
        except OSError:
            pass
        self.end()
        return None

    def end(self) -> None:
        """Kill the process; what it has forked lives on. Idempotent."""
        if not self.has_ended:
            self.has_ended = True
            self.socket.close()
            self._process.kill()
            self._process.wait()


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile a descendant whose parent ends becomes this process's child."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Standbys:
    """The standby processes of one supervisor, one for each environment."""

    def __init__(self) -> None:
        self._found: dict[object, Standby] = {}

    def find(self, imports: Sequence[str], environment: Mapping[str, str]) -> Standby | None:
        """Return the one that forks nodes with this environment, started if need be.

        None if this host has no memory for it. One that has ended before it was ready is kept:
        another would end like it. Raises OSError if the system cannot start it.
        """
        # A process moves to its cores by itself.
        kept = {name: value for name, value in environment.items() if name != CORES_VARIABLE}
        kind = (tuple(imports), tuple(sorted(kept.items())))
        standby = self._found.get(kind)
        if standby is None or (standby.is_ready and standby.has_ended):
            if available_bytes() < MIN_AVAILABLE_BYTES:
                return None
            standby = self._found[kind] = Standby(imports, environment)
        return standby

    def end(self) -> None:
        """Kill them all; what they have forked lives on."""
        for standby in self._found.values():
            standby.end()
