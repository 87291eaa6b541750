"""Dummy roles as commands, and waiting for processes that are not our children."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from app.launch.child_process import Part, RoleCommand

ROOT = Path(__file__).resolve().parents[3]


def dummy(
    name: str,
    behaviour: str,
    *arguments: str,
    pass_fds: tuple[int, ...] = (),
    part: Part = "worker",
) -> RoleCommand:
    """Return the command of a role called `name` that runs dummy_role's `behaviour`."""
    return RoleCommand(
        name=name,
        argv=(
            sys.executable,
            str(Path(__file__).with_name("dummy_role.py")),
            behaviour,
            *arguments,
        ),
        environment={"PYTHONPATH": str(ROOT), "FLAVOUR": "ginger"},
        pass_fds=pass_fds,
        part=part,
    )


def wait_until_gone(pid: int, *, timeout_s: float = 20.0) -> bool:
    """Return whether the process `pid` ends within `timeout_s` or has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)
