"""The attention node's end of M2N, the same for every transport: implements AttentionNet.

Owns the order of frames, the credits, and the measured times; frames are written and answers
checked and added by hops.py (one frame of plain rows for each expert node, the common case, which a
recording can hold) or parts.py (all other cases); rules.AttentionRules has the rules that all nets
share. Knows no socket and no memory mapping: windows come from lines.Lines. Runs in the one busy
thread of an attention node.

Credits: a (pair, micro-batch) has one window each way. dispatch() sends part 0 to every
expert node; combine() receives part r, adds it up, and only then sends part r+1: a window
is free again when its answer has been consumed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.cpu.compiled.runtime import is_recording, launch_alone, refuse_recording
from m2n_comm.emulate import LinkEmulation, wait_delivery
from m2n_comm.hello import Identity
from m2n_comm.host import hops
from m2n_comm.host.lines import InPlaceLines, Lines, bytes_of
from m2n_comm.host.native import ARRIVED_NS, ROWS, SENT_NS, WAIT_BEGAN_NS, Record
from m2n_comm.host.native import serves as native_serves
from m2n_comm.host.parts import PartFrames, Parts
from m2n_comm.host.windows import PairLayout
from m2n_comm.host.wire import (
    COMPUTE_WORD,
    DELIVER_WORD,
    HEADER_BYTES,
    IDLE_WORD,
    read_header,
)
from m2n_comm.layout import RouteMap, check_known, route_map
from m2n_comm.net import NetTimes
from m2n_comm.rules import AttentionRules
from m2n_comm.waits import Hop, WaitPolicy, late
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Kind, Stamps


@dataclass(slots=True)
class _Flight:
    """A dispatch with answers not yet consumed; `parts` is None if each is one frame."""

    layer: int
    size: torch.Size
    dispatched_ns: int = 0
    parts: Parts | None = None


class _Measured:
    """The times of one step, as NetTimes says, in words that hops.add_rows writes too."""

    def __init__(self, num_experts: int) -> None:
        self._words = array("q", bytes(hops.EXPERT_NS + 8 * num_experts))
        self.address: int = self._words.buffer_info()[0]

    def begin(self) -> None:
        """Begin a step."""
        for idx in range(len(self._words)):
            self._words[idx] = 0

    def count(
        self, expert: int, waited_ns: int, compute_ns: int, idle_ns: int, trip_ns: int
    ) -> None:
        """Count an answer, `trip_ns` after its dispatch (0: not its first part)."""
        words = self._words
        words[hops.NUM_ANSWERS // 8] += 1
        words[hops.WAIT_NS // 8] += waited_ns
        words[hops.EXPERT_NS // 8 + expert] += compute_ns
        if trip_ns and waited_ns > hops.WAITED_NS and idle_ns > hops.WAITED_NS:
            words[hops.LINK_NS // 8] += max(0, trip_ns - compute_ns) // 2
            words[hops.NUM_LINKS // 8] += 1

    @property
    def has_answers(self) -> bool:
        """Return whether an answer has come in this step."""
        return self._words[hops.NUM_ANSWERS // 8] > 0

    @property
    def times(self) -> NetTimes:
        """Return the sums so far."""
        _, wait_ns, link_ns, num_links, *expert_ns = self._words
        return NetTimes(
            wait_s=wait_ns * 1e-9,
            expert_s=max(expert_ns, default=0) * 1e-9,
            link_s=link_ns * 1e-9 / num_links if num_links else None,
        )


class AttentionSide:
    """Invariant: outside of recordings, a flight exists exactly while some expert node owes an
    answer."""

    def __init__(
        self,
        me: Identity,
        *,
        expert_incarnations: Sequence[int | None],
        table: ExpertTable,
        lines: Lines,
        link: LinkEmulation | None = None,
        wait: WaitPolicy = "block",
    ) -> None:
        """Serve the expert nodes with these incarnations (None: an absent one)."""
        shape = me.shape
        self.shape = shape
        self.trace: Stamps | None = None
        self._me = me
        self._spins = wait == "spin"
        self._experts = tuple(each or 0 for each in expert_incarnations)
        present = {expert for expert, each in enumerate(expert_incarnations) if each is not None}
        self._everyone = tuple(sorted(present))
        self._rules: AttentionRules[_Flight, RouteMap] = AttentionRules(
            me.index if me.participant is None else me.participant,
            shape,
            num_experts=len(self._experts),
            make_route=route_map,
            absent=set(range(len(self._experts))) - present,
        )
        self._layout = PairLayout(shape)
        self._shapers = [link.shaper if link else None for _ in self._experts]
        # By expert node and micro-batch, the number of frames sent.
        self._sequences = [array("Q", bytes(8 * shape.num_micro_batches)) for _ in self._experts]
        self._step_words = array("Q", (0, 0))
        self._parts = PartFrames(me, experts=self._experts)
        self._route: RouteMap | None = None
        self._epoch = 0
        self._measured = _Measured(len(self._experts))
        self.use(lines)
        self.set_table(table)

    def use(self, lines: Lines) -> None:
        """Send and receive over `lines` from now on."""
        self.lines = lines
        self._in_place = lines if isinstance(lines, InPlaceLines) else None
        self._has_ports = self._has_flags = False
        # By micro-batch, what native.add_answers reads.
        self._answering: list[array[int]] = []
        self._records = self._make_records() if native_serves(self.shape) else None
        self._answer_words = {
            expert: [
                lines.inbox(expert, each).words for each in range(self.shape.num_micro_batches)
            ]
            for expert in self._everyone
        }

    def _make_records(self) -> dict[int, list[Record]]:
        micro_batches = range(self.shape.num_micro_batches)
        ports = {
            (expert, each): self.lines.port(expert, each)
            for expert in self._everyone
            for each in micro_batches
        }
        self._has_ports = None not in ports.values()
        self._has_flags = any(port is not None and port.in_flag for port in ports.values())
        hops.prepare()
        records = {
            expert: [
                Record(
                    self._layout,
                    (self._me.index, expert, micro_batch),
                    (self._me.incarnation, self._experts[expert]),
                    outbox=self.lines.outbox(expert, micro_batch),
                    inbox=self.lines.inbox(expert, micro_batch),
                    count=self._sequences[expert],
                    port=ports[expert, micro_batch],
                    shaper=self._shapers[expert],
                    sends_all=len(self._experts) == 1,
                    in_place=self._in_place is not None,
                )
                for micro_batch in micro_batches
            ]
            for expert in self._everyone
        }
        for micro_batch in micro_batches:
            addresses = [records[expert][micro_batch].address for expert in self._everyone]
            self._answering.append(array("Q", addresses + [0] * len(addresses)))
        return records

    @property
    def local(self) -> frozenset[int]:
        """Return the MoE layers that attention nodes compute in this step."""
        return self._rules.local

    @property
    def is_graph_safe(self) -> bool:
        """Return whether compiled code can do the hops of this step, if there are any."""
        return len(self.local) == self.shape.num_layers or (
            self._has_ports
            and self.shape.payload == self.shape.compute
            and self._route is not None
            and not any(self._route.choices)
        )

    @property
    def epoch(self) -> int:
        """Return a number that changes when another expert table comes into use."""
        return self._epoch

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close: all windows and the sum's scratch."""
        return self.lines.registered_bytes + self._parts.registered_bytes

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
            self._epoch += 1
        words = self._step_words
        words[hops.STEP // 8], words[hops.VERSION // 8] = ticket.step, ticket.table_version
        self._measured.begin()
        self.lines.begin(ticket)

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        num_rows: torch.Tensor | None = None,
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
            if hidden.dtype != self.shape.payload and self.shape.compressed is None:
                hidden = hidden.to(self.shape.payload)
            if weights.dtype != torch.float32:
                weights = weights.to(torch.float32)
            flight = _Flight(layer, hidden.shape)
            self._rules.flights[micro_batch] = flight
            if (
                self._records is not None
                and flight.size[0] <= self.shape.window_rows
                and experts.dtype == torch.int64
                and _is_at_hand(hidden)
                and _is_at_hand(experts)
                and _is_at_hand(weights)
            ):
                self._send_whole(layer, micro_batch, route, hidden, experts, weights)
            else:
                refuse_recording(f"a dispatch of {flight.size[0]} rows takes more than one frame")
                flight.parts = self._parts.plan(route, layer, hidden, experts, weights)
                for expert in self._everyone:
                    self._send_part(flight.parts, layer, expert, micro_batch, 0)
            flight.dispatched_ns = time.monotonic_ns()
        except BaseException as error:
            self._rules.fail(error)
            raise

    def _send_whole(
        self,
        layer: int,
        micro_batch: int,
        route: RouteMap,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Send every expert node its rows in one frame, written by one call."""
        assert self._records is not None
        chosen = experts
        choice = route.choices[layer]
        if choice is not None:
            check_known(route, layer, experts)
            chosen = choice.choose(experts.view(-1))
        columns = route.slot_of[layer]
        num_columns, columns_at = columns.shape[1], columns.data_ptr()
        for expert in self._everyone:
            arguments = (
                self._records[expert][micro_batch].address,
                chosen.data_ptr(),
                columns_at + expert * num_columns * columns.itemsize,
                num_columns,
                hidden.shape[0],
                hidden.data_ptr(),
                weights.data_ptr(),
                layer,
                self._step_words.buffer_info()[0],
            )
            finish = partial(self._finish_send, route, layer, expert, micro_batch, experts, hidden)
            launch_alone(hops.send_rows, arguments, finish)

    def _finish_send(
        self,
        route: RouteMap,
        layer: int,
        expert: int,
        micro_batch: int,
        experts: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Publish the frame that hops.send_rows has written; or it has written none."""
        with self._rules:
            assert self._records is not None
            record = self._records[expert][micro_batch]
            if not record.words[SENT_NS]:
                check_known(route, layer, experts)
                raise AssertionError("every expert id has a column")
            sources = []
            if runs := record.runs:
                data, size = bytes_of(hidden), hidden.shape[1] * hidden.itemsize
                sources = [data[first * size : end * size] for first, end in runs]
            sequence = self._sequences[expert][micro_batch]
            self._send(layer, expert, micro_batch, record.words[ROWS], sequence, sources)

    def _send_part(
        self, parts: Parts, layer: int, expert: int, micro_batch: int, part: int
    ) -> None:
        """Write one part straight into the request window and publish it."""
        sequence = self._next_sequence(expert, micro_batch)
        sources = []
        if self._in_place is not None:
            sources = self._parts.in_place(parts, expert=expert, part=part)
        rows = self._parts.write(
            parts,
            self.lines.outbox(expert, micro_batch),
            expert=expert,
            micro_batch=micro_batch,
            layer=layer,
            part=part,
            step=self._rules.step,
            sequence=sequence,
            with_hidden=not sources,
        )
        self._send(layer, expert, micro_batch, rows, sequence, sources)

    def _next_sequence(self, expert: int, micro_batch: int) -> int:
        sequences = self._sequences[expert]
        sequences[micro_batch] += 1
        return sequences[micro_batch]

    def _send(
        self,
        layer: int,
        expert: int,
        micro_batch: int,
        rows: int,
        sequence: int,
        sources: list[memoryview],
    ) -> None:
        """Publish the content of the request window, over the emulated link if there is one.

        `sources` are the hidden rows if they are not in it.
        """
        shaper = self._shapers[expert]
        if shaper is not None:
            size = HEADER_BYTES + rows * self._layout.request_row_bytes
            deliver_ns = shaper.deliver_ns(size, now_ns=time.monotonic_ns())
            self.lines.outbox(expert, micro_batch).words[DELIVER_WORD] = deliver_ns
        hop = self._hop(layer, expert, micro_batch)
        if sources:
            assert self._in_place is not None
            self._in_place.send_from(hop, rows, sequence, sources)
        else:
            self.lines.send(hop, rows, sequence)

    def _hop(self, layer: int, expert: int, micro_batch: int) -> Hop:
        """Return the hop of a frame whose wait begins now; that of a step's first may be long."""
        is_first = not self._measured.has_answers
        patience_s = self._rules.patience_s if is_first else self.shape.deadline_s
        return Hop(expert, micro_batch, layer, time.monotonic() + patience_s)

    def combine(self, micro_batch: int, layer: int, out: torch.Tensor) -> torch.Tensor:
        """Fill out [T, H] fp32 with the sum of all partials of that dispatch and return it."""
        self._rules.check_usable()
        try:
            flight = self._rules.flight(micro_batch, layer, out)
            if flight.parts is None:
                self._consume_whole(layer, micro_batch, out)
            else:
                if not self._parts.writes_first(flight.parts):
                    out.zero_()
                self._consume_parts(flight, flight.parts, micro_batch, out)
        except BaseException as error:
            self._rules.fail(error)
            raise
        self._rules.flights[micro_batch] = None
        if self.trace is not None:
            self.trace.stamp(Kind.COMBINED, layer, micro_batch)
        return out

    def wait_s(self) -> float:
        """Return the seconds spent waiting in combine() since begin()."""
        return self._measured.times.wait_s

    def times(self) -> NetTimes:
        """Return the measured times since begin()."""
        return self._measured.times

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        self._rules.close()
        self._records, self._answer_words = None, {}
        self.lines.close()

    def _consume_whole(self, layer: int, micro_batch: int, out: torch.Tensor) -> None:
        """Receive every node's single answer; one call checks and adds them all."""
        assert self._records is not None
        everyone = self._everyone
        total = out if _is_at_hand(out) else torch.empty(out.shape, dtype=torch.float32)
        for position, expert in enumerate(everyone):
            record = self._records[expert][micro_batch]
            if self._has_flags or is_recording():
                wait = partial(self._await_whole, layer, expert, micro_batch, everyone[position:])
                launch_alone(hops.await_frame, (record.place, 0, 0), wait)
            else:
                record.words[WAIT_BEGAN_NS] = time.monotonic_ns()
                self._await_whole(layer, expert, micro_batch, everyone[position:])
            if self.trace is not None:
                self.trace.stamp(Kind.ARRIVED, layer, micro_batch, expert)
        records, num_records = self._answering[micro_batch], len(everyone)
        arguments = (
            records.buffer_info()[0],
            num_records,
            total.data_ptr(),
            total.shape[0],
            self._measured.address,
        )
        launch_alone(hops.add_rows, arguments, partial(self._refuse_answer, micro_batch))
        if total is not out:
            out.copy_(total)

    def _await_whole(
        self, layer: int, expert: int, micro_batch: int, awaited: tuple[int, ...]
    ) -> None:
        """Wait for an answer for longer than hops.await_frame does, or see what is wrong."""
        with self._rules:
            assert self._records is not None
            self._await(layer, expert, micro_batch, awaited)
            self._records[expert][micro_batch].words[ARRIVED_NS] = time.monotonic_ns()

    def _refuse_answer(self, micro_batch: int) -> None:
        """Raise FrameError or StaleFrame for an answer that does not match its request."""
        with self._rules:
            assert self._records is not None
            for expert in self._everyone:
                header = read_header(self.lines.inbox(expert, micro_batch).header)
                sent = read_header(self._records[expert][micro_batch].request)
                self._parts.check_answer(header, sent, expert)
            raise FrameError("an answer changed while it was read")

    def _consume_parts(
        self, flight: _Flight, parts: Parts, micro_batch: int, out: torch.Tensor
    ) -> None:
        """Receive every part of every node; send the next part after each received one."""
        pending = self._everyone
        part = 0
        while pending:
            for position, expert in enumerate(pending):
                raw = self._receive_part(flight, parts, expert, micro_batch, pending[position:])
                window = self.lines.inbox(expert, micro_batch)
                self._parts.read(parts, raw, window, expert=expert, out=out)
                if part + 1 < parts.counts[expert]:
                    self._send_part(parts, flight.layer, expert, micro_batch, part + 1)
            part += 1
            pending = tuple(expert for expert in pending if parts.counts[expert] > part)
        self._parts.finish(parts, out)

    def _receive_part(
        self,
        flight: _Flight,
        parts: Parts,
        expert: int,
        micro_batch: int,
        awaited: tuple[int, ...],
    ) -> bytes:
        """Wait for the answer to the last part to `expert`; return its header, unchecked.

        Counts the wait, the expert's time and, if the frame never waited on either side, the
        link's.
        """
        start_ns = time.monotonic_ns()
        raw = self._await(flight.layer, expert, micro_batch, awaited)
        now_ns = time.monotonic_ns()
        if self.trace is not None:
            self.trace.stamp(Kind.ARRIVED, flight.layer, micro_batch, expert)
        words = self._answer_words[expert][micro_batch]
        is_first = parts.sent[expert].part == 0
        self._measured.count(
            expert,
            now_ns - start_ns,
            words[COMPUTE_WORD],
            words[IDLE_WORD],
            now_ns - flight.dispatched_ns if is_first else 0,
        )
        return raw

    def _await(self, layer: int, expert: int, micro_batch: int, awaited: tuple[int, ...]) -> bytes:
        """Wait for the answer to the last frame to `expert`; return its header, unchecked."""
        hop = self._hop(layer, expert, micro_batch)
        raw = self.lines.receive(hop, awaited)
        if self._answer_words[expert][micro_batch][DELIVER_WORD]:
            deliver_ns = read_header(raw).deliver_ns
            if not wait_delivery(deliver_ns, deadline_s=hop.deadline_s, spins=self._spins):
                raise late("expert", hop)
        return raw


def _is_at_hand(tensor: torch.Tensor) -> bool:
    """Return whether compiled code may access the tensor's memory."""
    return tensor.is_cpu and tensor.is_contiguous()
