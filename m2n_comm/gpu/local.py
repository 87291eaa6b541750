"""M2N within one device: attention and all expert nodes of one process on one GPU.

Implements AttentionNet. No frames and no windows: dispatch() turns logical experts into the slots
of each expert node, on the device, and enqueues the nodes' computing; combine() adds. The host
never reads a tensor, for any number of rows, so a graph can hold a whole step. Knows no weights:
`serves` are Experts.compute of the nodes, in node order. Called by attention_nodes.step.rally;
composed by app.launch.local_node and benchmarks.

On one device reading a second copy of an expert gains nothing: the first replica, in node order,
serves all.

On a GPU the flight recorder gets no stamps: the host only enqueues here, and the time of
enqueueing says nothing about the time of computing. On the host, where nothing is asynchronous,
combine() computes, and stamps for both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.runtime import Runtime
from m2n_comm.net import ExpertBatch, NetShape, NetTimes, Serve
from m2n_comm.rules import AttentionRules
from topspin.errors import ConfigError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.plan.spec import NodeConfig
from topspin.trace import Kind, Stamps

LocalSlots = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(experts i64[T, K], slot_of i32[N, E], num_rows i64[1] or None) -> slots i32[N, T, K]."""


def home_slots(table: ExpertTable) -> Tensor:
    """Return i32[L, N, E]: the slot of expert e on node n if n is its first home, else -1.

    Layers that are local have no homes.
    """
    num_layers = len(table.slots)
    slots = torch.full((num_layers, table.num_nodes, table.num_experts), -1, dtype=torch.int32)
    for layer in set(range(num_layers)).difference(table.local):
        for expert, replicas in enumerate(table.replicas(layer)):
            slots[layer, replicas[0].node, expert] = replicas[0].slot
    return slots


def local_slots(experts: Tensor, slot_of: Tensor, num_rows: Tensor | None) -> Tensor:
    """Return slots i32[N, T, K] of experts i64[T, K]; -1 for rows from num_rows[0] on."""
    size = experts.shape
    slots = slot_of.index_select(1, experts.reshape(-1)).view(len(slot_of), *size)
    if num_rows is None:
        return slots
    is_padding = torch.arange(size[0], device=experts.device) >= num_rows
    return slots.masked_fill(is_padding[None, :, None], -1)


class _Route(NamedTuple):
    """The version of an expert table, and its home_slots on the device."""

    version: int
    slot_of: Tensor


@dataclass(slots=True)
class _DeviceDispatch:
    """A dispatch that is not combined yet: its rows with their routing, and the nodes' answers.

    `partials` are empty if combine() computes them.
    """

    layer: int
    size: torch.Size
    rows: tuple[Tensor, Tensor, Tensor, Tensor | None]
    partials: list[Tensor]


class DeviceNet:
    """The attention side, including the complete expert side.

    Invariant: a flight exists exactly between a dispatch and its combine. Before the first
    begin() steps are routed by the table given at construction, so that a warm-up can run
    and record the first steps.
    """

    is_graph_safe: Final = True

    def __init__(
        self,
        runtime: Runtime,
        shape: NetShape,
        *,
        index: int,
        serves: Sequence[Serve],
        table: ExpertTable,
        slots: LocalSlots | None = None,
        traces: Sequence[Stamps | None] = (),
    ) -> None:
        """Compute with `serves`, one per node of `table`, as attention node `index`.

        `slots` turns experts into slots; None: the kernel on a GPU, torch on the host. `traces` get
        the stamps of the nodes, on the host. Raises ConfigError for settings that only make sense
        between processes, ProtocolError for a wrong table.
        """
        _check_shape(shape)
        self.shape = shape
        self.trace: Stamps | None = None
        self._runtime = runtime
        self._serves = tuple(serves)
        self._traces = traces or (None,) * len(self._serves)
        self._slots = slots or slots_on(runtime.device)
        self._rules: AttentionRules[_DeviceDispatch, _Route] = AttentionRules(
            index,
            shape,
            num_experts=len(self._serves),
            make_route=self._make_route,
            dtypes=(shape.payload, torch.int64, torch.float32),
        )
        self.epoch = 0
        self._route = self._rules.set_table(table)

    @property
    def local(self) -> frozenset[int]:
        """Return the MoE layers that attention nodes compute in this step."""
        return self._rules.local

    def set_table(self, table: ExpertTable) -> None:
        """Keep `table` for the steps whose tickets name its version; see m2n_comm.net.

        Raises ProtocolError if it does not fit.
        """
        self._rules.set_table(table)

    def _make_route(self, table: ExpertTable) -> _Route:
        return _Route(table.version, home_slots(table).to(self._runtime.device))

    def begin(self, ticket: StepTicket) -> None:
        """Open a step that this node takes part in; see m2n_comm.net.

        Raises ProtocolError if the ticket does not fit, or a dispatch is not combined.
        """
        route = self._rules.begin(ticket)
        if route is not self._route:
            # Recordings read the slots, and the weights, of the previous version.
            self.epoch += 1
            self._route = route
        for trace in self._traces:
            if trace is not None:
                trace.step = ticket.step
                trace.stamp(Kind.STEP_BEGAN)

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        num_rows: Tensor | None = None,
    ) -> None:
        """Enqueue the experts of hidden [T, H]: experts [T, K] int64 (logical), weights [T, K].

        See m2n_comm.net; the caller leaves the tensors as they are until combine(). Raises
        FrameError for tensors that do not fit. An error of the experts, here or in combine(), makes
        this net unusable.
        """
        with self._rules:
            assert self._rules.flights[micro_batch] is None, "combine() the last dispatch first"
            self._rules.check_rows(hidden, experts, weights)
            rows = (hidden, experts, weights, num_rows)
            partials: list[Tensor] = []
            if self._runtime.is_asynchronous:
                partials = self._serve(micro_batch, layer, *rows)
            self._rules.flights[micro_batch] = _DeviceDispatch(layer, hidden.shape, rows, partials)

    def _serve(
        self,
        micro_batch: int,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        num_rows: Tensor | None,
    ) -> list[Tensor]:
        """Enqueue, on the current stream, the work of every node on these rows."""
        slots = self._slots(experts, self._route.slot_of[layer], num_rows)
        partials = []
        for node, (serve, trace) in enumerate(zip(self._serves, self._traces, strict=True)):
            if trace is not None:
                trace.stamp(Kind.GATHERED, layer, micro_batch)
            batch = ExpertBatch(
                micro_batch=micro_batch,
                layer=layer,
                part=0,
                hidden=hidden,
                slots=slots[node],
                weights=weights,
                row_counts=(len(hidden),),
                table_version=self._route.version,
            )
            partials.append(serve(batch))
            if trace is not None:
                trace.stamp(Kind.COMPUTED, layer, micro_batch)
                trace.stamp(Kind.REPLIED, layer, micro_batch)
            if self.trace is not None and not self._runtime.is_asynchronous:
                self.trace.stamp(Kind.ARRIVED, layer, micro_batch, node)
        return partials

    def combine(self, micro_batch: int, layer: int, out: Tensor) -> Tensor:
        """Return the sum of all partials of that dispatch, [T, H].

        A single node's partial is returned as it is; those of several are added in fp32, in
        node order, in `out`. Raises FrameError for an `out` that does not fit.
        """
        with self._rules:
            flight = self._rules.flight(micro_batch, layer, out)
            partials = flight.partials or self._serve(micro_batch, layer, *flight.rows)
        self._rules.flights[micro_batch] = None
        first, *others = partials
        if others:
            out.copy_(first)
            for partial in others:
                out += partial
            first = out
        if self.trace is not None and not self._runtime.is_asynchronous:
            self.trace.stamp(Kind.COMBINED, layer, micro_batch)
        return first

    def wait_s(self) -> float:
        """Return 0: the host never waits here."""
        return 0.0

    def times(self) -> NetTimes:
        """Return empty times: the host only enqueues, so nothing is measured."""
        return NetTimes(wait_s=0.0, expert_s=0.0, link_s=None)

    def close(self) -> None:
        """Release all memory; safe to call twice."""
        self._rules.close()
        self._serves = ()


def takes_rows_of_host(config: NodeConfig, shape: NetShape) -> bool:
    """Return whether the nodes of one process on the host may use a DeviceNet.

    Several attention threads take turns at m2n_comm.host.local's hub, which also emulates links and
    changes the rows' form.
    """
    link = config.link
    return (
        config.num_attention == 1
        and not config.node.place.is_device
        and not (link.latency_us or link.gbps)
        and shape.compressed is None
        and not shape.per_expert_answers
        and shape.payload == shape.compute
    )


def _check_shape(shape: NetShape) -> None:
    """Raise ConfigError naming a flag that only makes sense between processes."""
    if shape.compressed is not None or shape.payload != (shape.compute or shape.payload):
        raise ConfigError(
            "--m2n-payload: attention and experts share one device, where nothing travels; leave "
            "it at auto"
        )
    if shape.per_expert_answers:
        raise ConfigError("--deterministic: not with attention and experts on one GPU")


def slots_on(device: torch.device) -> LocalSlots:
    """Return what turns experts into slots on `device`."""
    if device.type == "cpu":
        return local_slots
    from kernels.triton.router import launches as triton_router

    return triton_router.local_slots
