"""The progress word: what a probe of the same host can see of a process, without asking it.

Owns a small file that a role's busy thread writes: its state, and when it last got on. That thread
cannot answer questions while it computes, and threads beside it would answer even when it hangs.
Knows no role; topspin.processes.node_life and server.scheduler.service write it, `topspin probe`
reads it.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from topspin.errors import ConfigError

FILE_VARIABLE: Final = "TOPSPIN_PROGRESS_FILE"
"""The file of this process, if it has one."""

State = Literal["starting", "loading", "idle", "working"]
"""Idle: it waits for a message, as long as that takes. Idle and working are ready."""

_STATES: Final = get_args(State)
# The process, when it began, the state, and CLOCK_MONOTONIC in ns, which is the host's. A process
# that is started again in a container often has the number of the one before.
_WORDS: Final = struct.Struct("<QQQQ")
_MAX_PID: Final = 2**22


class ProgressWord:
    """This process's word. Belongs to its busy thread; writing it takes less than 1 us."""

    def __init__(self, path: Path | None) -> None:
        """None: nobody reads it. Raises ConfigError for a file that cannot be written."""
        self._memory: mmap.mmap | None = None
        self._state: State = "starting"
        self._pid, self._began = os.getpid(), _began(os.getpid())
        if path is None:
            return
        try:
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_bytes(bytes(_WORDS.size))
            with open(beside, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _WORDS.size)
            self.set("starting")
            beside.replace(path)
        except OSError as error:
            raise ConfigError(f"progress file {path}: {error.strerror}") from error

    @classmethod
    def of_process(cls) -> ProgressWord:
        """Return the word in the file that the environment names, if it does."""
        path = os.environ.get(FILE_VARIABLE)
        return cls(Path(path) if path else None)

    def set(self, state: State) -> None:
        """Say that the process got on, and is in `state` now."""
        self._state = state
        if self._memory is not None:
            words = (_STATES.index(state), time.monotonic_ns())
            _WORDS.pack_into(self._memory, 0, self._pid, self._began, *words)

    def touch(self) -> None:
        """Say that the process got on."""
        self.set(self._state)


class ProgressReading(NamedTuple):
    """A word that was read: the process, when it began, its state, how long ago it got on."""

    pid: int
    began: int
    state: State
    age_s: float


def read_progress(path: Path) -> ProgressReading:
    """Return the word in a file. Raises ConfigError if there is none."""
    try:
        with open(path, "rb") as file:
            pid, began, state, at_ns = _WORDS.unpack(file.read(_WORDS.size + 1))
    except OSError as error:
        raise ConfigError(f"progress file {path}: {error.strerror}") from error
    except struct.error:
        pid = began = state = at_ns = 0
    if not 0 < pid <= _MAX_PID or state >= len(_STATES):
        raise ConfigError(f"progress file {path}: it is not one")
    return ProgressReading(pid, began, _STATES[state], (time.monotonic_ns() - at_ns) / 1e9)


def trouble(found: ProgressReading, *, ready: bool, within_s: float) -> str | None:
    """Return why a process is not alive (or, if asked, not ready); None: it is.

    A process that works must have got on `within_s`; before it is ready that has no limit, since
    loading and compiling take as long as they take.
    """
    if _began(found.pid) != found.began:
        return f"process {found.pid} has ended"
    if found.state == "working" and found.age_s > within_s:
        return f"process {found.pid} did not get on for {found.age_s:.0f} s"
    if ready and found.state in ("starting", "loading"):
        return f"process {found.pid} is {found.state}"
    return None


def _began(pid: int) -> int:
    """Return when a process began, in clock ticks since the host did; 0: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # Behind the name, which may hold spaces and parentheses, the 20th field.
    return int(text.rpartition(")")[2].split()[19])
