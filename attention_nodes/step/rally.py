"""The rally: micro-batches travel between this node's attention and the experts.

Owns the order in which layers and micro-batches are served, and the rows in the air.
Knows no weights (decoder.py), no transport (m2n_comm.net) and no plan: `rally` takes
inputs and leaves each micro-batch's finished residual stream. Runs in the node's one
busy thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from attention_nodes.step.decoder import Layer, NodeLayers
from attention_nodes.step.step_inputs import MicroBatchInputs
from kernels.contracts import Routing
from m2n_comm.net import AttentionNet
from topspin.processes.progress import Beat, no_beat
from topspin.trace import Kind, NoStamps, Stamps


@dataclass(eq=False)
class RowsInFlight:
    """One micro-batch under way: its residual stream [T, H] and the terms to be added to it.

    `combined` [T, H] fp32 is the buffer for the sums of the experts' answers; `in_air` the MoE
    layer whose answer is awaited; `local` the term of this node, computed meanwhile; `delta` is
    added to the residual by the next attention half.
    """

    inputs: MicroBatchInputs
    residual: Tensor
    combined: Tensor
    in_air: int | None = None
    local: Tensor | None = None
    delta: Tensor | None = None


class Passage:
    """The way of rows to and from nodes that have other layers of the model; here: none has."""

    def arrive(self, micro_batch: int, flight: RowsInFlight) -> None:
        """Fill a micro-batch's residual before its first layer."""

    def leave(self, micro_batch: int, flight: RowsInFlight) -> None:
        """Take a micro-batch that is through the layers here."""

    def end(self, flights: Sequence[RowsInFlight]) -> None:
        """Complete the residuals of all micro-batches, which are through the layers here."""


NO_PASSAGE: Final = Passage()


def nothing_to_do() -> bool:
    """Do no work in a wait for experts, and say so."""
    return False


@dataclass(frozen=True, eq=False)
class Companions:
    """What goes along with a step's layers; each does nothing unless it is given.

    `trace` gets a stamp per hop; `beat` is called whenever a micro-batch enters a layer.
    `meanwhile` is called before each wait for experts, does work that is not the step's, and says
    whether there was some.
    """

    trace: Stamps = field(default_factory=NoStamps)
    beat: Beat = no_beat
    meanwhile: Callable[[], bool] = nothing_to_do
    passage: Passage = NO_PASSAGE


NO_COMPANIONS: Final = Companions()


def rally(
    decoder: NodeLayers,
    net: AttentionNet,
    flights: Sequence[RowsInFlight],
    companions: Companions = NO_COMPANIONS,
) -> None:
    """Run all layers over all micro-batches; the residuals are complete afterwards."""
    trace, passage = companions.trace, companions.passage
    for layer in decoder.layers:
        for micro_batch, flight in enumerate(flights):
            if layer is decoder.layers[0]:
                passage.arrive(micro_batch, flight)
            if flight.in_air is not None and companions.meanwhile():
                trace.stamp(Kind.CODED, flight.in_air, micro_batch)
            take_back(net, micro_batch, flight)
            companions.beat()
            normed = flight.residual
            if len(normed):
                normed = decoder.attention_half(layer, normed, flight.delta, flight.inputs)
            flight.delta = None
            if layer.moe_idx is None:
                flight.delta = run_local(decoder, micro_batch, layer, normed, trace)
            elif layer.moe_idx in net.local:
                flight.delta = run_experts(decoder, micro_batch, flight, layer, normed, trace)
            else:
                send_out(decoder, net, micro_batch, flight, layer, normed, trace)
    for micro_batch, flight in enumerate(flights):
        take_back(net, micro_batch, flight)
        if flight.delta is not None:
            flight.residual += flight.delta
        passage.leave(micro_batch, flight)
    passage.end(flights)


def send_out(
    decoder: NodeLayers,
    net: AttentionNet,
    micro_batch: int,
    flight: RowsInFlight,
    layer: Layer,
    normed: Tensor,
    trace: Stamps,
) -> None:
    """Dispatch rows to their experts, then run the shared expert while they are away."""
    assert layer.moe_idx is not None
    routing = _route(decoder, layer, normed)
    trace.stamp(Kind.ATTENTION, layer.idx, micro_batch)
    num_rows = flight.inputs.num_rows
    net.dispatch(micro_batch, layer.moe_idx, normed, routing.experts, routing.weights, num_rows)
    trace.stamp(Kind.DISPATCHED, layer.moe_idx, micro_batch)
    flight.in_air = layer.moe_idx
    flight.local = run_local(decoder, micro_batch, layer, normed, trace)


def run_experts(
    decoder: NodeLayers,
    micro_batch: int,
    flight: RowsInFlight,
    layer: Layer,
    normed: Tensor,
    trace: Stamps,
) -> Tensor | None:
    """Return the sum of the routed and shared experts of a layer that is local; None: no rows."""
    moe_idx = layer.moe_idx
    assert moe_idx is not None
    if not len(normed):
        return None
    routing = decoder.route(layer, normed)
    trace.stamp(Kind.ATTENTION, layer.idx, micro_batch)
    delta = decoder.routed_experts(
        moe_idx, normed, routing, num_rows=flight.inputs.num_rows, out=flight.combined
    )
    trace.stamp(Kind.EXPERTS, moe_idx, micro_batch)
    local = run_local(decoder, micro_batch, layer, normed, trace)
    if local is not None:
        delta += local
    return delta


def _route(decoder: NodeLayers, layer: Layer, normed: Tensor) -> Routing:
    """Choose the experts of rows [T, H]; T is 0 where only other attention nodes have rows."""
    if len(normed):
        return decoder.route(layer, normed)
    assert decoder.config.moe is not None
    size = (0, decoder.config.moe.top_k)
    experts = torch.empty(size, dtype=torch.int64, device=normed.device)
    return Routing(experts, torch.empty(size, device=normed.device))


def run_local(
    decoder: NodeLayers, micro_batch: int, layer: Layer, normed: Tensor, trace: Stamps
) -> Tensor | None:
    """Run the part computed on this node: a dense layer's MLP or the shared expert."""
    local = decoder.local_mlp(layer, normed) if len(normed) else None
    if local is not None:
        trace.stamp(Kind.LOCAL, layer.idx, micro_batch)
    return local


def take_back(net: AttentionNet, micro_batch: int, flight: RowsInFlight) -> None:
    """Wait for the experts' answer, if one is awaited, and make it the next delta."""
    if flight.in_air is None:
        return
    flight.delta = net.combine(micro_batch, flight.in_air, flight.combined)
    if flight.local is not None:
        flight.delta += flight.local
    flight.in_air = None
    flight.local = None
