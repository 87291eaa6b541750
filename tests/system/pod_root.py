"""What a container runtime does before a container's command: its root, user and hostname.

Owns one process: run by tests.system.pods in a network namespace and a mount namespace of its own,
with a JSON specification as its argument; it becomes the command. The root is read-only and has
this machine's system folders, the interpreter, and this repository; nothing else of it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

SYSTEM = ("bin", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    socket.sethostname(spec["hostname"])
    root = Path(spec["root"])
    mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(root))
    for name in SYSTEM:
        if Path("/", name).exists():
            bind(Path("/", name), root / name)
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
    os.execve(spec["argv"][0], spec["argv"], spec["environment"])


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
