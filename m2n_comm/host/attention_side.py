"""The attention node's end of M2N, the same for every transport: implements AttentionNet.

Owns the order of frames, and the credits. hops.py writes frames, and checks and adds answers, also
in recorded steps; Python does what it leaves undone: it waits for long, names what is wrong, and
packs rows that travel compressed. rules.AttentionRules has the rules that all nets share. Knows no
socket and no memory mapping: windows come from lines.PairLines. Runs in the one busy thread of an
attention node.

Credits: a (pair, micro-batch) has one window each way. dispatch() sends part 0 to every
expert node; combine() receives part r, adds it up, and only then sends part r+1: a window
is free again when its answer has been consumed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.compiled.python_calls import call_again
from kernels.cpu.compiled.runtime import launch_alone, refuse_recording
from kernels.deterministic import add_by_expert, order_of
from m2n_comm.emulate import LinkEmulation, wait_delivery
from m2n_comm.host.frames import hops
from m2n_comm.host.frames.records import (
    ANSWER_ROWS,
    ARRIVED_NS,
    NUM_PARTS,
    ROWS,
    SENT_NS,
    Record,
    travels_plain,
)
from m2n_comm.host.frames.windows import PairLayout
from m2n_comm.host.frames.wire import (
    DELIVER_WORD,
    HEADER_BYTES,
    answer_to,
    check_header,
    check_size,
    payload_code,
    read_header,
)
from m2n_comm.host.lines import InPlaceLines, PairLines, bytes_of
from m2n_comm.host.times import AttentionTimes
from m2n_comm.layout import RouteMap, check_known, route_map
from m2n_comm.net import NetTimes
from m2n_comm.pairing.hello import Identity
from m2n_comm.payload import pack_rows
from m2n_comm.rules import AttentionRules
from m2n_comm.waits import Hop, WaitPolicy, late
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Kind, Stamps


class _SentDispatch(NamedTuple):
    """A dispatch with answers not yet consumed: hidden [T, H], experts and chosen [T, K].

    `chosen` are the columns of the layer's routing table. `order` is that of kernels.deterministic,
    in which rows of choices are added (None: sums come back).
    """

    layer: int
    size: torch.Size
    route: RouteMap
    hidden: Tensor
    experts: Tensor
    chosen: Tensor
    weights: Tensor
    order: tuple[Tensor, Tensor] | None


class AttentionSide:
    """Invariant: outside of recordings, a flight exists exactly while some expert node owes an
    answer."""

    def __init__(
        self,
        me: Identity,
        *,
        expert_incarnations: Sequence[int | None],
        table: ExpertTable,
        lines: PairLines,
        link: LinkEmulation | None = None,
        wait: WaitPolicy = "block",
    ) -> None:
        """Serve the expert nodes with these incarnations (None: an absent one)."""
        shape = me.shape
        self.shape = shape
        self._travels_plain = travels_plain(shape)
        self.trace: Stamps | None = None
        self._me = me
        self._spins = wait == "spin"
        self._num_experts = len(expert_incarnations)
        self._experts = {
            expert: each for expert, each in enumerate(expert_incarnations) if each is not None
        }
        self._everyone = tuple(self._experts)
        self._rules: AttentionRules[_SentDispatch, RouteMap] = AttentionRules(
            me.index if me.participant is None else me.participant,
            shape,
            num_experts=self._num_experts,
            make_route=route_map,
            absent=set(range(self._num_experts)) - set(self._everyone),
        )
        self._layout = PairLayout(shape)
        self._shapers = [link.shaper if link else None for _ in range(self._num_experts)]
        # By expert node and micro-batch, the number of frames sent.
        self._sequences = {
            expert: array("Q", bytes(8 * shape.num_micro_batches)) for expert in self._everyone
        }
        self._step_words = array("Q", (0, 0))
        self._step_at = self._step_words.buffer_info()[0]
        self._route: RouteMap | None = None
        self.epoch = 0
        self._times = AttentionTimes(self._num_experts)
        packed_rows = shape.window_rows if shape.compressed else 0
        self._scratch = torch.empty((packed_rows, shape.hidden_size))
        # Rows of choices, of the largest dispatch so far: combine() runs one dispatch at a time.
        choices = shape.window_rows * shape.top_k if shape.per_expert_answers else 0
        self._choices = torch.empty((choices, shape.hidden_size), dtype=shape.payload)
        self.use(lines)
        self.set_table(table)

    def use(self, lines: PairLines) -> None:
        """Send and receive over `lines` from now on."""
        self.lines = lines
        self._in_place = lines if isinstance(lines, InPlaceLines) else None
        hops.prepare()
        pairs = [
            (expert, micro_batch)
            for expert in self._everyone
            for micro_batch in range(self.shape.num_micro_batches)
        ]
        ports = {pair: lines.port(*pair) for pair in pairs}
        self._has_ports = None not in ports.values()
        self._records = {
            (expert, micro_batch): Record(
                self._layout,
                (self._me.index, expert, micro_batch),
                (self._me.incarnation, self._experts[expert]),
                outbox=lines.outbox(expert, micro_batch),
                inbox=lines.inbox(expert, micro_batch),
                count=self._sequences[expert],
                port=ports[expert, micro_batch],
                shaper=self._shapers[expert],
                sends_all=self._num_experts == 1,
                in_place=self._in_place is not None,
            )
            for expert, micro_batch in pairs
        }
        # By micro-batch, the addresses of the records.
        self._addresses = [
            array("Q", [self._records[expert, each].address for expert in self._everyone])
            for each in range(self.shape.num_micro_batches)
        ]
        self._addresses_at = [each.buffer_info()[0] for each in self._addresses]

    @property
    def local(self) -> frozenset[int]:
        """Return the MoE layers that attention nodes compute in this step."""
        return self._rules.local

    @property
    def is_graph_safe(self) -> bool:
        """Return whether compiled code can do the hops of this step, if there are any."""
        return len(self.local) == self.shape.num_layers or (
            self._has_ports and self._travels_plain and self._route is not None
        )

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close: all windows and the buffers."""
        return self.lines.registered_bytes + self._scratch.nbytes + self._choices.nbytes

    def set_table(self, table: ExpertTable) -> None:
        """Keep `table` for the steps whose tickets name its version; see m2n_comm.net.

        Raises ProtocolError if it does not fit.
        """
        self._rules.set_table(table)

    def begin(self, ticket: StepTicket) -> None:
        """Open a step that this node takes part in; see m2n_comm.net.

        Raises ProtocolError if the ticket does not fit, or a dispatch is not combined.
        """
        route = self._rules.begin(ticket)
        if route is not self._route:
            self._route = route
            self.epoch += 1
        words = self._step_words
        words[hops.STEP // 8], words[hops.VERSION // 8] = ticket.step, ticket.table_version
        self._times.begin()
        self.lines.begin(ticket)

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        num_rows: Tensor | None = None,
    ) -> None:
        """Send hidden [T, H] to the nodes of experts [T, K] int64 (logical), weights [T, K].

        See m2n_comm.net. Raises FrameError for tensors that do not fit, TransportError.
        """
        assert num_rows is None, "only graph-safe nets take padded rows"
        self._rules.check_usable()
        try:
            route = self._route
            assert route is not None, "begin() first"
            assert self._rules.flights[micro_batch] is None, "combine() the last dispatch first"
            self._rules.check_rows(hidden, experts, weights)
            if self.shape.compressed is None:
                hidden = _at_hand(hidden, self.shape.payload)
            experts = chosen = _at_hand(experts, torch.int64)
            weights = _at_hand(weights, torch.float32)
            if route.choices[layer] is not None:
                chosen = torch.empty_like(experts)
                call_again(partial(self._choose, route, layer, experts, chosen))
            order = order_of(experts, weights) if self.shape.per_expert_answers else None
            flight = _SentDispatch(
                layer, hidden.shape, route, hidden, experts, chosen, weights, order
            )
            self._rules.flights[micro_batch] = flight
            if len(hidden) > self.shape.window_rows:
                refuse_recording(f"a dispatch of {len(hidden)} rows takes more than one frame")
            self._send_parts(flight, micro_batch, 0, self._everyone)
        except BaseException as error:
            self._rules.fail(error)
            raise

    def _choose(self, route: RouteMap, layer: int, experts: Tensor, chosen: Tensor) -> None:
        """Fill chosen [T, K] with the replicas of experts [T, K]."""
        choice = route.choices[layer]
        assert choice is not None
        with self._rules:
            check_known(route, layer, experts)
            choice.choose(experts.view(-1), out=chosen.view(-1))

    def _send_parts(
        self, flight: _SentDispatch, micro_batch: int, part: int, experts: tuple[int, ...]
    ) -> None:
        """Send each of `experts` a part of its rows, in one frame."""
        columns = flight.route.slot_of[flight.layer]
        num_columns, columns_at = columns.shape[1], columns.data_ptr()
        for expert in experts:
            arguments = (
                self._records[expert, micro_batch].address,
                flight.chosen.data_ptr(),
                columns_at + expert * num_columns * columns.itemsize,
                num_columns,
                flight.size[0],
                flight.hidden.data_ptr(),
                flight.weights.data_ptr(),
                flight.layer,
                part,
                self._step_at,
            )
            finish = partial(self._finish_send, flight, expert, micro_batch)
            launch_alone(hops.send_rows, arguments, finish)

    def _finish_send(self, flight: _SentDispatch, expert: int, micro_batch: int) -> None:
        """Publish the frame that hops.send_rows has written; or it has written none."""
        with self._rules:
            record = self._records[expert, micro_batch]
            if not record.words[SENT_NS]:
                check_known(flight.route, flight.layer, flight.experts)
                raise AssertionError("every expert id has a column")
            rows, hidden = record.words[ROWS], flight.hidden
            window = self.lines.outbox(expert, micro_batch)
            if self.shape.compressed is not None:
                to = window.first(rows)
                if rows < len(hidden):
                    hidden = hidden.index_select(0, record.chosen[:rows])
                pack_rows(hidden, to.hidden, to.scales, self._scratch)
            shaper = self._shapers[expert]
            if shaper is not None:
                size = HEADER_BYTES + rows * self._layout.request_row_bytes
                deliver_ns = shaper.deliver_ns(size, now_ns=time.monotonic_ns())
                window.words[DELIVER_WORD] = deliver_ns
            hop = self._hop(flight.layer, expert, micro_batch)
            sequence = self._sequences[expert][micro_batch]
            if self._in_place is not None and (runs := record.runs):
                data, size = bytes_of(hidden), hidden.shape[1] * hidden.itemsize
                sources = [data[first * size : end * size] for first, end in runs]
                self._in_place.send_from(hop, rows, sequence, sources)
            else:
                self.lines.send(hop, rows, sequence)

    def _hop(self, layer: int, expert: int, micro_batch: int) -> Hop:
        """Return the hop of a frame whose wait begins now; that of a step's first may be long."""
        is_first = not self._times.has_answers
        patience_s = self._rules.patience_s if is_first else self.shape.deadline_s
        return Hop(expert, micro_batch, layer, time.monotonic() + patience_s)

    def combine(self, micro_batch: int, layer: int, out: Tensor) -> Tensor:
        """Fill out [T, H] fp32 with the sum of all partials of that dispatch and return it."""
        self._rules.check_usable()
        try:
            flight = self._rules.flight(micro_batch, layer, out)
            if flight.order is not None:
                if len(self._choices) < flight.chosen.numel():
                    size = (flight.chosen.numel(), self.shape.hidden_size)
                    self._choices = self._choices.new_empty(size)
                self._receive(flight, micro_batch, self._choices)
                add_by_expert(self._choices, *flight.order, out)
            else:
                total = _at_hand(out, torch.float32)
                self._receive(flight, micro_batch, total)
                if total is not out:
                    out.copy_(total)
        except BaseException as error:
            self._rules.fail(error)
            raise
        self._rules.flights[micro_batch] = None
        if self.trace is not None:
            self.trace.stamp(Kind.COMBINED, layer, micro_batch)
        return out

    def wait_s(self) -> float:
        """Return the seconds spent waiting in combine() since begin()."""
        return self._times.read().wait_s

    def times(self) -> NetTimes:
        """Return the measured times since begin()."""
        return self._times.read()

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        self._rules.close()
        self._records = {}
        self.lines.close()

    def _receive(self, flight: _SentDispatch, micro_batch: int, total: Tensor) -> None:
        """Add the answers to all parts to `total`: those of one frame for each node by one call."""
        if flight.size[0] > self.shape.window_rows:
            self._receive_parts(flight, micro_batch, total)
            return
        everyone = self._everyone
        # Made before the waits, which it would prolong.
        arguments, refuse = self._addition(micro_batch, everyone, total, fills=True)
        for position in range(len(everyone)):
            self._await(flight.layer, micro_batch, everyone[position:])
        launch_alone(hops.add_rows, arguments, refuse)

    def _receive_parts(self, flight: _SentDispatch, micro_batch: int, total: Tensor) -> None:
        """Add the answers to all parts to `total`; send a node's next part after each one's."""
        pending, part = self._everyone, 0
        fills = len(pending) == 1
        if not fills and flight.order is None:
            total.zero_()
        while pending:
            for position, expert in enumerate(pending):
                self._await(flight.layer, micro_batch, pending[position:])
                addition = self._addition(micro_batch, (expert,), total, fills=fills)
                launch_alone(hops.add_rows, *addition)
                if self._records[expert, micro_batch].words[NUM_PARTS] > part + 1:
                    self._send_parts(flight, micro_batch, part + 1, (expert,))
            part += 1
            num_parts = {
                each: self._records[each, micro_batch].words[NUM_PARTS] for each in pending
            }
            pending = tuple([each for each in pending if num_parts[each] > part])

    def _await(self, layer: int, micro_batch: int, awaited: tuple[int, ...]) -> None:
        """Wait for the next answer of the first node of `awaited`."""
        record = self._records[awaited[0], micro_batch]
        wait = partial(self._await_long, layer, micro_batch, awaited)
        launch_alone(hops.await_frame, (record.place, 0, 0), wait)
        if self.trace is not None:
            self.trace.stamp(Kind.ARRIVED, layer, micro_batch, awaited[0])

    def _await_long(self, layer: int, micro_batch: int, awaited: tuple[int, ...]) -> None:
        """Wait for an answer for longer than hops.await_frame does, or see what is wrong."""
        with self._rules:
            hop = self._hop(layer, awaited[0], micro_batch)
            self.lines.receive(hop, awaited)
            deliver_ns = self.lines.inbox(awaited[0], micro_batch).words[DELIVER_WORD]
            if deliver_ns and not wait_delivery(
                deliver_ns, deadline_s=hop.deadline_s, spins=self._spins
            ):
                raise late("expert", hop)
            self._records[awaited[0], micro_batch].words[ARRIVED_NS] = time.monotonic_ns()

    def _addition(
        self, micro_batch: int, experts: tuple[int, ...], total: Tensor, *, fills: bool
    ) -> tuple[tuple[int, ...], Callable[[], None]]:
        """Return the arguments of a launch that adds the answers of `experts`: all, or one."""
        arguments = (
            self._addresses_at[micro_batch] + 8 * self._everyone.index(experts[0]),
            len(experts),
            total.data_ptr(),
            int(fills),
            self._times.address,
        )
        return arguments, partial(self._refuse, micro_batch, experts)

    def _refuse(self, micro_batch: int, experts: tuple[int, ...]) -> None:
        """Raise FrameError or StaleFrame for an answer that does not match its request."""
        with self._rules:
            for expert in experts:
                record = self._records[expert, micro_batch]
                sent = read_header(record.request)._replace(rows=record.words[ANSWER_ROWS])
                header = read_header(self.lines.inbox(expert, micro_batch).header)
                expected = answer_to(sent, payload=payload_code(self.shape.payload))
                check_header(header, expected, origin=f"expert {expert}")
                check_size(
                    header,
                    window_rows=self.shape.answer_rows,
                    row_bytes=self._layout.answer_row_bytes,
                    origin=f"expert {expert}",
                )
            raise FrameError("an answer changed while it was read")


def _at_hand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor as compiled code reads it."""
    if tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous():
        return tensor
    return tensor.to("cpu", dtype).contiguous()
