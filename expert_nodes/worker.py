"""The expert node: gather rows, compute the experts, reply.

Owns the order in which (layer, micro-batch) are served and the node's life: listen,
join, load, connect, warm up, serve tickets, halt and connect anew when the engine reforms,
stop. Runs in the process's one busy thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from expert_nodes.experts import Experts
from expert_nodes.memory import batch_bytes, lacking
from expert_nodes.tables import TableChange
from expert_nodes.ticket_graphs import TicketGraphs
from kernels.dispatch import Ops, select_ops
from kernels.runtime import Runtime, open_runtime
from m2n_comm.gpu.staged import StagedExpertNet
from m2n_comm.net import ExpertNet, NetShape, wait_policy
from m2n_comm.open import Between, ExpertListener, listen_expert
from models.checkpoint import Checkpoint
from models.config import ModelConfig, load_model_config
from models.weights import stream_expert_weights
from topspin import __version__
from topspin.channel import ControlClient
from topspin.config import NodeConfig
from topspin.devices import TRITON
from topspin.errors import ConfigError, Interrupted, ProtocolError, TransportError
from topspin.inbox import Inbox
from topspin.messages import (
    ExpertCounts,
    Halt,
    Halted,
    Hello,
    Loaded,
    PrepareTable,
    Ready,
    Reform,
    StepTicket,
    Topology,
    Welcome,
)
from topspin.node_life import join, reform_failed, step_failed
from topspin.process import new_incarnation, release_freed_memory
from topspin.progress import Beat, StepProgress
from topspin.trace_node import ring_of

COUNTS_INTERVAL_S = 1.0
# Others may load for as long as their checkpoint takes; the scheduler ends the wait if one of
# them is lost (Inbox.check).
CONNECT_TIMEOUT_S = 3600.0
_WAYS_OUT = "more --expert-nodes on other GPUs, --quantization, or --expert-device cpu"


def run_ticket(
    net: ExpertNet,
    experts: Experts,
    ticket: StepTicket,
    *,
    beat: Beat | None = None,
    graphs: TicketGraphs | None = None,
) -> None:
    """Serve one step: every micro-batch of every MoE layer, in that order.

    `beat` is called at every batch. With `graphs` all of it may be a recording.
    """

    def serve() -> None:
        for layer in range(experts.num_layers):
            for micro_batch in range(ticket.num_micro_batches):
                for batch in net.gather(micro_batch, layer):
                    if beat is not None:
                        beat()
                    net.reply(batch, experts.compute(batch))

    net.trace = experts.trace
    net.begin(ticket)
    if graphs is None:
        serve()
    else:
        graphs.serve(net, ticket, serve)
    net.finish()


def load_experts(
    model_path: Path, welcome: Welcome, index: int, *, runtime: Runtime | None = None
) -> Experts:
    """Read and pack the experts that the table gives to node `index`, and warm them up.

    They go to the device of `runtime` (None: the one that the configuration names). Raises
    ConfigError if there is no such device, or if it is too small: before anything is read, or
    when even so its memory does not suffice.
    """
    config = welcome.config
    model = load_model_config(model_path)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if config.compute.num_threads is not None:
        torch.set_num_threads(config.compute.num_threads)
    place = config.compute.place("expert")
    ops = select_ops(place.kernels, dtype, config.model.quantization, device=place.device)
    runtime = runtime or open_runtime(place.device)
    held = welcome.table.experts_of(index)
    _check_memory(runtime, ops, model, config, held=held, index=index)
    try:
        experts = Experts(
            model,
            stream_expert_weights(
                Checkpoint(model_path), model, dtype=dtype, experts=held, device=runtime.device
            ),
            ops,
            held=held,
            version=welcome.table.version,
            per_pair_answers=config.compute.deterministic,
            runtime=runtime,
            # On a device they cost a launch per layer; with one node nothing can be balanced.
            counts=not (place.is_device and config.topology.expert_nodes == 1),
        )
        experts.warm_up(warm_up_rows(config) if runtime.is_asynchronous else (1,))
    except torch.OutOfMemoryError as error:
        # The sizes fit: others took memory meanwhile, or it is in pieces.
        raise ConfigError(f"expert node {index}: {error}; use {_WAYS_OUT}") from error
    experts.trace = ring_of(config)
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
        sum(len(experts) for experts in held),
        ops=ops,
        model=model,
        dtype=getattr(torch, config.model.dtype),
        batches=batch_bytes(config, shape),
    )
    if numbers is not None:
        raise ConfigError(f"expert node {index}: {numbers}; use {_WAYS_OUT}")


def warm_up_rows(config: NodeConfig) -> tuple[int, ...]:
    """Return the numbers of rows for which kernels differ, up to the largest batch."""
    most = config.max_num_batched_tokens
    if config.m2n.transport != "local":
        most = min(most, config.m2n.rows_per_window) * config.topology.attention_nodes
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)


class ExpertWorker:
    """One expert node on one control connection.

    Invariant: `_net` is usable exactly while the node takes part in the engine's generation.
    """

    def __init__(self, control: ControlClient, *, index: int, model_path: Path) -> None:
        self._control = control
        self._inbox = Inbox(control)
        self._progress = StepProgress(control, role="expert", index=index)
        self._incarnation = new_incarnation()
        self._net: ExpertNet | None = None
        self._change: TableChange | None = None
        self._graphs: TicketGraphs | None = None
        self._index = index
        self._model_path = model_path
        self._logger = logging.getLogger("expert")
        self._counts_sent_at = time.monotonic()

    def run(self, transport: Between) -> None:
        """Join, serve until told to stop; raises Stopped, or what went wrong."""
        listener = listen_expert(transport)
        try:
            welcome = join(
                self._control,
                Hello(
                    role="expert",
                    index=self._index,
                    incarnation=self._incarnation,
                    revision=__version__,
                    fingerprint=Checkpoint(self._model_path).fingerprint(),
                    data_address=listener.address,
                    pid=os.getpid(),
                ),
            )
            self._serve(listener, welcome)
        finally:
            listener.close()

    @torch.inference_mode()
    def _serve(self, listener: ExpertListener, welcome: Welcome) -> None:
        started = time.monotonic()
        experts = load_experts(self._model_path, welcome, self._index)
        self._inbox.trace = experts.trace
        compute = welcome.config.compute
        # Other kernels may wait for the device.
        if compute.cuda_graphs and compute.place("expert").kernels == TRITON:
            self._graphs = TicketGraphs(experts.runtime)
        load_s = time.monotonic() - started
        self._change = TableChange(
            experts, model_path=self._model_path, config=welcome.config, index=self._index
        )
        try:
            if welcome.joins_late:
                self._control.send(Loaded(role="expert", index=self._index, load_s=load_s))
            else:
                self._form(listener, experts, welcome, load_s=load_s)
            while True:
                welcome = self._run_next(listener, experts, welcome)
        finally:
            self._disband()

    def _form(
        self, listener: ExpertListener, experts: Experts, welcome: Welcome, *, load_s: float
    ) -> None:
        """Accept the attention nodes of the topology and report ready."""
        topology = welcome.topology
        self._open_net(listener, experts, welcome)
        self._control.send(
            Ready(role="expert", index=self._index, load_s=load_s, generation=topology.generation)
        )
        self._logger.info(
            "expert %d ready (generation %d, %.1f s)", self._index, topology.generation, load_s
        )

    def _open_net(self, listener: ExpertListener, experts: Experts, welcome: Welcome) -> None:
        """Accept the attention nodes; experts on a device get their rows there."""
        config, topology, runtime = welcome.config, welcome.topology, experts.runtime
        shape = experts.net_shape(config)
        is_ipc = config.m2n.transport == "cuda_ipc"
        accept: Callable[..., ExpertNet] = (
            partial(listener.accept_device, runtime=runtime)
            if is_ipc
            else partial(listener.accept, wait=wait_policy(config))
        )
        self._net = accept(
            shape,
            index=self._index,
            incarnation=self._incarnation,
            attention_incarnations=topology.attention_incarnations,
            timeout_s=CONNECT_TIMEOUT_S,
            table=topology.table,
            generation=topology.generation,
            check=self._check,
            reuse=config.restart,
        )
        if config.compute.place("expert").is_device and not is_ipc:
            count = len(topology.attention_incarnations)
            self._net = StagedExpertNet(self._net, runtime, shape=shape, num_attention=count)

    def _check(self) -> None:
        """Called during long waits: say that this is one, and look whether it is still wanted."""
        self._progress.waiting()
        self._inbox.check()

    def _disband(self) -> None:
        """Leave the generation: its memory is not used again."""
        net, self._net = self._net, None
        if self._change is not None:
            self._change.cancel()
        if self._graphs is not None:
            self._graphs.clear()
        if net is not None:
            net.close()

    def _run_next(self, listener: ExpertListener, experts: Experts, welcome: Welcome) -> Welcome:
        """Handle the next message; returns the Welcome that holds from now on."""
        assert self._change is not None
        owes_news = experts.has_counts or self._progress.owes_end
        timeout_s = COUNTS_INTERVAL_S if owes_news else None
        message = self._inbox.next(0 if self._change.is_busy else timeout_s)
        if message is None:
            self._progress.idle()
            if self._change.is_busy:
                self._work(self._change)
            else:
                self._report_counts(experts)
        elif isinstance(message, StepTicket):
            if self._net is not None:  # else it was sent before the scheduler knew of a failure
                self._run_step(self._net, experts, message, may_fail=welcome.config.restart)
            if time.monotonic() - self._counts_sent_at > COUNTS_INTERVAL_S:
                self._report_counts(experts)
            if self._change.is_busy:
                self._work(self._change)
        elif isinstance(message, PrepareTable):
            if self._net is not None:  # else a Reform is on its way, with a table of its own
                self._net.set_table(message.table)
                self._change.start(message.table)
        elif isinstance(message, Halt):
            self._disband()
            self._control.send(
                Halted(role="expert", index=self._index, generation=message.generation)
            )
        elif isinstance(message, Reform):
            return self._reform(listener, experts, welcome, message.topology)
        else:
            raise ProtocolError(f"expected StepTicket, got {type(message).__name__}")
        return welcome

    def _run_step(
        self, net: ExpertNet, experts: Experts, ticket: StepTicket, *, may_fail: bool
    ) -> None:
        """Serve a step; if the net fails and the engine can reform, leave and wait for that."""
        try:
            self._progress.begin(ticket)
            run_ticket(net, experts, ticket, beat=self._progress.beat, graphs=self._graphs)
        except Exception as error:
            self._control.send(step_failed(ticket, "expert", self._index, error))
            if not (may_fail and isinstance(error, TransportError)):
                raise
            self._logger.warning("expert %d: step %d: %s", self._index, ticket.step, error)
        else:
            return
        finally:
            self._progress.end()
        self._disband()

    def _reform(
        self, listener: ExpertListener, experts: Experts, welcome: Welcome, topology: Topology
    ) -> Welcome:
        """Take part in a new generation; if that fails, say so and wait for the next one."""
        self._disband()
        experts.rename(topology.table.version, tuple(topology.table.experts_of(self._index)))
        renewed = msgspec.structs.replace(welcome, topology=topology)
        try:
            self._form(listener, experts, renewed, load_s=0.0)
        except Interrupted:
            self._disband()
        except TransportError as error:
            self._disband()
            self._control.send(reform_failed(topology, "expert", self._index, error))
        return renewed

    def _work(self, change: TableChange) -> None:
        """Do a piece of the next table's preparation."""
        answer = change.work()
        if answer is not None:
            self._control.send(answer)
            if not answer.refusal:
                self._logger.info("expert %d: table %d is prepared", self._index, answer.version)

    def _report_counts(self, experts: Experts) -> None:
        self._counts_sent_at = time.monotonic()
        for version, counts in experts.take_counts():
            self._control.send(
                ExpertCounts(index=self._index, table_version=version, counts=counts)
            )
