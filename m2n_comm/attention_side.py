"""The attention node's end of M2N, the same for every transport: implements AttentionNet.

Owns the send plans, the parts and their credits, the headers and their checks, and the sum
of the partials. Knows no socket and no memory mapping: it writes and reads windows through
lines.Lines. Runs in the one busy thread of an attention node.

Credits: a (pair, micro-batch) has one window each way. dispatch() sends part 0 to every
expert node; combine() receives part r, adds it up, and only then sends part r+1: a window
is free again when its answer has been consumed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from m2n_comm.emulate import LinkEmulation, wait_delivery
from m2n_comm.layout import (
    RouteMap,
    SendPlan,
    check_known,
    num_parts,
    plan_sends,
    route_map,
    write_part,
)
from m2n_comm.lines import Hop, Lines, describe, late
from m2n_comm.native import Record, add_answer, write_request
from m2n_comm.native import serves as native_serves
from m2n_comm.net import NetShape, NetTimes
from m2n_comm.pairs import PairPlan, PairSum, plan_pairs
from m2n_comm.windows import PairLayout
from m2n_comm.wire import (
    ANSWER,
    COMPUTE_WORD,
    DELIVER_WORD,
    HEADER_BYTES,
    IDLE_WORD,
    MAX_MEASURED_NS,
    NUM_COMPARED,
    REQUEST,
    FrameHeader,
    check_header,
    check_size,
    payload_code,
    read_header,
    set_deliver_ns,
    write_header,
)
from topspin.errors import FrameError, ProtocolError, TransportError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Kind, Ring

# A wait shorter than this was none: the frame lay there before it was asked for.
_WAITED_NS = 5_000
# How long to wait for one's turn while the experts serve a step of other attention nodes. The
# scheduler watches that step, and ends this wait (Lines' check) if it does not go on.
_TURN_S = 3600.0


@dataclass(slots=True)
class _Parts:
    """What a dispatch that goes in parts, or needs more than rows copied, keeps until the end."""

    plan: SendPlan
    weights: torch.Tensor
    counts: list[int]
    sent: dict[int, FrameHeader]
    pairs: PairPlan | None = None


@dataclass(slots=True)
class _Flight:
    """A dispatch whose answers have not all been consumed; `parts` is None if each is one frame."""

    layer: int
    hidden: torch.Tensor
    dispatched_ns: int = 0
    parts: _Parts | None = None


class AttentionSide:
    """Invariant: a flight exists exactly while some expert node owes an answer.

    None in `expert_incarnations` is an absent node: it must have no slots in any table.
    """

    def __init__(
        self,
        *,
        shape: NetShape,
        index: int,
        incarnation: int,
        expert_incarnations: tuple[int | None, ...],
        table: ExpertTable,
        lines: Lines,
        link: LinkEmulation | None = None,
    ) -> None:
        self.lines = lines
        self.shape = shape
        self._index = index
        self._incarnation = incarnation
        self._experts = tuple(each or 0 for each in expert_incarnations)
        layout = PairLayout(shape)
        self._request_row_bytes = layout.request_row_bytes
        self._answer_row_bytes = layout.answer_row_bytes
        self._payload = payload_code(shape.request_dtype)
        self._answer_start = (ANSWER, payload_code(shape.payload))
        self._shapers = [link.shaper if link else None for _ in expert_incarnations]
        self._sequences = [[0] * shape.num_micro_batches for _ in expert_incarnations]
        self._flights: list[_Flight | None] = [None] * shape.num_micro_batches
        self._pair_sum = PairSum(shape) if shape.per_pair_answers else None
        self._scratch = torch.empty((shape.window_rows, shape.hidden_size), dtype=torch.float32)
        self._everyone = tuple(
            expert for expert, each in enumerate(expert_incarnations) if each is not None
        )
        self._records = self._make_records(layout) if native_serves(shape) else None
        self._answer_words = {
            expert: [lines.inbox(expert, each).words for each in range(shape.num_micro_batches)]
            for expert in self._everyone
        }
        self._route: RouteMap | None = None
        self._routes: dict[int, RouteMap] = {}
        self._step: int | None = None
        self._patience_s = shape.deadline_s
        self._wait_ns = 0
        self._expert_ns = [0] * len(expert_incarnations)
        self._link_ns = 0
        self._num_links = 0
        self.trace: Ring | None = None
        self._failure: str | None = None
        self.set_table(table)

    def _make_records(self, layout: PairLayout) -> dict[int, list[Record]]:
        return {
            expert: [
                Record(
                    layout,
                    (self._index, expert, micro_batch),
                    (self._incarnation, self._experts[expert]),
                    outbox=self.lines.outbox(expert, micro_batch),
                    inbox=self.lines.inbox(expert, micro_batch),
                    sends_all=len(self._experts) == 1,
                )
                for micro_batch in range(layout.shape.num_micro_batches)
            ]
            for expert in self._everyone
        }

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close: all windows and the sum's scratch."""
        pairs = self._pair_sum.size_bytes if self._pair_sum is not None else 0
        return self.lines.registered_bytes + self._scratch.nbytes + pairs

    def set_table(self, table: ExpertTable) -> None:
        """Keep `table` for the steps whose tickets name its version; see m2n_comm.net.

        Raises ProtocolError if it does not fit.
        """
        table.validate()
        if len(table.slots) != self.shape.num_layers or table.num_nodes != len(self._experts):
            raise ProtocolError(
                f"expert table {table.version}: {len(table.slots)} layers over "
                f"{table.num_nodes} nodes, expected {self.shape.num_layers} over "
                f"{len(self._experts)}"
            )
        for node in range(table.num_nodes):
            if node not in self._everyone and any(table.experts_of(node)):
                raise ProtocolError(
                    f"expert table {table.version}: expert node {node} is absent and holds experts"
                )
        self._routes[table.version] = route_map(table)

    def begin(self, ticket: StepTicket) -> None:
        """Open a step that this node takes part in; see m2n_comm.net.

        Raises ProtocolError if the ticket does not fit, or a dispatch is still in the air.
        """
        self._check_usable()
        if self._index not in ticket.participants:
            raise ProtocolError(f"step {ticket.step}: attention {self._index} takes no part")
        if not 1 <= ticket.num_micro_batches <= self.shape.num_micro_batches:
            raise ProtocolError(
                f"step {ticket.step}: {ticket.num_micro_batches} micro-batches, "
                f"windows for {self.shape.num_micro_batches}"
            )
        for micro_batch, flight in enumerate(self._flights):
            if flight is not None:
                raise ProtocolError(
                    f"step {ticket.step}: micro-batch {micro_batch} of step {self._step} is "
                    "still in the air"
                )
        self._route = self._take_route(ticket)
        is_next = ticket.previous in (0, self._step)
        self._patience_s = self.shape.deadline_s if is_next else _TURN_S
        self._step = ticket.step
        self._wait_ns = 0
        self._expert_ns = [0] * len(self._experts)
        self._link_ns = self._num_links = 0
        self.lines.begin(ticket)

    def _take_route(self, ticket: StepTicket) -> RouteMap:
        """Return the route map of the ticket's version and forget older ones."""
        version = ticket.table_version
        route = self._routes.get(version)
        if route is None:
            raise ProtocolError(
                f"step {ticket.step}: expert table {version}, attention {self._index} has "
                f"{sorted(self._routes)}"
            )
        if len(self._routes) > 1:
            self._routes = {known: kept for known, kept in self._routes.items() if known >= version}
        return route

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Send hidden [T, H] to the nodes of experts [T, K] int64 (logical), weights [T, K].

        See m2n_comm.net. Raises FrameError for tensors that do not fit, TransportError.
        """
        self._check_usable()
        assert self._step is not None, "begin() first"
        assert self._flights[micro_batch] is None, "combine() the last dispatch first"
        route = self._route
        assert route is not None
        try:
            self._check_tensors(hidden, experts, weights)
            if hidden.dtype != self.shape.payload and self.shape.compressed is None:
                hidden = hidden.to(self.shape.payload)
            if weights.dtype != torch.float32:
                weights = weights.to(torch.float32)
            flight = _Flight(layer, hidden)
            self._flights[micro_batch] = flight
            if (
                self._records is not None
                and hidden.shape[0] <= self.shape.window_rows
                and experts.dtype == torch.int64
                and _is_at_hand(hidden)
                and _is_at_hand(experts)
                and _is_at_hand(weights)
            ):
                self._send_whole(flight, micro_batch, route, experts, weights)
            else:
                self._send_first(flight, micro_batch, route, experts, weights)
        except BaseException as error:
            self._failure = describe(error)
            raise

    def _send_whole(
        self,
        flight: _Flight,
        micro_batch: int,
        route: RouteMap,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Send every expert node its rows in one frame, written by one call."""
        assert self._records is not None
        layer, hidden, chosen = flight.layer, flight.hidden, experts
        choice = route.choices[layer]
        if choice is not None:
            check_known(route, layer, experts)
            chosen = choice.choose(experts.view(-1))
        columns = route.slot_of[layer]
        num_columns, columns_at = columns.shape[1], columns.data_ptr()
        chosen_at, hidden_at, weights_at = (
            chosen.data_ptr(),
            hidden.data_ptr(),
            weights.data_ptr(),
        )
        num_rows, version, step = hidden.shape[0], route.version, self._step
        deadline_s = time.monotonic() + self._patience_s
        for expert in self._everyone:
            sequence = self._sequences[expert][micro_batch] + 1
            self._sequences[expert][micro_batch] = sequence
            rows = write_request(
                self._records[expert][micro_batch].address,
                chosen_at,
                columns_at + expert * num_columns * columns.itemsize,
                num_columns,
                num_rows,
                hidden_at,
                weights_at,
                layer,
                version,
                step,
                sequence,
            )
            if rows < 0:
                check_known(route, layer, experts)
                raise AssertionError("every expert id has a column")
            shaper = self._shapers[expert]
            if shaper is not None:
                size = HEADER_BYTES + rows * self._request_row_bytes
                deliver_ns = shaper.deliver_ns(size, now_ns=time.monotonic_ns())
                set_deliver_ns(self.lines.outbox(expert, micro_batch).header, deliver_ns)
            self.lines.send(Hop(expert, micro_batch, layer, deadline_s), rows, sequence)
        flight.dispatched_ns = time.monotonic_ns()

    def _send_first(
        self,
        flight: _Flight,
        micro_batch: int,
        route: RouteMap,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Send every expert node the first part of its rows."""
        window_rows = self.shape.window_rows
        plan = plan_sends(route, flight.layer, experts)
        counts = [num_parts(count, window_rows) for count in plan.counts]
        flight.parts = parts = _Parts(plan, weights, counts, {})
        for expert in self._everyone:
            parts.sent[expert] = self._send_part(flight, parts, expert, micro_batch, 0)
        flight.dispatched_ns = time.monotonic_ns()
        if self._pair_sum is not None:
            parts.pairs = plan_pairs(plan, experts, weights, window_rows=window_rows)

    def combine(self, micro_batch: int, layer: int, out: torch.Tensor) -> torch.Tensor:
        """Fill out [T, H] fp32 with the sum of all partials of that dispatch and return it."""
        self._check_usable()
        flight = self._flights[micro_batch]
        assert flight is not None, "dispatch() first"
        assert flight.layer == layer, "combine() of another layer than the dispatch"
        try:
            if out.shape != flight.hidden.shape or out.dtype != torch.float32:
                raise FrameError(
                    f"combine into {tuple(out.shape)} {out.dtype}, expected "
                    f"{tuple(flight.hidden.shape)} torch.float32"
                )
            if len(self._everyone) > 1:
                out.zero_()
            if flight.parts is None:
                self._consume_whole(flight, micro_batch, out)
            else:
                self._consume_parts(flight, flight.parts, micro_batch, out)
        except BaseException as error:
            self._failure = describe(error)
            raise
        self._flights[micro_batch] = None
        if self.trace is not None:
            self.trace.stamp(Kind.COMBINED, layer, micro_batch)
        return out

    def wait_s(self) -> float:
        """Return the seconds spent waiting in combine() since begin()."""
        return self._wait_ns * 1e-9

    def times(self) -> NetTimes:
        """Return what was measured since begin()."""
        return NetTimes(
            wait_s=self._wait_ns * 1e-9,
            expert_s=max(self._expert_ns, default=0) * 1e-9,
            link_s=self._link_ns * 1e-9 / self._num_links if self._num_links else None,
        )

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        if self._failure is None:
            self._failure = "it is closed"
        self._records, self._answer_words = None, {}
        self.lines.close()

    def _consume_whole(self, flight: _Flight, micro_batch: int, out: torch.Tensor) -> None:
        """Receive and add the one answer of every node, each checked and read by one call."""
        assert self._records is not None
        everyone = self._everyone
        total = out if _is_at_hand(out) else torch.zeros(out.shape, dtype=torch.float32)
        out_at, num_rows = total.data_ptr(), total.shape[0]
        for position, expert in enumerate(everyone):
            raw = self._await(flight, expert, micro_batch, everyone[position:])
            record = self._records[expert][micro_batch]
            if add_answer(record.address, out_at, num_rows, len(everyone) > 1) < 0:
                self._judge(read_header(raw), read_header(record.request), expert)
                raise FrameError(f"frame of expert {expert}: it changed while it was read")
        if total is not out:
            out.copy_(total)

    def _consume_parts(
        self, flight: _Flight, parts: _Parts, micro_batch: int, out: torch.Tensor
    ) -> None:
        """Receive every part of every node; each received part lets the next one go."""
        pending = self._everyone
        part = 0
        while pending:
            for position, expert in enumerate(pending):
                raw = self._await(flight, expert, micro_batch, pending[position:])
                sent = parts.sent[expert]
                if parts.pairs is not None:
                    sent = sent._replace(rows=parts.pairs.num_rows(expert, part))
                header = read_header(raw)
                self._judge(header, sent, expert)
                answer = self.lines.inbox(expert, micro_batch).first(header.rows).hidden
                if self._pair_sum is not None and parts.pairs is not None:
                    self._pair_sum.put(parts.pairs, expert, part, answer)
                else:
                    low = part * self.shape.window_rows
                    self._add(parts.plan.rows[expert], answer, low=low, out=out)
                if part + 1 < parts.counts[expert]:
                    sent = self._send_part(flight, parts, expert, micro_batch, part + 1)
                    parts.sent[expert] = sent
            part += 1
            pending = tuple(expert for expert in pending if parts.counts[expert] > part)
        if self._pair_sum is not None and parts.pairs is not None:
            self._pair_sum.add_up(parts.pairs, out)

    def _await(
        self, flight: _Flight, expert: int, micro_batch: int, awaited: tuple[int, ...]
    ) -> bytes:
        """Wait for the answer to what was sent last to `expert`; return its header, unchecked.

        Counts the wait, the expert's time and, if neither side let the frame lie, the link's.
        """
        start_ns = time.monotonic_ns()
        hop = Hop(expert, micro_batch, flight.layer, start_ns * 1e-9 + self._patience_s)
        raw = self.lines.receive(hop, awaited)
        self._patience_s = self.shape.deadline_s
        words = self._answer_words[expert][micro_batch]
        if words[DELIVER_WORD]:
            deliver_ns = read_header(raw).deliver_ns
            if not wait_delivery(deliver_ns, deadline_s=hop.deadline_s):
                raise late("expert", hop)
        now_ns = time.monotonic_ns()
        waited_ns = now_ns - start_ns
        self._wait_ns += waited_ns
        if self.trace is not None:
            self.trace.stamp(Kind.ARRIVED, flight.layer, micro_batch, expert)
        compute_ns, idle_ns = words[COMPUTE_WORD] >> 32, words[IDLE_WORD] & MAX_MEASURED_NS
        self._expert_ns[expert] += compute_ns
        is_first = flight.parts is None or flight.parts.sent[expert].part == 0
        if is_first and waited_ns > _WAITED_NS and idle_ns > _WAITED_NS:
            self._link_ns += max(0, now_ns - flight.dispatched_ns - compute_ns) // 2
            self._num_links += 1
        return raw

    def _judge(self, header: FrameHeader, sent: FrameHeader, expert: int) -> None:
        """Raise StaleFrame or FrameError unless `header` is of the answer to `sent`."""
        origin = f"expert {expert}"
        # An answer repeats its request, but for the first two fields.
        start = self._answer_start
        if header[:2] != start or header[2:NUM_COMPARED] != sent[2:NUM_COMPARED]:
            check_header(header, sent._replace(kind=ANSWER, payload=start[1]), origin=origin)
        check_size(
            header,
            window_rows=self.shape.answer_rows,
            row_bytes=self._answer_row_bytes,
            origin=origin,
        )

    def _add(
        self, selected: torch.Tensor | None, partial: torch.Tensor, *, low: int, out: torch.Tensor
    ) -> None:
        """Add partial rows, of the node's rows from `low` on, to their tokens, in fp32."""
        rows = partial.shape[0]
        if rows == 0:
            return
        if selected is None or len(self._everyone) == 1:
            part = out if rows == out.shape[0] else out[low : low + rows]
            if len(self._everyone) == 1:
                part.copy_(partial)
            else:
                part.add_(partial)
        else:
            wide = self._scratch[:rows].copy_(partial)
            out.index_add_(0, selected[low : low + rows], wide)

    def _send_part(
        self, flight: _Flight, parts: _Parts, expert: int, micro_batch: int, part: int
    ) -> FrameHeader:
        """Write one part straight into the request window and publish it."""
        count = parts.plan.counts[expert]
        low = part * self.shape.window_rows
        high = min(low + self.shape.window_rows, count)
        rows = high - low
        window = self.lines.outbox(expert, micro_batch)
        write_part(
            window,
            parts.plan,
            expert,
            low=low,
            high=high,
            hidden=flight.hidden,
            weights=parts.weights,
            scratch=self._scratch,
        )
        sequence = self._sequences[expert][micro_batch] + 1
        self._sequences[expert][micro_batch] = sequence
        payload_bytes = rows * self._request_row_bytes
        deliver_ns = 0
        shaper = self._shapers[expert]
        if shaper is not None:
            deliver_ns = shaper.deliver_ns(HEADER_BYTES + payload_bytes, now_ns=time.monotonic_ns())
        assert self._route is not None
        assert self._step is not None
        header = FrameHeader(
            kind=REQUEST,
            payload=self._payload,
            attention=self._index,
            expert=expert,
            micro_batch=micro_batch,
            layer=flight.layer,
            part=part,
            num_parts=parts.counts[expert],
            rows=rows,
            hidden_size=self.shape.hidden_size,
            attention_incarnation=self._incarnation,
            expert_incarnation=self._experts[expert],
            table_version=self._route.version,
            step=self._step,
            sequence=sequence,
            payload_bytes=payload_bytes,
            deliver_ns=deliver_ns,
            payload_crc=0,
        )
        write_header(window.header, header)
        hop = Hop(expert, micro_batch, flight.layer, time.monotonic() + self._patience_s)
        self.lines.send(hop, rows, sequence)
        return header

    def _check_tensors(
        self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> None:
        rows = hidden.shape[0]
        wide, narrow = (rows, self.shape.hidden_size), (rows, self.shape.top_k)
        if hidden.shape == wide and experts.shape == narrow and weights.shape == narrow:
            return
        wanted = (("hidden", hidden, wide), ("experts", experts, narrow))
        for name, got, want in (*wanted, ("weights", weights, narrow)):
            if got.shape != want:
                raise FrameError(f"dispatch: {name} is {tuple(got.shape)}, expected {want}")

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise TransportError(
                f"attention {self._index}: this net can not be used any more: {self._failure}"
            )


def _is_at_hand(tensor: torch.Tensor) -> bool:
    """Return whether compiled code may walk over the tensor's memory."""
    return tensor.is_cpu and tensor.is_contiguous()
