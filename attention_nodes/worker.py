"""The attention node: take a plan, run the rally, sample, report.

Owns one step's course and the node's life: join, load, connect, warm up, execute
StepPlans, halt and connect anew when the engine reforms, stop. The net is opened by a
callable, so that the same worker runs alone in its process (shm, tcp) or beside the
experts (local). Runs in the process's one busy thread.

On a GPU a step runs by itself once it is launched: meanwhile the thread looks for the next
plan and launches it, then for the end of the first, whose result goes out at once. Results
are sent in order. What ends a generation waits for the device, then drops what was launched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from attention_nodes.launched import Checked
from attention_nodes.replica import MAX_LAUNCHED, OpenDryNet, Replica
from m2n_comm.net import AttentionNet
from models.checkpoint import Checkpoint
from topspin import __version__
from topspin.channel import ControlClient
from topspin.errors import Interrupted, ProtocolError, TransportError
from topspin.inbox import Inbox
from topspin.messages import (
    AnyMessage,
    Halt,
    Halted,
    Hello,
    Loaded,
    PrepareTable,
    Ready,
    Reform,
    StepPlan,
    StepTicket,
    TablePrepared,
    Topology,
    Welcome,
)
from topspin.node_life import await_welcome, reform_failed, step_failed
from topspin.process import new_incarnation
from topspin.progress import StepProgress

OpenNet = Callable[[Welcome, Replica, int], AttentionNet]
DryNet = Callable[[Welcome], OpenDryNet | None]


class AttentionWorker:
    """One attention node on one control connection.

    Invariant: `_is_formed` says whether the node takes part in the engine's generation; then
    `_net` is usable (None for a model without routed experts). `dry_net` says how experts of
    this process are reached while the replica still loads (see Replica.load; None: they are
    not). `can_reform` False: what ends a generation ends this node.
    """

    def __init__(
        self,
        control: ControlClient,
        *,
        index: int,
        model_path: Path,
        open_net: OpenNet,
        dry_net: DryNet = lambda welcome: None,
        can_reform: bool = True,
    ) -> None:
        self._control = control
        self.inbox = Inbox(control)
        self._progress = StepProgress(control, role="attention", index=index)
        self._can_reform = can_reform
        self._net: AttentionNet | None = None
        self._is_formed = False
        self._has_recorded = False
        self._index = index
        self._model_path = model_path
        self._open_net = open_net
        self._dry_net = dry_net
        self._logger = logging.getLogger("attention")
        self.incarnation = new_incarnation()

    def introduce(self) -> None:
        """Say Hello."""
        self._control.send(
            Hello(
                role="attention",
                index=self._index,
                incarnation=self.incarnation,
                revision=__version__,
                fingerprint=Checkpoint(self._model_path).fingerprint(),
                pid=os.getpid(),
            )
        )

    @torch.inference_mode()
    def serve(self) -> None:
        """After introduce(): join, then serve until told to stop; raises Stopped or an error."""
        welcome = await_welcome(self._control)
        started = time.monotonic()
        replica = Replica.load(
            self._model_path,
            welcome.config,
            index=self._index,
            table_version=welcome.table.version,
            open_net=self._dry_net(welcome),
        )
        self.inbox.trace = replica.trace
        load_s = time.monotonic() - started
        try:
            if welcome.joins_late:
                self._control.send(
                    Loaded(
                        role="attention",
                        index=self._index,
                        num_blocks=replica.num_blocks,
                        load_s=load_s,
                    )
                )
            else:
                self._form(replica, welcome, load_s=load_s)
            while True:
                self._run_next(replica, welcome)
        finally:
            self._disband(replica)

    def _form(self, replica: Replica, welcome: Welcome, *, load_s: float) -> None:
        """Connect to the expert nodes of the topology and report ready."""
        if replica.is_moe:
            self._net = self._open_net(welcome, replica, self.incarnation)
        if not self._has_recorded:  # later nets: while they serve, size by size
            replica.record_steps(self._net, welcome.config, check=self.check)
            self._has_recorded = True
        self._is_formed = True
        generation = welcome.topology.generation
        self._control.send(
            Ready(
                role="attention",
                index=self._index,
                num_blocks=replica.num_blocks,
                load_s=load_s,
                generation=generation,
            )
        )
        self._logger.info(
            "attention %d ready (generation %d, %.1f s)", self._index, generation, load_s
        )

    def check(self) -> None:
        """Called during long waits: say that this is one, and look whether it is still wanted."""
        self._progress.waiting()
        self.inbox.check()

    def _disband(self, replica: Replica) -> None:
        """Leave the generation: its memory is not used again."""
        net, self._net = self._net, None
        self._is_formed = False
        try:
            if net is not None:
                net.close()  # ends what a device waits for
        finally:
            replica.discard()
            self._progress.end()

    def _run_next(self, replica: Replica, welcome: Welcome) -> None:
        """Handle what comes next: a message, or the end of a step that was launched."""
        may_fail = welcome.config.restart
        if replica.head is None:
            self._handle(self.inbox.next(), replica, welcome)
        elif replica.is_done:
            self._answer(replica, may_fail=may_fail)
        elif self._is_wanted(replica, may_fail=may_fail) and replica.num_launched < MAX_LAUNCHED:
            # It runs: look whether the next one is there, and do not sleep, for it ends soon.
            message = self.inbox.next(0.0)
            if message is not None:
                self._handle(message, replica, welcome)

    def _is_wanted(self, replica: Replica, *, may_fail: bool) -> bool:
        """Look whether the step under way still makes sense; else it is given up."""
        assert replica.head is not None
        try:
            if isinstance(self._net, Checked):
                self._net.check()
            self.inbox.check()
        except Interrupted:
            self._disband(replica)  # the message that says why is next
        except Exception as error:
            self._give_up(replica, replica.head, error, may_fail=may_fail)
        return replica.head is not None

    def _handle(self, message: AnyMessage | None, replica: Replica, welcome: Welcome) -> None:
        if isinstance(message, StepPlan):
            if self._is_formed:  # else it was sent before the scheduler knew of a failed step
                self._launch(replica, message, may_fail=welcome.config.restart)
        elif isinstance(message, PrepareTable):
            if self._net is not None:  # else a Reform is on its way, with a table of its own
                self._net.set_table(message.table)
                version = message.table.version
                self._control.send(
                    TablePrepared(role="attention", index=self._index, version=version)
                )
        elif isinstance(message, Halt) and self._can_reform:
            self._disband(replica)
            self._control.send(
                Halted(role="attention", index=self._index, generation=message.generation)
            )
        elif isinstance(message, Reform):
            self._reform(replica, welcome, message.topology)
        else:
            raise ProtocolError(f"expected StepPlan, got {type(message).__name__}")

    def _launch(self, replica: Replica, plan: StepPlan, *, may_fail: bool) -> None:
        """Begin a step, behind one that runs; answer it too unless it goes on by itself.

        If the net fails and the engine can reform, leave and wait for that.
        """
        if replica.head is None:
            self._progress.begin(plan.ticket)
        try:
            replica.launch(plan, self._net, index=self._index, beat=self._progress.beat)
        except Exception as error:
            # The step before it is whole, or it is the one that has failed.
            if replica.head is not None:
                self._answer(replica, may_fail=may_fail)
            if self._is_formed:
                self._give_up(replica, plan.ticket, error, may_fail=may_fail)
            return
        if not replica.runs_ahead(self._net):
            self._answer(replica, may_fail=may_fail)

    def _answer(self, replica: Replica, *, may_fail: bool) -> None:
        """Wait for the oldest step that was launched and send its result."""
        ticket = replica.head
        assert ticket is not None
        try:
            result = replica.collect()
        except Exception as error:
            self._give_up(replica, ticket, error, may_fail=may_fail)
            return
        self._control.send(result)
        if replica.head is not None:
            self._progress.begin(replica.head)
        else:
            self._progress.end()

    def _give_up(
        self, replica: Replica, ticket: StepTicket, error: Exception, *, may_fail: bool
    ) -> None:
        """Say that a step has failed; what was launched behind it is not wanted either."""
        self._control.send(step_failed(ticket, "attention", self._index, error))
        if not (may_fail and self._can_reform and isinstance(error, TransportError)):
            raise error
        self._logger.warning("attention %d: step %d: %s", self._index, ticket.step, error)
        self._disband(replica)

    def _reform(self, replica: Replica, welcome: Welcome, topology: Topology) -> None:
        """Take part in a new generation; if that fails, say so and wait for the next one."""
        self._disband(replica)
        started = time.monotonic()
        renewed = msgspec.structs.replace(welcome, topology=topology)
        try:
            self._form(replica, renewed, load_s=time.monotonic() - started)
        except Interrupted:
            self._disband(replica)
        except TransportError as error:
            self._disband(replica)
            self._control.send(reform_failed(topology, "attention", self._index, error))
