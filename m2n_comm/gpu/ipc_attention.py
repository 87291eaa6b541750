"""M2N between GPUs of one host: kernels write into the peer's memory, and no CPU takes part.

The attention side, which implements AttentionNet; cuda_ipc_expert.py has the other, for which all
of this holds too. Owns the rules of m2n_comm.net as far as the host keeps them: which table and
which parts a step uses, and what may follow what. Rows, counts, sequences and headers are the
kernels' (kernels.triton.m2n.attention_port*); windows are m2n_comm.gpu.ipc_pairs'. Opened by
m2n_comm.gpu.ipc_open. With memfds and Triton's interpreter it all runs on CPUs too, for tests.

All calls enqueue work on the current stream and return. What differs from step to step lies in
memory (step, table version, participants, patience), written by begin(); so a recording of
dispatch and combine, or of gather and reply, can be replayed after any later begin() of a step
whose micro-batches fit into one window each. is_graph_safe says so of the step that has begun:
windows should hold the largest micro-batch.

A micro-batch's rows r * window_rows to (r + 1) * window_rows - 1 are its part r, for all nodes
alike, and the ticket's row bucket says how many parts there are: nobody has to look at a count.
A rehearsal is what is enqueued before the first begin(): nothing is sent and nothing awaited.

What goes wrong is found by kernels. They set words in the host's memory; from then on they send
nothing, wait for nothing, and sums are NaN. Whoever launched a step calls check() while it waits
for it and once more when it has happened, before it uses a result. On the host's runtime, where
everything has happened when it is enqueued, dispatch(), combine() and reply() call it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.m2n_windows import step_words
from m2n_comm.gpu.ipc_pairs import IpcPairs
from m2n_comm.gpu.ipc_rules import Life, check_ticket, parts_of
from m2n_comm.host.lines import TURN_S
from m2n_comm.layout import Routes
from m2n_comm.net import NetShape, NetTimes
from topspin.errors import FrameError, ProtocolError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Ring

if TYPE_CHECKING:
    from kernels.triton.m2n.attention_port import AttentionPort

_MAX_VARIANTS: Final = 12


def slot_variants(table: ExpertTable, nodes: tuple[int, ...]) -> Tensor:
    """Return i32[L, V, N, E]: the slot of expert e on nodes[n] in variant v, -1 elsewhere.

    In each variant an expert has one home; one with several copies takes them in turn, so that
    rows, which go by variants in turn, spread over them.
    """
    replicas = [table.replicas(layer) for layer in range(len(table.slots))]
    counts = {len(found) for layer in replicas for found in layer}
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
class _Flight:
    """A dispatch that was not combined yet, with what its later parts are made of."""

    layer: int
    hidden: Tensor
    experts: Tensor
    weights: Tensor
    num_rows: Tensor | None
    parts: int


class IpcAttentionNet:
    """The attention side. Invariant: a flight exists exactly between a dispatch and its combine.

    `expert_incarnations[n]` None is an absent node: it must have no slots in any table.
    """

    def __init__(
        self,
        *,
        shape: NetShape,
        index: int,
        incarnation: int,
        num_experts: int,
        table: ExpertTable,
        pairs: IpcPairs,
    ) -> None:
        """Serve `num_experts` expert nodes, of which `pairs` has those that are there."""
        from kernels.triton.m2n.attention_port import AttentionPort

        self.shape = shape
        self.trace: Ring | None = None
        self._index = index
        self._pairs = pairs
        self._life = Life(f"attention {index}", pairs)
        absent = set(range(num_experts)) - set(pairs.peers)
        self._routes = Routes(index, shape.num_layers, num_experts, absent=absent)
        self._variants: dict[int, Tensor] = {}
        self._ports: list[AttentionPort] = [
            AttentionPort(
                pairs.windows,
                [pairs.request(place, each) for place in range(len(pairs.peers))],
                [pairs.answer(place, each) for place in range(len(pairs.peers))],
                control=pairs.control,
                step=pairs.step,
                incarnation=incarnation,
                peers=pairs.incarnations,
                micro_batch=each,
            )
            for each in range(shape.num_micro_batches)
        ]
        self._flights: list[_Flight | None] = [None] * shape.num_micro_batches
        self._parts: tuple[int, ...] = (1,) * shape.num_micro_batches
        self._step = 0
        self._epoch = 0
        self._version = table.version
        self.set_table(table)
        self._slot_of = self._variants[table.version].to(pairs.runtime.device)

    @property
    def is_graph_safe(self) -> bool:
        """Say whether the step that has begun fits into one window for each micro-batch."""
        return max(self._parts) == 1

    @property
    def epoch(self) -> int:
        """Return a number that changes whenever what was recorded is no longer right."""
        return self._epoch

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close."""
        mine = sum(port.nbytes for port in self._ports) + self._slot_of.nbytes
        return self._pairs.registered_bytes + mine

    def set_table(self, table: ExpertTable) -> None:
        """Keep `table` for the steps whose tickets name its version; see m2n_comm.net.

        Raises ProtocolError if it does not fit.
        """
        self._routes.add(table)
        self._variants[table.version] = slot_variants(table, self._pairs.peers)

    def begin(self, ticket: StepTicket) -> None:
        """Open a step that this node takes part in; see m2n_comm.net. Enqueues its words.

        Raises ProtocolError if the ticket does not fit, or a dispatch is still in the air.
        """
        self._life.look()
        if self._index not in ticket.participants:
            raise ProtocolError(f"step {ticket.step}: attention {self._index} takes no part")
        check_ticket(ticket, self.shape)
        for micro_batch, flight in enumerate(self._flights):
            if flight is not None:
                raise ProtocolError(
                    f"step {ticket.step}: micro-batch {micro_batch} of step {self._step} is "
                    "still in the air"
                )
        version = self._routes.take(ticket).version
        if version != self._version:
            self._use_table(version)
        # The experts may serve a step of other attention nodes first; see AttentionSide.
        is_next = ticket.previous in (0, self._step)
        patience_s = self.shape.deadline_s if is_next else TURN_S
        self._step = ticket.step
        self._parts = parts_of(ticket, self.shape.window_rows)
        self._pairs.begin(
            step_words(patience_ns=int(patience_s * 1e9), step=ticket.step, version=version)
        )

    def _use_table(self, version: int) -> None:
        """Enqueue that slots become those of another table; recordings read the same memory."""
        slots = self._variants[version]
        if slots.shape == self._slot_of.shape:
            self._slot_of.copy_(slots)
        else:
            self._slot_of = slots.to(self._slot_of.device)
            self._epoch += 1
        self._version = version
        self._variants = {known: kept for known, kept in self._variants.items() if known >= version}

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
        self._life.check_usable()
        assert micro_batch < len(self._parts), "not a micro-batch of the ticket"
        assert self._flights[micro_batch] is None, "combine() the last dispatch first"
        parts = self._parts[micro_batch]
        try:
            self._check_tensors(hidden, experts, weights)
            if num_rows is None and len(hidden) > parts * self.shape.window_rows:
                raise FrameError(
                    f"dispatch: {len(hidden)} rows, micro-batch {micro_batch} of step "
                    f"{self._step} has {parts} windows of {self.shape.window_rows}"
                )
        except BaseException as error:
            self._life.fail(error)
            raise
        flight = _Flight(layer, hidden, experts, weights.float(), num_rows, parts)
        self._flights[micro_batch] = flight
        self._send(flight, micro_batch, 0)
        self._life.look_if_done()

    def _send(self, flight: _Flight, micro_batch: int, part: int) -> None:
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
        self._life.check_usable()
        flight = self._flights[micro_batch]
        assert flight is not None, "dispatch() first"
        assert flight.layer == layer, "combine() of another layer than the dispatch"
        if out.shape != flight.hidden.shape or out.dtype != torch.float32:
            error = FrameError(
                f"combine into {tuple(out.shape)} {out.dtype}, expected "
                f"{tuple(flight.hidden.shape)} torch.float32"
            )
            self._life.fail(error)
            raise error
        rows = self.shape.window_rows
        for part in range(flight.parts):
            self._ports[micro_batch].combine(out[part * rows : (part + 1) * rows], layer=layer)
            if part + 1 < flight.parts:
                self._send(flight, micro_batch, part + 1)
        if len(out) > flight.parts * rows:
            out[flight.parts * rows :].zero_()
        self._flights[micro_batch] = None
        self._life.look_if_done()
        return out

    def check(self) -> None:
        """Raise what has gone wrong in what has happened so far; never waits.

        Call it while waiting for a step (a Halt ends the step's waits by it), and when it has
        happened. Raises TransportError, and what the check given at opening does.
        """
        self._life.look()

    def settle(self) -> None:
        """Wait until all that was enqueued so far has happened, checking meanwhile."""
        self._life.settle()

    def wait_s(self) -> float:
        """Return 0: the host waits for nothing here."""
        return 0.0

    def times(self) -> NetTimes:
        """Return that nothing was measured: the host only enqueues."""
        return NetTimes(wait_s=0.0, expert_s=0.0, link_s=None)

    def close(self) -> None:
        """Release all memory and connections; safe to call twice."""
        self._life.close()
        self._flights = [None] * len(self._flights)

    def _check_tensors(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> None:
        rows = hidden.shape[0]
        wide, narrow = (rows, self.shape.hidden_size), (rows, self.shape.top_k)
        wanted = (("hidden", hidden, wide), ("experts", experts, narrow))
        for name, got, size in (*wanted, ("weights", weights, narrow)):
            if got.shape != size:
                raise FrameError(f"dispatch: {name} is {tuple(got.shape)}, expected {size}")
        if experts.dtype != torch.int64:
            raise FrameError(f"dispatch: experts are {experts.dtype}, expected torch.int64")
