"""The life cycle of a process: its standard streams, its end with its supervisor, its exit.

Owns the streams that are missing, the parent-death link, the memory that it has, may get, and
frees after loading, the limit of open files, and the exit statuses. Knows no role.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import secrets
import signal
import sys
from pathlib import Path

PARENT_PID_VARIABLE = "TOPSPIN_PARENT_PID"

# The exit status of a role, or of the command line, for settings that cannot be served.
CONFIG_ERROR_STATUS = 2

_PR_SET_PDEATHSIG = 1


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream with which this process was not started.

    Python has None in its place, and the next file or socket gets its number, to which C libraries
    and child processes write.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest number that is free is the stream's, unless an import has opened a file.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, opened == descriptor)
            setattr(sys, name, open(opened, "r" if name == "stdin" else "w"))  # noqa: SIM115


def follow_parent() -> None:
    """Have the kernel kill this process when its supervisor dies.

    Does nothing unless the supervisor named itself in TOPSPIN_PARENT_PID (a node that is
    started by hand or by Kubernetes has no supervisor). Linux ties the signal to the
    *thread* that started this process, so a supervisor starts roles from its main thread.
    """
    parent = os.environ.get(PARENT_PID_VARIABLE)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        # The supervisor died before prctl took effect.
        sys.exit(1)


def new_incarnation() -> int:
    """Return a number unique to this run of the process: 63 random bits, never 0."""
    return secrets.randbits(62) + 1


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory, those it shares with others too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def available_bytes() -> int:
    """Return the bytes that this machine can give to processes without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say MemAvailable")


def release_freed_memory() -> None:
    """Return the heap's free memory to the system, as after loading; glibc only.

    Packing weights frees the originals and leaves holes in the heap (over 100 MB for a 320 MB
    model), which the C library keeps until asked.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def allow_open_files(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted`, if it is lower and the system lets it.

    Returns the limit. Who listens for strangers needs room for them: systems begin with 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)
