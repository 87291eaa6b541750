"""`python -m app.launch.standby_process SOCKET ROOM MODULE...`: imports, then becomes nodes.

Owns this end of the supervisor's socket and the fork. Each node is forked twice, so that the
process between them ends and the node becomes the child of the supervisor, which set itself up to
adopt it (app.launch.standby). ROOM is blank, and as long as a node's command line may be that takes
the place of this process's. Computes nothing: a fork copies one thread only, so there must be
no other when it comes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from app.launch.standby import MAX_REQUEST_BYTES, READY, NodeFork
from topspin.process import follow_parent

_GO = b"g"


def main() -> int:
    """Import the modules, then fork for as long as the supervisor asks; in a fork, be the node."""
    follow_parent()
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to every page that it shares
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        os._exit(1)  # without waiting for the threads, which a fork would lose
    with socket.socket(fileno=int(sys.argv[1])) as supervisor:
        supervisor.send(READY)
        fork = _serve(supervisor)
    if fork is not None:
        _become(fork)
    return 0


def _serve(supervisor: socket.socket) -> NodeFork | None:
    """NodeFork for each request; returns None once the supervisor has gone, a request in a fork."""
    while True:
        data, (*files,), *_ = socket.recv_fds(supervisor, MAX_REQUEST_BYTES, 1)
        if not data:
            return None
        fork = msgspec.json.decode(data, type=NodeFork)
        if (pid := _fork_twice(files[0])) is None:
            return fork
        os.close(files[0])
        supervisor.send(str(pid).encode())


def _fork_twice(output: int) -> int | None:
    """Return the pid of the new process, an orphan by then; None in it, whose output is set."""
    told, tell = os.pipe()
    awaited, go = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.setpgid(0, 0)
        for number in (1, 2):
            os.dup2(output, number)
        for number in (output, told, tell, go):
            os.close(number)
        if os.read(awaited, 1) != _GO:
            os._exit(1)  # the standby process has ended, and the supervisor knows no pid
        os.close(awaited)
        return None
    os.waitpid(between, 0)
    os.close(tell)
    pid = int(os.read(told, 32))  # it raises ValueError if the second fork has failed
    os.write(go, _GO)
    for number in (told, awaited, go):
        os.close(number)
    return pid


def _become(fork: NodeFork) -> None:
    """Run the module as if it were executed."""
    flags, module = fork.argv[1:3], fork.argv[3]
    assert flags == ("-P", "-m"), fork.argv
    _show_command(fork.argv)
    os.environ.clear()
    os.environ.update(fork.environment)
    sys.argv, sys.orig_argv = ["", *fork.argv[4:]], list(fork.argv)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _show_command(argv: Sequence[str]) -> None:
    """Have `ps` show `argv` for this process: its first bytes, as many as were shown before."""
    # After the name, which may have spaces, comes field 3 of proc(5); 48 and 49 are the bounds.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[48 - 3]), int(fields[49 - 3])
    shown = b"\0".join(map(os.fsencode, argv))[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    raise SystemExit(main())
