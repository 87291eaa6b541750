"""M2N between GPUs of one host: kernels write into the peer's memory, without the CPU.

The attention side, which implements AttentionNet; ipc_expert.py is the other side, and all of
this holds for it too. Owns the enqueueing of a step: its table, its parts, its words. Rows, counts,
sequences and headers are the kernels' (kernels.triton.m2n); windows are ipc_pairs', the order of
calls is m2n_comm.rules'. Opened by m2n_comm.open. With memfds and Triton's interpreter it all
runs on CPUs too, for tests.

All calls enqueue work on the current stream and return. The values that differ between steps (step,
table version, participants, patience) are in memory, written by begin(); so a recording of dispatch
and combine, or of gather and reply, can be replayed after any later begin() of a step whose
micro-batches fit into one window each. is_graph_safe tells this for the current step: windows
should hold the largest micro-batch.

A micro-batch's rows r * window_rows to (r + 1) * window_rows - 1 are its part r, for all nodes
alike, and the number of parts follows from the ticket's row bucket, so no count has to be read.
Work enqueued before the first begin() is a rehearsal: it sends nothing and waits for nothing.

Kernels find the errors. They set words in the host's memory; from then on they send nothing, wait
for nothing, and sums are NaN. The launcher of a step calls check() while it waits for the step and
once more when it has completed, before it uses a result. On the host's runtime, where work
completes as it is enqueued, dispatch(), combine() and reply() call it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.m2n_windows import step_words
from m2n_comm.gpu.ipc_life import IpcLife, parts_of
from m2n_comm.gpu.ipc_pairs import IpcPairs
from m2n_comm.net import NetTimes
from m2n_comm.pairing.hello import Identity
from m2n_comm.rules import AttentionRules
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Stamps

if TYPE_CHECKING:
    from kernels.triton.m2n.attention_port import AttentionPort

_MAX_VARIANTS: Final = 12


def slot_variants(table: ExpertTable, nodes: tuple[int, ...]) -> Tensor:
    """Return i32[L, V, N, E]: the slot of expert e on nodes[n] in variant v, -1 elsewhere.

    In each variant an expert has one home. The variants of an expert with several copies take them
    in turn, and rows take the variants in turn, so rows spread over the copies. Layers that are
    local have no homes.
    """
    replicas = [
        [] if layer in table.local else table.replicas(layer) for layer in range(len(table.slots))
    ]
    counts = {len(found) for layer in replicas for found in layer} or {1}
    num_variants = math.lcm(*counts)
    if num_variants > _MAX_VARIANTS:
        num_variants = max(counts)
    size = (len(replicas), num_variants, len(nodes), table.num_experts)
    slots = torch.full(size, -1, dtype=torch.int32)
    for idx, layer in enumerate(replicas):
        for expert, found in enumerate(layer):
            for variant in range(num_variants):
                home = found[variant % len(found)]
                slots[idx, variant, nodes.index(home.node), expert] = home.slot
    return slots


@dataclass(slots=True)
class _IpcDispatch:
    """A dispatch that is not combined yet, with the tensors of its later parts."""

    layer: int
    hidden: Tensor
    experts: Tensor
    weights: Tensor
    num_rows: Tensor | None
    parts: int

    @property
    def size(self) -> torch.Size:
        """Return the size of the hidden rows."""
        return self.hidden.shape


class IpcAttentionNet:
    """The attention side. Invariant: a flight exists exactly between a dispatch and its combine."""

    def __init__(
        self, me: Identity, *, num_experts: int, table: ExpertTable, pairs: IpcPairs
    ) -> None:
        """Serve `num_experts` expert nodes; `pairs` has those that are present.

        The others must have no slots in any table.
        """
        from kernels.triton.m2n.attention_port import AttentionPort

        shape = me.shape
        self.shape = shape
        self.trace: Stamps | None = None
        self._pairs = pairs
        self._rules: AttentionRules[_IpcDispatch, tuple[int, Tensor]] = AttentionRules(
            me.index,
            shape,
            num_experts=num_experts,
            make_route=lambda table: (table.version, slot_variants(table, pairs.peers)),
            absent=set(range(num_experts)) - set(pairs.peers),
            dtypes=(None, torch.int64, None),
            on_failure=pairs.control.abort,
        )
        self._life = IpcLife(self._rules, pairs)
        self._ports: list[AttentionPort] = [
            AttentionPort(
                pairs.windows,
                [pairs.request(place, each) for place in range(len(pairs.peers))],
                [pairs.answer(place, each) for place in range(len(pairs.peers))],
                control=pairs.control,
                step=pairs.step,
                incarnation=me.incarnation,
                peers=pairs.incarnations,
                micro_batch=each,
            )
            for each in range(shape.num_micro_batches)
        ]
        self._parts: tuple[int, ...] = (1,) * shape.num_micro_batches
        self.epoch = 0
        self._recorded_local = frozenset(table.local)
        self._version, slots = self._rules.set_table(table)
        self._slot_of = slots.to(pairs.runtime.device)

    @property
    def is_graph_safe(self) -> bool:
        """Say whether each micro-batch of the current step fits into one window."""
        return max(self._parts) == 1

    @property
    def local(self) -> frozenset[int]:
        """Return the MoE layers that attention nodes compute in this step."""
        return self._rules.local

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close."""
        mine = sum(port.nbytes for port in self._ports) + self._slot_of.nbytes
        return self._pairs.registered_bytes + mine

    def set_table(self, table: ExpertTable) -> None:
        """Keep `table` for the steps whose tickets name its version; see m2n_comm.net.

        Raises ProtocolError if it does not fit.
        """
        self._rules.set_table(table)

    def begin(self, ticket: StepTicket) -> None:
        """Open a step that this node takes part in; see m2n_comm.net. Enqueues its words.

        Raises ProtocolError if the ticket does not fit, or a dispatch is not combined.
        """
        self._life.look()
        version, slots = self._rules.begin(ticket)
        if version != self._version:
            self._use_table(version, slots)
        self._parts = parts_of(ticket, self.shape.window_rows)
        patience_ns = int(self._rules.patience_s * 1e9)
        self._pairs.begin(step_words(patience_ns=patience_ns, step=ticket.step, version=version))

    def _use_table(self, version: int, slots: Tensor) -> None:
        """Enqueue the switch to another table's slots; recordings read the same memory."""
        if slots.shape == self._slot_of.shape:
            self._slot_of.copy_(slots)
        else:
            self._slot_of = slots.to(self._slot_of.device)
            self.epoch += 1
        if self.local != self._recorded_local:
            self._recorded_local = self.local
            self.epoch += 1
        self._version = version

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        num_rows: Tensor | None = None,
    ) -> None:
        """Enqueue sending hidden [T, H], experts [T, K] int64 (logical), weights [T, K].

        See m2n_comm.net; the tensors must stay as they are until combine() if there are several
        parts. Raises FrameError for tensors that do not fit.
        """
        with self._rules:
            assert micro_batch < len(self._parts), "not a micro-batch of the ticket"
            assert self._rules.flights[micro_batch] is None, "combine() the last dispatch first"
            parts = self._parts[micro_batch]
            self._rules.check_rows(hidden, experts, weights)
            if num_rows is None and len(hidden) > parts * self.shape.window_rows:
                raise FrameError(
                    f"dispatch: {len(hidden)} rows, micro-batch {micro_batch} of step "
                    f"{self._rules.step} has {parts} windows of {self.shape.window_rows}"
                )
        flight = _IpcDispatch(layer, hidden, experts, weights.float(), num_rows, parts)
        self._rules.flights[micro_batch] = flight
        self._send(flight, micro_batch, 0)
        self._life.look_if_done()

    def _send(self, flight: _IpcDispatch, micro_batch: int, part: int) -> None:
        low = part * self.shape.window_rows
        high = low + self.shape.window_rows
        self._ports[micro_batch].dispatch(
            flight.hidden[low:high],
            flight.experts[low:high],
            flight.weights[low:high],
            self._slot_of[flight.layer],
            layer=flight.layer,
            num_rows=flight.num_rows,
            first=low,
            part=part,
            parts=flight.parts,
        )

    def combine(self, micro_batch: int, layer: int, out: Tensor) -> Tensor:
        """Enqueue filling out [T, H] fp32 with the sum of all partials, and return it.

        Raises FrameError for an `out` that does not fit.
        """
        with self._rules:
            flight = self._rules.flight(micro_batch, layer, out)
        rows = self.shape.window_rows
        for part in range(flight.parts):
            self._ports[micro_batch].combine(out[part * rows : (part + 1) * rows], layer=layer)
            if part + 1 < flight.parts:
                self._send(flight, micro_batch, part + 1)
        if len(out) > flight.parts * rows:
            out[flight.parts * rows :].zero_()
        self._rules.flights[micro_batch] = None
        self._life.look_if_done()
        return out

    def check(self) -> None:
        """Raise the first fault of completed kernels; never waits.

        Call it while waiting for a step (a Halt ends the step's waits by it), and when the step has
        completed. Raises TransportError, and the errors of the check given at opening.
        """
        self._life.look()

    def settle(self) -> None:
        """Wait until all enqueued work has completed, checking meanwhile."""
        self._life.settle()

    def wait_s(self) -> float:
        """Return 0: the host never waits here."""
        return 0.0

    def times(self) -> NetTimes:
        """Return empty times: the host only enqueues, so nothing is measured."""
        return NetTimes(wait_s=0.0, expert_s=0.0, link_s=None)

    def close(self) -> None:
        """Release all memory and connections; safe to call twice."""
        self._life.close()
