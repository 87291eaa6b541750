"""The attention node: take a plan, run the rally, sample, report.

Owns one step's course; the node's life is topspin.processes.node_life's. The net is opened by a
callable, so that the same worker runs alone in its process (shm, tcp, ...) or beside the experts
(local). Runs in the process's one busy thread.

On a GPU a launched step runs without the host: meanwhile the thread polls for the next plan and
launches it, then for the end of the first step, whose result is sent at once. Results are sent
in order. When a generation ends, the node waits for the device, then drops the launched steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from attention_nodes.grammars.processes import Grammars
from attention_nodes.loading import OpenDryNet, load_runner
from attention_nodes.stages.relay import Relay
from attention_nodes.step.launched import check_of
from attention_nodes.step.model_runner import MAX_LAUNCHED, ModelRunner
from m2n_comm.net import AttentionNet
from models.checkpoints.checkpoint import Checkpoint
from models.description.config import load_model_config
from spec_decode.draft import Drafter
from spec_decode.suffix import drafter_of
from topspin.errors import Interrupted, ProtocolError
from topspin.messages import (
    AnyMessage,
    CompileGrammar,
    GrammarLost,
    GrammarReady,
    PrepareTable,
    ReleaseGrammar,
    StepPlan,
    StepTicket,
    TablePrepared,
    Welcome,
)
from topspin.plan.spec import NodeConfig
from topspin.processes.channel import ControlClient
from topspin.processes.node_life import CacheSize, NodeLife

# How often a node without work looks whether a grammar is compiled.
COMPILE_POLL_S = 0.001

OpenNet = Callable[[Welcome, ModelRunner, NodeLife], AttentionNet]
OpenRelay = Callable[[Welcome, ModelRunner, NodeLife], Relay]
DryNet = Callable[[Welcome], OpenDryNet | None]
MakeDrafter = Callable[[NodeConfig, Path], Drafter | None]
"""Returns what drafts for a node of the model in a directory; None: nothing does."""


def text_drafter(config: NodeConfig, model_path: Path) -> Drafter | None:
    """Return the drafter of the methods that need no model."""
    return drafter_of(config.speculation)


class AttentionWorker:
    """One attention node; implements topspin.processes.node_life.Worker.

    Invariant: `_is_formed` says whether the node takes part in the engine's generation; then
    `_net` is usable (None: no expert node is there, and no layer needs one). `dry_net` gives the
    net to experts of this process for the dry run (see load_runner; None: there are none).
    `make_drafter` is called once, before the runner loads. `can_reform` as in NodeLife.
    """

    def __init__(
        self,
        control: ControlClient,
        *,
        index: int,
        model_path: Path,
        open_net: OpenNet,
        dry_net: DryNet = lambda welcome: None,
        make_drafter: MakeDrafter = text_drafter,
        can_reform: bool = True,
        open_relay: OpenRelay | None = None,
        expects_grammars: bool = False,
    ) -> None:
        """`open_relay` connects to the node's stages, if it has some.

        `expects_grammars`: reads the vocabulary for grammars at once, not for the first of them.
        """
        self._expects_grammars = expects_grammars
        self._open_relay = open_relay
        self._relay: Relay | None = None
        self._life = NodeLife(control, role="attention", index=index, can_reform=can_reform)
        self._net: AttentionNet | None = None
        self._runner: ModelRunner | None = None
        self._is_formed = False
        self._has_recorded = False
        self._index = index
        self._model_path = model_path
        self._open_net = open_net
        self._dry_net = dry_net
        self._make_drafter = make_drafter
        self._drafter: Drafter | None = None
        self._grammars: Grammars | None = None

    def introduce(self) -> None:
        """Say Hello."""
        self._life.introduce(Checkpoint(self._model_path))

    @torch.inference_mode()
    def serve(self) -> None:
        """After introduce(): join, then serve until told to stop; raises Stopped or an error."""
        try:
            self._life.serve(self)
        finally:
            if self._drafter is not None:
                self._drafter.close()
            if self._grammars is not None:
                self._grammars.close()
            if self._runner is not None:
                self._runner.close()

    def load(self, welcome: Welcome) -> CacheSize:
        self._drafter = self._make_drafter(welcome.config, self._model_path)
        model = load_model_config(self._model_path, welcome.config.model.hf_overrides)
        self._grammars = Grammars(
            self._model_path, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
        if self._expects_grammars:
            self._grammars.prepare()
        self._runner = load_runner(
            self._model_path,
            welcome.config,
            index=self._index,
            table_version=welcome.table.version,
            open_net=self._dry_net(welcome),
            drafter=self._drafter,
            grammars=self._grammars,
        )
        self._life.inbox.trace = self._runner.trace
        return CacheSize(self._runner.num_blocks, self._runner.num_frames)

    @property
    def runner(self) -> ModelRunner:
        """Return the model runner, which load() made."""
        assert self._runner is not None, "load() first"
        return self._runner

    def form(self, welcome: Welcome) -> None:
        runner = self.runner
        if any(peer is not None for peer in welcome.topology.experts):
            self._net = self._open_net(welcome, runner, self._life)
        if any(stage.of == self._index for stage in welcome.config.stages):
            assert self._open_relay is not None, "a plan has no stages of such nodes"
            self._relay = self._open_relay(welcome, runner, self._life)
            runner.use_relay(self._relay)
        if not self._has_recorded:  # later nets: while they serve, size by size
            runner.record_steps(self._net, welcome.config, check=self._life.check)
            self._has_recorded = True
        self._is_formed = True

    def disband(self) -> None:
        net, self._net = self._net, None
        relay, self._relay = self._relay, None
        self._is_formed = False
        if self._grammars is not None:
            self._grammars.release_all()
        try:
            if net is not None:
                net.close()  # ends a device's waits
            if relay is not None:
                relay.close()
        finally:
            self.runner.discard()
            self._life.progress.end()

    def wait_s(self) -> float | None:
        """Send results of steps and compilations that have ended.

        0 while a step runs, so that plans are polled.
        """
        assert self._grammars is not None
        for key, error, may_retry in self._grammars.take_compiled():
            self._life.send(
                GrammarReady(index=self._index, key=key, error=error, may_retry=may_retry)
            )
        for key, error in self._grammars.take_lost():
            self._life.send(GrammarLost(index=self._index, key=key, error=error))
        runner = self.runner
        while runner.head is not None:
            if runner.is_done:
                self._answer()
            elif self._is_wanted() and runner.num_launched < MAX_LAUNCHED:
                return 0.0  # the step ends soon: do not sleep
        return COMPILE_POLL_S if self._grammars.is_compiling else None

    def idle(self) -> None:
        pass

    def _is_wanted(self) -> bool:
        """Return whether the step under way is still wanted; if not, it is given up."""
        ticket = self.runner.head
        assert ticket is not None
        try:
            check = check_of(self._net)
            if check is not None:
                check()
            self._life.inbox.check()
        except Interrupted:
            self.disband()  # the message that says why is next
        except Exception as error:
            self._give_up(ticket, error)
        return self.runner.head is not None

    def handle(self, message: AnyMessage) -> None:
        if isinstance(message, StepPlan):
            if self._is_formed:  # else it was sent before the scheduler knew of a failed step
                self._launch(message)
        elif isinstance(message, CompileGrammar):
            assert self._grammars is not None
            self._grammars.start(message.key, message.grammar)
        elif isinstance(message, ReleaseGrammar):
            assert self._grammars is not None
            self._grammars.release(message.key)
        elif isinstance(message, PrepareTable):
            if self._net is not None:  # else a Reform follows, which brings a table
                self._net.set_table(message.table)
                version = message.table.version
                self._life.send(TablePrepared(role="attention", index=self._index, version=version))
        else:
            raise ProtocolError(f"expected StepPlan, got {type(message).__name__}")

    def _launch(self, plan: StepPlan) -> None:
        """Launch a step behind a running one; also collect it unless it runs without the host."""
        runner, progress = self.runner, self._life.progress
        if runner.head is None:
            progress.begin(plan.ticket)
        try:
            runner.launch(plan, self._net, index=self._index, beat=progress.beat)
        except Exception as error:
            # The step before it is complete, or it is the one that failed.
            if runner.head is not None:
                self._answer()
            if self._is_formed:
                self._give_up(plan.ticket, error)
            return
        if not runner.runs_ahead(self._net):
            self._answer()

    def _answer(self) -> None:
        """Wait for the oldest step that was launched and send its result."""
        runner, progress = self.runner, self._life.progress
        ticket = runner.head
        assert ticket is not None
        try:
            result = runner.collect()
        except Exception as error:
            self._give_up(ticket, error)
            return
        self._life.send(result)
        if runner.head is not None:
            progress.begin(runner.head)
        else:
            progress.end()

    def _give_up(self, ticket: StepTicket, error: Exception) -> None:
        """Report a failed step and leave; steps launched behind it are dropped."""
        self._life.report_failure(ticket, error)
        self.disband()
