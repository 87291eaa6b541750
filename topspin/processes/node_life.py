"""The life cycle of a node of any role: join, load, form, serve, halt and form again, stop.

Owns the node's side of the life-cycle messages, Hello to Goodbye, and the process's exit status.
Knows no tensors and no step: a Worker loads, connects and serves. Nodes that share a process
(`--transport local`) have the same life cycle in threads. The scheduler's side is
server.scheduler.nodes.roster and failover.

A node of an engine that goes on without lost processes keeps its weights when the scheduler is
gone, and says Hello to the next one. So do nodes that share a process, and draft nodes.

On SIGTERM an attention or expert node that has loaded asks the scheduler to do without it, and goes
on until it is told to stop, if the engine goes on without lost nodes; others end at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import msgspec

from topspin import __version__
from topspin.errors import (
    ConfigError,
    Interrupted,
    PeerLost,
    ProtocolError,
    SchedulerLost,
    TopspinError,
    TransportError,
    VersionMismatch,
)
from topspin.messages import (
    AnyMessage,
    Goodbye,
    Halt,
    Halted,
    Hello,
    Leaving,
    Loaded,
    Message,
    NodeMemory,
    Ready,
    Reform,
    Refused,
    Role,
    StepFailed,
    StepTicket,
    Stop,
    Welcome,
)
from topspin.process import CONFIG_ERROR_STATUS, new_incarnation, resident_bytes
from topspin.processes.channel import RELAXED_HEARTBEAT, ControlClient, Heartbeat
from topspin.processes.inbox import Inbox, Stopped
from topspin.processes.progress import ProgressWord, StepProgress

if TYPE_CHECKING:  # engines of one host have no keys, and may lack the package that reads them
    from topspin.processes.keys import KeyDirectory

# How long a Stop may come after the peers' one. A scheduler that fails sends none and is gone.
STOP_NOTICE_S = 2.0
# The pause after a scheduler was lost before it sent Welcome.
RETRY_S = 0.2
# The shortest time between two reports of a node's memory.
MEMORY_INTERVAL_S = 2.0


class CacheSize(NamedTuple):
    """The blocks of a KV cache, and how many of them are in memory at once."""

    num_blocks: int = 0
    num_frames: int = 0


class Served(Protocol):
    """The checkpoint of a node: models.checkpoints.checkpoint.Checkpoint."""

    @property
    def digests(self) -> Mapping[str, str]:
        """The digest of each file by name."""

    def fingerprint(self) -> str:
        """Return what is equal for equal checkpoints."""

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since the digests were made."""


class Worker(Protocol):
    """One role's part in its node's life; all of it runs in the node's one busy thread."""

    def load(self, welcome: Welcome) -> CacheSize:
        """Read the weights and warm up; returns the size of an attention node's KV cache."""

    def form(self, welcome: Welcome) -> None:
        """Connect to the peers of the topology, with its expert table."""

    def disband(self) -> None:
        """Leave the generation; its connections and their memory are never used again."""

    def wait_s(self) -> float | None:
        """Do work that needs no message; return how long to wait for one (None: until it comes)."""

    def idle(self) -> None:
        """Called when no message came within wait_s()."""

    def handle(self, message: AnyMessage) -> None:
        """Act on a message about the role's work; raises ProtocolError for any other."""


class NodeLife:
    """One node's life on one control connection.

    If `can_reform` is False, this node ends with its generation, unless the scheduler does first.
    """

    def __init__(
        self, control: ControlClient, *, role: Role, index: int, can_reform: bool = True
    ) -> None:
        self.inbox = Inbox(control)
        self.progress = StepProgress(control, role=role, index=index)
        self.incarnation = new_incarnation()
        self._control = control
        self._role: Role = role
        self._index = index
        self._can_reform = can_reform
        self._restarts = False
        self._is_asked_to_leave = False
        self._has_said_so = False
        self._checkpoint: Served | None = None
        self._data_address = ""
        self._generation = 0
        self._memory_due_s = 0.0
        self._word = ProgressWord.of_process()
        self.progress.on_beat = self._word.touch
        self._logger = logging.getLogger(role)

    def introduce(self, checkpoint: Served | None, data_address: str = "") -> None:
        """Say Hello, with the fingerprint of the checkpoint that it will load (None: of none)."""
        self._checkpoint, self._data_address = checkpoint, data_address
        self._say_hello()

    def _say_hello(self) -> None:
        checkpoint = self._checkpoint
        self.send(
            Hello(
                role=self._role,
                index=self._index,
                incarnation=self.incarnation,
                revision=__version__,
                fingerprint="" if checkpoint is None else checkpoint.fingerprint(),
                files={} if checkpoint is None else dict(checkpoint.digests),
                data_address=self._data_address,
                pid=os.getpid(),
                generation=self._generation,
            )
        )

    def check_checkpoint(self) -> None:
        """Raise CheckpointError if what was read since introduce() is not what Hello named."""
        if self._checkpoint is not None:
            self._checkpoint.check_unchanged()

    def send(self, message: Message) -> None:
        """Send the scheduler a message."""
        self._control.send(message)

    def check(self) -> None:
        """Called in long waits: report the wait; raise Interrupted if the step is not wanted."""
        self._word.touch()
        self.progress.waiting()
        self._say_leaving()
        self.inbox.check()

    def ask_to_leave(self) -> None:
        """Have the node leave the engine, which goes on; for any thread, or a signal handler."""
        self._is_asked_to_leave = True
        self._control.wake()

    def _say_leaving(self) -> None:
        if self._is_asked_to_leave and not self._has_said_so:
            self._has_said_so = True
            self._logger.info("%s %d leaves", self._role, self._index)
            self.send(Leaving(role=self._role, index=self._index))

    @contextlib.contextmanager
    def _leaving_on_sigterm(self, limit_s: float | None) -> Iterator[None]:
        """Leave on SIGTERM, and end by SIGALRM if that takes `limit_s`; None: end at once."""
        is_process = threading.current_thread() is threading.main_thread()
        can_leave = is_process and self._can_reform and self._role in ("attention", "expert")
        if limit_s is None or not can_leave:
            yield
            return

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            self.ask_to_leave()

        before = signal.signal(signal.SIGTERM, on_sigterm)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGTERM, before)

    def serve(self, worker: Worker) -> None:
        """After introduce(): join, then serve until told to stop; raises Stopped or an error."""
        welcome = self._await_welcome()
        self._restarts = welcome.config.restart
        started_s = time.monotonic()
        self._word.set("loading")
        cache = worker.load(welcome)
        self.check_checkpoint()
        load_s = time.monotonic() - started_s
        ready = Ready(
            role=self._role,
            index=self._index,
            num_blocks=cache.num_blocks,
            num_frames=cache.num_frames,
            load_s=load_s,
        )
        with self._leaving_on_sigterm(welcome.config.leave_deadline_s):
            has_served = False
            while True:
                try:
                    self._take_part(worker, welcome, ready, has_served=has_served)
                except SchedulerLost as error:
                    if self._is_asked_to_leave:
                        raise Stopped("it was asked to leave, and the scheduler is gone") from None
                    if not self._restarts:
                        raise
                    self._logger.warning("%s %d: %s", self._role, self._index, error)
                finally:
                    worker.disband()
                welcome = self._rejoin(welcome)
                ready = msgspec.structs.replace(ready, load_s=0.0)
                has_served = True

    def _await_welcome(self) -> Welcome:
        """Return the answer to Hello, which comes once the engine is complete.

        Raises VersionMismatch with the scheduler's reason if it refuses, Stopped if the engine
        stops first or this node is asked to leave, SchedulerLost if the scheduler goes.
        """
        while (answer := self._control.recv()) is None:
            if self._is_asked_to_leave:
                raise Stopped("it was asked to leave, and takes part in nothing")
        if isinstance(answer, Refused):
            raise VersionMismatch(answer.reason)
        if isinstance(answer, Stop):
            raise Stopped(answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"expected Welcome, got {type(answer).__name__}")
        return answer

    def _rejoin(self, before: Welcome) -> Welcome:
        """Say Hello to the next scheduler, as another incarnation, and return its Welcome.

        Raises ProtocolError if it serves another plan: then this node has to load anew.
        """
        self._word.set("starting")
        self._logger.info("%s %d waits for another scheduler", self._role, self._index)
        said = ""
        while True:
            self._control.reconnect()
            self.inbox.clear()
            self.progress.forget()
            self.incarnation = new_incarnation()
            self._say_hello()
            try:
                welcome = self._await_welcome()
            except SchedulerLost as error:
                if str(error) != said:  # not each time
                    said = str(error)
                    self._logger.warning("%s %d: %s", self._role, self._index, said)
                time.sleep(RETRY_S)
                continue
            if welcome.config != before.config:
                raise ProtocolError("another scheduler has come, with another plan")
            return welcome

    def _take_part(
        self, worker: Worker, welcome: Welcome, ready: Ready, *, has_served: bool
    ) -> NoReturn:
        if welcome.joins_late:
            self.send(
                Loaded(
                    role=self._role,
                    index=self._index,
                    num_blocks=ready.num_blocks,
                    num_frames=ready.num_frames,
                    load_s=ready.load_s,
                )
            )
        elif has_served:
            self._reform(worker, welcome, ready)  # a scheduler that ends must not end this node
        else:
            self._form(worker, welcome, ready)
        ready = msgspec.structs.replace(ready, load_s=0.0)  # it loads once
        while True:
            wait_s = worker.wait_s()
            self._say_leaving()
            self._report_memory()
            self._word.set("idle")
            message = self.inbox.next(wait_s)
            self._word.set("working")
            if message is None:
                worker.idle()
            elif isinstance(message, Halt) and self._can_reform:
                worker.disband()
                generation = message.generation
                self.send(Halted(role=self._role, index=self._index, generation=generation))
            elif isinstance(message, Reform):
                welcome = msgspec.structs.replace(welcome, topology=message.topology)
                self._reform(worker, welcome, ready)
            else:
                worker.handle(message)

    def _report_memory(self) -> None:
        """Report the process's memory, unless that was done within the interval."""
        now_s = time.monotonic()
        if now_s >= self._memory_due_s:
            self._memory_due_s = now_s + MEMORY_INTERVAL_S
            size = resident_bytes()
            self.send(NodeMemory(role=self._role, index=self._index, resident_bytes=size))

    def _form(self, worker: Worker, welcome: Welcome, ready: Ready) -> None:
        self._generation = generation = welcome.topology.generation
        worker.form(welcome)
        self.send(msgspec.structs.replace(ready, generation=generation))
        self._logger.info(
            "%s %d ready (generation %d, %.1f s)",
            self._role,
            self._index,
            generation,
            ready.load_s,
        )

    def _reform(self, worker: Worker, welcome: Welcome, ready: Ready) -> None:
        """Join a new generation; if that fails, report it and wait for the next one."""
        worker.disband()
        try:
            self._form(worker, welcome, ready)
        except Interrupted:
            worker.disband()
        except SchedulerLost:
            raise
        except TransportError as error:
            worker.disband()
            self.send(self._failure(0, welcome.topology.generation, error))

    def report_failure(self, ticket: StepTicket, error: Exception) -> None:
        """Report that the step of `ticket` has failed.

        Raises `error` unless the engine reforms, Stopped if the net failed because it stops.
        """
        if isinstance(error, SchedulerLost):
            raise error
        self.send(self._failure(ticket.step, ticket.generation, error))
        if not isinstance(error, TransportError):
            raise error
        if not (self._restarts and self._can_reform):
            self._await_stop()
            raise error
        self._logger.warning("%s %d: step %d: %s", self._role, self._index, ticket.step, error)

    def _await_stop(self) -> None:
        """Raise Stopped if the engine is told to stop, SchedulerLost if another scheduler may come.

        Returns if it is not, or has failed.

        Nodes do not stop at the same moment, and one that stops drops the steps it has not begun:
        its peers, which have begun them, see a closed connection before their own Stop.
        """
        try:
            while self.inbox.next(STOP_NOTICE_S) is not None:
                pass
        except SchedulerLost:
            if self._restarts:
                raise
        except (PeerLost, ProtocolError):
            return

    def _failure(self, step: int, generation: int, error: Exception) -> StepFailed:
        return StepFailed(
            step=step,
            generation=generation,
            role=self._role,
            index=self._index,
            code=error.code if isinstance(error, TopspinError) else "internal_error",
            message=str(error) or type(error).__name__,
        )


def run_node(
    role: Role,
    index: int,
    address: str,
    *,
    logger: logging.Logger,
    body: Callable[[ControlClient], None],
    heartbeat: Heartbeat = RELAXED_HEARTBEAT,
    keys: KeyDirectory | None = None,
) -> int:
    """Run `body` with a control connection to `address`; return the process's exit status.

    0 after an orderly stop; after an error, which is logged and told to the scheduler, 1, or
    2 if the node cannot serve its configuration. Raises ConfigError for an `address` that needs
    other `keys`.
    """
    control = ControlClient(address, heartbeat=heartbeat, keys=keys)
    try:
        body(control)
    except (Stopped, KeyboardInterrupt):
        return 0
    except PeerLost as error:
        logger.error("%s %d: %s", role, index, error)
        return 1
    except TopspinError as error:
        logger.error("%s %d: %s", role, index, error)
        control.send(Goodbye(role=role, index=index, code=error.code, message=str(error)))
        return CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else 1
    except Exception as error:
        logger.exception("%s %d failed", role, index)
        message = f"{type(error).__name__}: {error}"
        control.send(Goodbye(role=role, index=index, code="internal_error", message=message))
        return 1
    finally:
        control.close()
    return 0
