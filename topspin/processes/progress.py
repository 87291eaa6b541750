"""A process's progress, as its busy thread tells it: to the scheduler, and to a probe of the host.

Owns a node's reports on a long step, and their rate: a step shorter than the interval sends
nothing. Workers begin a step, its code calls `beat` as it proceeds, and waits for a peer call
`waiting`, so a process that hangs or is frozen reports nothing. server.scheduler.nodes.watermark
judges the reports.

Owns the progress word too, a small file with a role's state and when it last got on. The busy
thread cannot answer questions while it computes, and threads beside it would answer even when it
hangs. topspin.processes.node_life and server.scheduler.service write it, `topspin probe` reads it.
Knows no layers, no net and no role.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from topspin.errors import ConfigError
from topspin.messages import Progress, ProgressState, Role, StepTicket

if TYPE_CHECKING:
    from topspin.processes.channel import ControlClient

# Far below the smallest failover.progress_deadline_s: several reports fit into it.
INTERVAL_S = 0.5

FILE_VARIABLE: Final = "TOPSPIN_PROGRESS_FILE"
"""The file of this process, if it has one."""

State = Literal["starting", "loading", "idle", "working"]
"""Idle: it waits for a message, as long as that takes. Idle and working are ready."""

_STATES: Final = get_args(State)
# The process, when it began, the state, and CLOCK_MONOTONIC in ns, which is the host's. A process
# that is started again in a container often has the number of the one before.
_WORDS: Final = struct.Struct("<QQQQ")
_MAX_PID: Final = 2**22

# Called from time to time within a step.
Beat = Callable[[], None]


def no_beat() -> None:
    """Report nothing."""


class StepProgress:
    """One node's reports on one control connection.

    Invariant: the last report is "waiting" only while the node waits; it is withdrawn at once when
    the node continues.
    """

    def __init__(
        self, control: ControlClient, *, role: Role, index: int, interval_s: float = INTERVAL_S
    ) -> None:
        self._control = control
        self._role: Role = role
        self._index = index
        self._interval_s = interval_s
        self._ticket: StepTicket | None = None
        self._is_done = False
        self._said: ProgressState | None = None
        self._said_s = 0.0
        self._moved_s = 0.0
        self.on_beat: Callable[[], None] = lambda: None
        """Called by beat() too."""

    def begin(self, ticket: StepTicket) -> None:
        """Report on the step of `ticket` from now on."""
        self._ticket = ticket
        self._is_done = False
        self._said = None
        self._said_s = self._moved_s = time.monotonic()

    def beat(self) -> None:
        """Report progress on the step, unless reported within the interval; never blocks."""
        self.on_beat()
        self._moved_s = time.monotonic()
        if self._said == "waiting" or self._moved_s >= self._said_s + self._interval_s:
            self._say("working", self._moved_s)

    def waiting(self) -> None:
        """Report that the step waits for a peer, if it has done so for an interval."""
        now_s = time.monotonic()
        is_long = now_s >= max(self._said_s, self._moved_s) + self._interval_s
        if self._ticket is not None and not self._is_done and is_long:
            self._say("waiting", now_s)

    def end(self) -> None:
        """The node has done its part of the step."""
        self._is_done = True
        self._moved_s = time.monotonic()

    def forget(self) -> None:
        """Forget the last step: another scheduler knows nothing of it."""
        self._ticket = None

    @property
    def owes_end(self) -> bool:
        """Say whether the last end is unreported, so that idle() should be called.

        Whoever joins a generation leaves the one before, if only in form: that ends no step.
        """
        return self._ticket is not None and self._is_done and self._said != "done"

    def idle(self) -> None:
        """Report, once, that the step is done, if nothing has come since for an interval.

        Not needed by a node whose result reports it anyway.
        """
        now_s = time.monotonic()
        if self.owes_end and now_s >= self._moved_s + self._interval_s:
            self._say("done", now_s)

    def _say(self, state: ProgressState, now_s: float) -> None:
        assert self._ticket is not None, "begin() first"
        self._said, self._said_s = state, now_s
        self._control.send(
            Progress(
                step=self._ticket.step,
                generation=self._ticket.generation,
                role=self._role,
                index=self._index,
                state=state,
            )
        )


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
