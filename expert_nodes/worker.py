"""The expert node: gather rows, compute the experts, reply.

Owns the order in which (layer, micro-batch) are served, the reports of counts and the times of
work on the next expert table; the node's life is topspin.processes.node_life's. The net is opened
by a callable. Runs in the process's one busy thread, or in a thread beside the attention nodes.
On a device a ticket's work, every layer from gather to reply, is recorded: the recording serves
tickets of as many attention nodes, of the same row buckets and of the same expert table; kernels
read all else from memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from expert_nodes.experts import Experts
from expert_nodes.memory import batch_bytes, lacking
from expert_nodes.tables import TableChange
from kernels.dispatch import Ops, select_ops
from kernels.experts.layers import rows_to_warm_up
from kernels.recordings import Recordings
from kernels.runtime import Runtime, open_runtime
from m2n_comm.net import ExpertNet, NetShape
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weights import ExpertStream, stream_expert_weights
from models.description.config import ModelConfig, load_model_config
from topspin.devices import CPU, TRITON
from topspin.errors import ConfigError, EngineError, ProtocolError
from topspin.expert_table import ExpertTable
from topspin.messages import AnyMessage, ExpertCounts, PrepareTable, StepTicket, Welcome
from topspin.plan.precision import format_of, formats
from topspin.plan.spec import NodeConfig
from topspin.process import release_freed_memory
from topspin.processes.channel import ControlClient
from topspin.processes.node_life import CacheSize, NodeLife
from topspin.processes.progress import Beat
from topspin.processes.trace_node import ring_of

MAX_TICKETS: Final = 64
"""Recordings that a node keeps: decode steps of a few micro-batches have fewer shapes."""


class TicketShape(NamedTuple):
    """The key of a recording; `row_buckets` has one per micro-batch."""

    num_participants: int
    row_buckets: tuple[int, ...]


class TicketGraphs:
    """The recordings of one node, for the net, epoch and expert table of the last serve().

    Those of an earlier table are dropped: they would keep experts that have left this node.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._recordings: Recordings[TicketShape] = Recordings(runtime, MAX_TICKETS)

    def __len__(self) -> int:
        return len(self._recordings)

    def serve(self, net: ExpertNet, ticket: StepTicket, body: Callable[[], None]) -> None:
        """Enqueue the work of `body` with `net` for `ticket`, which the net has begun."""
        if not net.is_graph_safe:
            body()
            return
        shape = TicketShape(len(ticket.participants), ticket.row_buckets)
        self._recordings.run(shape, body, (net, net.epoch, ticket.table_version))

    def clear(self) -> None:
        """Forget all recordings: the net that they use is to be closed."""
        self._recordings.clear()


COUNTS_INTERVAL_S = 1.0
_WAYS_OUT = "more --expert-nodes on other GPUs, --quantization, or --expert-device cpu"


def run_ticket(
    net: ExpertNet,
    experts: Experts,
    ticket: StepTicket,
    *,
    beat: Beat | None = None,
    graphs: TicketGraphs | None = None,
) -> None:
    """Serve one step: every micro-batch of every MoE layer that is not local, in that order.

    `beat` is called at every batch. With `graphs` the step may be recorded and replayed.
    """

    def serve() -> None:
        for layer in layers:
            for micro_batch in range(ticket.num_micro_batches):
                for batch in net.gather(micro_batch, layer):
                    if beat is not None:
                        beat()
                    net.reply(batch, experts.compute(batch))

    net.trace = experts.runtime.stamps_of(experts.trace)
    net.begin(ticket)
    layers = [layer for layer in range(experts.num_layers) if layer not in net.local]
    if graphs is None or not layers:
        serve()
    else:
        graphs.serve(net, ticket, serve)
    net.finish()


def _without_holes(layers: Iterable[ExpertStream]) -> Iterator[ExpertStream]:
    """Yield the layers; what packing one has freed is given back before the next is read."""
    for layer in layers:
        yield layer
        release_freed_memory()


def load_experts(
    model_path: Path, welcome: Welcome, index: int, *, runtime: Runtime | None = None
) -> Experts:
    """Read and pack the experts that the table gives to node `index`, and warm them up.

    They go to the device of `runtime` (None: the configured one). Raises ConfigError if there is
    no such device, or if its memory is too small: before anything is read, or while loading.
    """
    config = welcome.config
    model = load_model_config(model_path, config.model.hf_overrides)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if config.node.num_threads is not None:
        torch.set_num_threads(config.node.num_threads)
    place = config.node.place
    ops = select_ops(place.kernels, dtype, formats(config.precision, "expert"), device=place.device)
    runtime = runtime or open_runtime(place.device, place.kernels)
    if config.execution.recordings:
        runtime.prepare_capture()
    held = welcome.table.experts_of(index)
    _check_memory(runtime, ops, model, config, held=held, index=index)
    try:
        experts = Experts(
            model,
            _without_holes(
                stream_expert_weights(
                    Checkpoint(model_path),
                    model,
                    dtype=dtype,
                    experts=held,
                    device=runtime.device,
                    precision=config.precision,
                )
            ),
            ops,
            held=held,
            version=welcome.table.version,
            per_expert_answers=config.execution.deterministic,
            runtime=runtime,
            # Counting costs a launch per layer on a device; one node alone needs no balancing.
            counts=not (place.is_device and config.num_experts == 1),
            precision=config.precision,
        )
        experts.warm_up(warm_up_rows(config) if runtime.is_asynchronous else (1,))
    except torch.OutOfMemoryError as error:
        # The sizes fit: other processes took memory meanwhile, or it is fragmented.
        raise ConfigError(f"expert node {index}: {error}; use {_WAYS_OUT}") from error
    experts.trace = ring_of(config)
    if config.node.slow > 1:
        # Compiled, with a package that hosts with a GPU may lack.
        from kernels.cpu.compiled.slowdown import Slowdown

        experts.slowdown = Slowdown(config.node.slow)
    release_freed_memory()
    return experts


def _check_memory(
    runtime: Runtime,
    ops: Ops,
    model: ModelConfig,
    config: NodeConfig,
    *,
    held: Sequence[Sequence[int]],
    index: int,
) -> None:
    """Raise ConfigError, with the numbers, if experts `held` and their rows do not fit."""
    assert model.moe is not None
    shape = NetShape.from_config(
        config,
        hidden_size=model.hidden_size,
        top_k=model.moe.top_k,
        num_layers=len(model.moe_layers),
    )
    numbers = lacking(
        runtime,
        [
            format_of(config.precision, "experts", layer, expert)
            for layer, experts in zip(model.moe_layers, held, strict=True)
            for expert in experts
        ],
        ops=ops,
        model=model,
        dtype=getattr(torch, config.model.dtype),
        batches=batch_bytes(config, shape),
    )
    if numbers is not None:
        raise ConfigError(f"expert node {index}: {numbers}; use {_WAYS_OUT}")


def graphs_of(config: NodeConfig, experts: Experts) -> TicketGraphs | None:
    """Return what records this node's tickets, None if nothing does."""
    # Other kernels of a device may wait for it.
    is_able = config.node.kernels in (TRITON, CPU)
    return TicketGraphs(experts.runtime) if config.execution.recordings and is_able else None


def warm_up_rows(config: NodeConfig) -> tuple[int, ...]:
    """Return numbers of rows that cover all kernel variants, up to the largest batch."""
    return rows_to_warm_up(config.batch_rows)


class InlineNet:
    """The net of an expert node whose tickets are served by attention nodes of its process."""

    def __init__(self, set_table: Callable[[ExpertTable], None]) -> None:
        self.set_table = set_table

    def close(self) -> None:
        """Leave; the attention nodes close their own nets."""


OpenNet = Callable[[Welcome, Experts, NodeLife], ExpertNet | InlineNet]


class ExpertWorker:
    """One expert node; implements topspin.processes.node_life.Worker.

    Invariant: `_net` is usable exactly while the node takes part in the engine's generation.
    With an InlineNet other threads compute: then counts are polled without tickets, and each
    piece of work on another table is followed by a pause of `pause_s`.
    """

    def __init__(
        self,
        control: ControlClient,
        *,
        index: int,
        model_path: Path,
        open_net: OpenNet,
        load: Callable[[Welcome], Experts] | None = None,
        pause_s: float = 0.0,
        can_reform: bool = True,
    ) -> None:
        """`load` returns the experts of this node (None: load_experts())."""
        self._life = NodeLife(control, role="expert", index=index, can_reform=can_reform)
        self._net: ExpertNet | InlineNet | None = None
        self._experts: Experts | None = None
        self._change: TableChange | None = None
        self._graphs: TicketGraphs | None = None
        self._index = index
        self._model_path = model_path
        self._open_net = open_net
        self._load = load or (lambda welcome: load_experts(model_path, welcome, index))
        self._pause_s = pause_s
        self._logger = logging.getLogger("expert")
        self._counts_sent_s = time.monotonic()
        self._busy_sent_s = 0.0
        self._slow = 1.0

    @torch.inference_mode()
    def serve(self, data_address: str) -> None:
        """Join, serve until told to stop; raises Stopped, or an error."""
        self._life.introduce(Checkpoint(self._model_path), data_address)
        self._life.serve(self)

    def load(self, welcome: Welcome) -> CacheSize:
        experts = self._experts = self._load(welcome)
        self._life.inbox.trace = experts.trace
        config = welcome.config
        self._slow = config.node.slow
        self._graphs = graphs_of(config, experts)
        self._change = TableChange(
            experts,
            model_path=self._model_path,
            config=welcome.config,
            index=self._index,
            check=self._life.check_checkpoint,
        )
        return CacheSize()

    @property
    def experts(self) -> Experts:
        """Return the experts, which load() read."""
        assert self._experts is not None, "load() first"
        return self._experts

    @property
    def change(self) -> TableChange:
        """Return the change of the expert table that is under way, if any."""
        assert self._change is not None, "load() first"
        return self._change

    def form(self, welcome: Welcome) -> None:
        table = welcome.table
        held = tuple(table.experts_of(self._index))
        if not self.experts.holds(held):
            self._read(table)
        self.experts.rename(table.version, held)
        self._net = self._open_net(welcome, self.experts, self._life)
        self._busy_sent_s = 0.0

    def _read(self, table: ExpertTable) -> None:
        """Read the experts of another scheduler's table that this node does not hold."""
        self.experts.keep_newest()
        self.change.start(table)
        while (answer := self.change.work()) is None:
            self._life.check()
        if answer.refusal:
            raise EngineError(f"expert {self._index} cannot take its table: {answer.refusal}")
        self._logger.info("expert %d: has read the experts of its new table", self._index)

    def disband(self) -> None:
        net, self._net = self._net, None
        self.change.cancel()
        if self._graphs is not None:
            self._graphs.clear()
        if net is not None:
            net.close()
        # Another scheduler would not know the table by which they were counted.
        self._report_counts()

    def wait_s(self) -> float | None:
        if self.change.is_busy:
            return self._pause_s
        owes_news = self.experts.has_counts or self._life.progress.owes_end
        return COUNTS_INTERVAL_S if owes_news or isinstance(self._net, InlineNet) else None

    def idle(self) -> None:
        self._life.progress.idle()
        if self.change.is_busy:
            self._work()
            self._report_counts_if_due()
        else:
            self._report_counts()

    def handle(self, message: AnyMessage) -> None:
        net = self._net
        if isinstance(message, StepTicket) and not isinstance(net, InlineNet):
            if net is not None:  # else it was sent before the scheduler knew of a failure
                self._run_step(net, message)
            self._report_counts_if_due()
            if self.change.is_busy:
                self._work()
        elif isinstance(message, PrepareTable):
            if net is not None:  # else a Reform follows, which brings a table
                net.set_table(message.table)
                self.change.start(message.table)
        else:
            raise ProtocolError(f"expected StepTicket, got {type(message).__name__}")

    def _run_step(self, net: ExpertNet, ticket: StepTicket) -> None:
        """Serve a step; if the net fails and the engine can reform, leave and wait for that."""
        progress = self._life.progress
        try:
            progress.begin(ticket)
            run_ticket(net, self.experts, ticket, beat=progress.beat, graphs=self._graphs)
        except Exception as error:
            self._life.report_failure(ticket, error)
            self.disband()
        finally:
            progress.end()

    def _work(self) -> None:
        """Do a piece of the next table's preparation."""
        answer = self.change.work()
        if answer is not None:
            self._life.send(answer)
            if not answer.refusal:
                self._logger.info("expert %d: table %d is prepared", self._index, answer.version)

    def _report_counts_if_due(self) -> None:
        if time.monotonic() - self._counts_sent_s > COUNTS_INTERVAL_S:
            self._report_counts()

    def _report_counts(self) -> None:
        self._counts_sent_s = time.monotonic()
        taken = self.experts.take_counts()
        compute_s = self._take_busy_s() if taken else 0.0
        for found in taken:
            self._life.send(
                ExpertCounts(
                    index=self._index,
                    table_version=found.version,
                    counts=found.counts,
                    activations=found.activations,
                    batches=found.batches,
                    # Of all versions; there are two only when the table has just changed.
                    compute_s=compute_s if found is taken[-1] else 0.0,
                )
            )

    def _take_busy_s(self) -> float:
        """Return the seconds of computing since the last call, as far as the net measures them.

        A device that is emulated takes `slow` times as long.
        """
        if self._net is None or isinstance(self._net, InlineNet):
            return 0.0
        busy_s, sent_s = self._net.busy_s, self._busy_sent_s
        self._busy_sent_s = busy_s
        return self._slow * (busy_s - sent_s)
