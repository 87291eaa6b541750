"""The stage worker: take the plans of an attention node, run some of its layers.

Owns one step's course; the node's life is topspin.processes.node_life's. Results are the attention
node's to report: a stage says only that it works, waits or is done. Runs in the process's one busy
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from attention_nodes.stages.relay import StageLinkEnd
from attention_nodes.stages.runner import StageRunner, load_stage
from m2n_comm.net import AttentionNet
from models.checkpoints.checkpoint import Checkpoint
from topspin.errors import ProtocolError
from topspin.messages import AnyMessage, PrepareTable, StepPlan, TablePrepared, Welcome
from topspin.processes.channel import ControlClient
from topspin.processes.node_life import CacheSize, NodeLife
from topspin.processes.progress import INTERVAL_S

OpenNet = Callable[[Welcome, StageRunner, NodeLife], AttentionNet]
OpenLink = Callable[[Welcome, StageRunner, NodeLife], StageLinkEnd]


class StageWorker:
    """One stage; implements topspin.processes.node_life.Worker.

    Invariant: `_link`, and `_net` of a model with routed experts, are usable exactly while the
    stage takes part in the engine's generation.
    """

    def __init__(
        self,
        control: ControlClient,
        *,
        index: int,
        model_path: Path,
        open_net: OpenNet,
        open_link: OpenLink,
    ) -> None:
        self._life = NodeLife(control, role="stage", index=index)
        self._index = index
        self._model_path = model_path
        self._open_net = open_net
        self._open_link = open_link
        self._runner: StageRunner | None = None
        self._of = 0
        self._net: AttentionNet | None = None
        self._link: StageLinkEnd | None = None

    @torch.inference_mode()
    def serve(self, data_address: str) -> None:
        """Join, serve until told to stop; raises Stopped, or an error."""
        self._life.introduce(Checkpoint(self._model_path), data_address)
        self._life.serve(self)

    def load(self, welcome: Welcome) -> CacheSize:
        runner = self._runner = load_stage(self._model_path, welcome.config)
        self._of = welcome.config.stage.of
        self._life.inbox.trace = runner.trace
        return CacheSize(runner.num_blocks, runner.num_blocks)

    @property
    def runner(self) -> StageRunner:
        """Return the runner, which load() made."""
        assert self._runner is not None, "load() first"
        return self._runner

    def form(self, welcome: Welcome) -> None:
        if any(peer is not None for peer in welcome.topology.experts):
            self._net = self._open_net(welcome, self.runner, self._life)
        self._link = self._open_link(welcome, self.runner, self._life)

    def disband(self) -> None:
        net, self._net = self._net, None
        link, self._link = self._link, None
        try:
            if net is not None:
                net.close()
        finally:
            if link is not None:
                link.close()
            if self._runner is not None:
                self._runner.forget()
            self._life.progress.end()

    def wait_s(self) -> float | None:
        return INTERVAL_S if self._life.progress.owes_end else None

    def idle(self) -> None:
        self._life.progress.idle()

    def handle(self, message: AnyMessage) -> None:
        if isinstance(message, StepPlan):
            if self._link is not None:  # else it was sent before the scheduler knew of a failure
                self._run_step(self._link, message)
        elif isinstance(message, PrepareTable):
            if self._link is None:
                return  # a Reform follows, which brings a table
            if self._net is not None:
                self._net.set_table(message.table)
            version = message.table.version
            self._life.send(TablePrepared(role="stage", index=self._index, version=version))
        else:
            raise ProtocolError(f"expected StepPlan, got {type(message).__name__}")

    def _run_step(self, link: StageLinkEnd, plan: StepPlan) -> None:
        """Run a step; if a line fails and the engine can reform, leave and wait for that."""
        progress = self._life.progress
        try:
            progress.begin(plan.ticket)
            self.runner.run(plan, self._net, link, of=self._of, beat=progress.beat)
        except Exception as error:
            self._life.report_failure(plan.ticket, error)
            self.disband()
        finally:
            progress.end()
