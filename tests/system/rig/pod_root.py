"""The part of a container runtime: a container's root, user, hostname and processes.

Owns two processes, run by tests.system.rig.pods in a network namespace and a mount namespace of
their own, with a JSON specification as the argument. The first one stays, passes SIGTERM on and
ends as the second does, which becomes the command: process 1 of a namespace. The root is read-only
and has this machine's system folders, the interpreter, and this repository; nothing else of it.

The image's `tini`, which this machine may lack, is played by `_follow`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SYSTEM = ("bin", "etc", "lib", "lib64", "sbin", "sys", "usr")
CLONE_NEWPID = 0x20000000
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    assert LIBC.unshare(CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
    _follow(lambda: _start(spec))


def _follow(begin: Callable[[], NoReturn]) -> NoReturn:
    """Fork a process that does `begin`, pass SIGTERM on to it, and end as it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        begin()
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _start(spec: dict[str, Any]) -> NoReturn:
    socket.sethostname(spec["hostname"])
    root = Path(spec["root"])
    mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(root))
    for name in SYSTEM:
        if Path("/", name).exists():
            bind(Path("/", name), root / name)
    (root / "proc").mkdir()
    mount("-t", "proc", "proc", str(root / "proc"))
    for path in spec["read_only"]:
        bind(Path(path), root / path.lstrip("/"), read_only=True)
    bind(Path(spec["hosts"]), root / "etc/hosts", read_only=True)
    (root / "dev").mkdir()
    mount("--rbind", "/dev", str(root / "dev"))
    for each in spec["mounts"]:
        bind(Path(each["source"]), root / each["target"].lstrip("/"), read_only=each["read_only"])
    mount("-o", "remount,ro", str(root))
    os.chroot(root)
    os.chdir("/")
    os.setgroups([])
    os.setgid(spec["user"])
    os.setuid(spec["user"])  # all capabilities go with it
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # another user's is forgotten

    def become() -> NoReturn:
        os.execve(spec["argv"][0], spec["argv"], spec["environment"])

    if spec["init"]:
        _follow(become)
    become()


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--rbind", str(source), str(target))
    if read_only:
        mount("-o", "remount,bind,ro", str(target))


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
