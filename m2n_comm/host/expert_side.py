"""The expert node's end of M2N, the same for every transport: implements ExpertNet.

Owns the rounds (part r of every participant that has one, joined), the headers and their checks,
and the return of every answer row to its sender; rules.ExpertRules checks tickets and tables. Knows
no socket, no memory mapping and no weights. Runs in the one busy thread of an expert node; local.py
runs it inline.

While a ticket is recorded, a batch has as many rows of each participant as the ticket's bucket
says, in memory of its own, and the hops are ops of the recording (hops.py). They find the records
of the participants by their place among them, so a recording serves other participants too; only
its stamps name those of the recorded ticket.

The check of the slots trusts that a peer (same user, same engine) does not rewrite a window
after publishing it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kernels.cpu.compiled.runtime import is_recording, launch_alone, refuse_recording
from kernels.frame_header import FrameHeader
from kernels.recordings import MAX_RECORDED_ROWS
from m2n_comm.emulate import LinkEmulation, wait_delivery
from m2n_comm.hello import Identity
from m2n_comm.host import hops
from m2n_comm.host.expert_rows import count_choices
from m2n_comm.host.lines import InPlaceLines, Lines, bytes_of
from m2n_comm.host.native import (
    ARRIVED_NS,
    ROWS,
    Record,
    copy_request,
    take_request,
)
from m2n_comm.host.native import serves as native_serves
from m2n_comm.host.windows import PairLayout, WindowRows
from m2n_comm.host.wire import (
    DELIVER_WORD,
    HEADER_BYTES,
    REQUEST,
    answer_to,
    check_header,
    check_size,
    payload_code,
    read_header,
    write_header,
)
from m2n_comm.net import ExpertBatch, NetShape, Senders
from m2n_comm.payload import unpack_rows
from m2n_comm.rules import ExpertRules
from m2n_comm.waits import Hop, WaitPolicy, late
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Kind, Stamps


class Arrived(NamedTuple):
    """The rows of one frame; `is_placed`: its hidden rows are in the join buffer already."""

    rows: WindowRows
    is_placed: bool


class _Join:
    """Rows of several windows, joined in the compute dtype in buffers allocated at start.

    If only one peer has rows, in the compute dtype, they are read in place in its window.
    """

    def __init__(self, shape: NetShape, num_peers: int) -> None:
        rows = shape.window_rows * num_peers
        compute = shape.compute or shape.payload
        self._hidden = torch.empty((rows, shape.hidden_size), dtype=compute)
        self._slots = torch.empty((rows, shape.top_k), dtype=torch.int32)
        self._weights = torch.empty((rows, shape.top_k), dtype=torch.float32)
        packed_rows = shape.window_rows if shape.compressed else 0
        self._scratch = torch.empty((packed_rows, shape.hidden_size), dtype=torch.float32)
        self._is_packed = shape.compressed is not None
        self._in_place = compute == shape.request_dtype
        self._strides = [
            (buffer.data_ptr(), buffer.shape[1] * buffer.itemsize)
            for buffer in (self._hidden, self._slots, self._weights)
        ]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all buffers."""
        each = (self._hidden, self._slots, self._weights, self._scratch)
        return sum(buffer.nbytes for buffer in each)

    @property
    def takes_rows(self) -> bool:
        """Return whether hidden rows are kept as they travel, so that a line may write them."""
        return self._in_place

    def place(self, low: int) -> int:
        """Return the address of hidden row `low`."""
        at, row_bytes = self._strides[0]
        return at + low * row_bytes

    def join(self, found: list[Arrived]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return hidden, slots and weights of all rows, valid until the next call."""
        if len(found) == 1 and not found[0].is_placed:
            rows, hidden = found[0].rows, found[0].rows.hidden
            if not self._in_place:
                hidden = self._hidden[: len(rows.hidden)]
                self._take(rows, hidden)
            return hidden, rows.slots, rows.weights
        low = 0
        for rows, is_placed in found:
            high = low + len(rows.hidden)
            if not is_placed:
                self._take(rows, self._hidden[low:high])
            self._slots[low:high].copy_(rows.slots)
            self._weights[low:high].copy_(rows.weights)
            low = high
        return self._hidden[:low], self._slots[:low], self._weights[:low]

    def join_taken(self, taken: list[tuple[int, int, bool]]) -> tuple[torch.Tensor, ...] | None:
        """Return join() of the frames that take_request() took: record, rows, whether placed.

        One call copies each. None if join() must widen their rows, or need not copy them.
        """
        if len(taken) < 2 or not self._in_place:
            return None
        low = 0
        for address, rows, is_placed in taken:
            hidden, slots, weights = (at + low * row_bytes for at, row_bytes in self._strides)
            copy_request(address, 0 if is_placed else hidden, slots, weights, rows)
            low += rows
        return self._hidden[:low], self._slots[:low], self._weights[:low]

    def _take(self, found: WindowRows, out: torch.Tensor) -> None:
        """Copy hidden rows out of a window, in the compute dtype."""
        if self._is_packed:
            unpack_rows(found.hidden, found.scales, out, self._scratch)
        else:
            out.copy_(found.hidden)


class ExpertSide:
    """Invariant: outside of recordings, `_row_counts` are the rows of each sender of the open
    batch, in order."""

    epoch = 0

    def __init__(
        self,
        me: Identity,
        *,
        attention_incarnations: Sequence[int | None],
        lines: Lines,
        table: ExpertTable,
        links: Sequence[LinkEmulation | None] = (),
        wait: WaitPolicy = "block",
        senders: Senders = (),
    ) -> None:
        """Serve the attention nodes with these incarnations (None: an absent one)."""
        shape = me.shape
        self.shape = shape
        self.trace: Stamps | None = None
        self._me = me
        self._spins = wait == "spin"
        self._attention = {
            peer: each for peer, each in enumerate(attention_incarnations) if each is not None
        }
        self._rules = ExpertRules(me.index, shape, peers=self._attention)
        self._layout = PairLayout(shape)
        self._request_payload = payload_code(shape.request_dtype)
        self._answer_payload = payload_code(shape.payload)
        self._shapers = [link.shaper if link else None for link in links] or [
            None for _ in attention_incarnations
        ]
        # By attention node and micro-batch, the number of frames taken.
        self._sequences = {
            peer: array("Q", bytes(8 * shape.num_micro_batches)) for peer in self._attention
        }
        self._step_words, self._batch_times = array("Q", (0, 0)), array("q", (0, 0, 0, 0))
        self._senders = senders or (tuple(range(len(attention_incarnations))),) * shape.num_layers
        # By who sends for whom and by micro-batch, the addresses of the participants' records.
        self._places = {
            each: [array("Q", bytes(8 * len(each))) for _ in range(shape.num_micro_batches)]
            for each in self._senders
        }
        self._join = _Join(shape, len(attention_incarnations))
        self._micro_batch = 0
        self._pending: tuple[int, ...] = ()
        self._row_counts: dict[int, int] = {}
        # The headers of frames that native.py does not take, by sender.
        self._headers: dict[int, FrameHeader] = {}
        self._gathered_ns = 0
        self._began_ns = 0
        self._idle_ns = 0
        # The senders of the open batch whose hidden rows were read into the join buffer.
        self._placed: set[int] = set()
        self.use(lines)
        self.set_table(table)

    def use(self, lines: Lines) -> None:
        """Send and receive over `lines` from now on."""
        self.lines = lines
        self._in_place = lines if isinstance(lines, InPlaceLines) else None
        self._has_ports = False
        self._records = self._make_records() if native_serves(self.shape) else None
        self._deliver_words = {
            peer: [lines.inbox(peer, each).words for each in range(self.shape.num_micro_batches)]
            for peer in self._attention
        }

    def _make_records(self) -> dict[int, list[Record]]:
        micro_batches = range(self.shape.num_micro_batches)
        ports = {
            (peer, each): self.lines.port(peer, each)
            for peer in self._attention
            for each in micro_batches
        }
        self._has_ports = None not in ports.values()
        hops.prepare()
        return {
            peer: [
                Record(
                    self._layout,
                    (peer, self._me.index, micro_batch),
                    (self._me.incarnation, incarnation),
                    outbox=self.lines.outbox(peer, micro_batch),
                    inbox=self.lines.inbox(peer, micro_batch),
                    count=self._sequences[peer],
                    port=ports[peer, micro_batch],
                    shaper=self._shapers[peer],
                )
                for micro_batch in micro_batches
            ]
            for peer, incarnation in self._attention.items()
        }

    @property
    def local(self) -> frozenset[int]:
        """Return the MoE layers that attention nodes compute in this step."""
        return self._rules.local

    @property
    def is_graph_safe(self) -> bool:
        """Return whether compiled code can do the hops of this step: few rows, in plain frames."""
        ticket = self._rules.ticket
        return (
            self._has_ports
            and self.shape.payload == self.shape.compute
            and ticket is not None
            and max(ticket.row_buckets) <= min(self.shape.window_rows, MAX_RECORDED_ROWS)
        )

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close: all windows and the join buffer."""
        return self.lines.registered_bytes + self._join.size_bytes

    @property
    def busy_s(self) -> float:
        """Return the seconds for which the thread had a core, from rows to answers of batches."""
        return self._batch_times[hops.BUSY_NS // 8] * 1e-9

    def set_table(self, table: ExpertTable) -> None:
        """Serve tickets of `table` too, and refuse slots beyond it; see ExpertNet.set_table.

        Raises ProtocolError if it does not fit.
        """
        self._rules.set_table(table)

    def begin(self, ticket: StepTicket) -> None:
        """Open a step. Raises ProtocolError."""
        self._rules.begin(ticket)
        words = self._step_words
        words[hops.STEP // 8], words[hops.VERSION // 8] = ticket.step, ticket.table_version
        if self._records is not None:
            for sends_for, places in self._places.items():
                for micro_batch in range(ticket.num_micro_batches):
                    for position, index in enumerate(ticket.participants):
                        address = self._records[sends_for[index]][micro_batch].address
                        places[micro_batch][position] = address
        if self.trace is not None:
            self.trace.step = ticket.step
            self.trace.stamp(Kind.STEP_BEGAN)
        self.lines.begin(ticket)

    def is_sent_rows(self, ticket: StepTicket) -> bool:
        """Say whether any layer of a step is not local."""
        return len(self._rules.local_of(ticket.table_version)) < self.shape.num_layers

    def gather(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        """Yield the parts of that micro-batch, each joined over the ticket's participants.

        Raises TransportError: PeerLost, DeadlineExceeded, StaleFrame, FrameError.
        """
        self._pending = self._peers(self._rules.check_gather(micro_batch), layer)
        self._micro_batch = micro_batch
        if is_recording():
            return self._recorded(micro_batch, layer)
        return self._rounds(micro_batch, layer)

    def reply(self, batch: ExpertBatch, partial: torch.Tensor) -> None:
        """Send partial [R, H] (any float dtype) back, each row to its sender."""
        if self.trace is not None:
            self.trace.stamp(Kind.COMPUTED, batch.layer, batch.micro_batch)
        self._rules.check_usable()
        if is_recording():
            self._reply_recorded(batch, partial)
            return
        try:
            counts = self._answer_counts(batch)
            num_rows = sum(counts)
            self._rules.check_reply(batch, partial, num_rows)
            low = 0
            for peer, rows in zip(self._row_counts, counts, strict=True):
                share = partial if rows == num_rows else partial[low : low + rows]
                low += rows
                header = self._headers.get(peer)
                if header is None:
                    self._answer_whole(batch, peer, share, rows)
                else:
                    self._answer_part(batch, peer, share, header._replace(rows=rows))
        except BaseException as error:
            self._rules.fail(error)
            raise
        self._batch_times[hops.BUSY_NS // 8] += time.thread_time_ns() - self._began_ns
        part = batch.part + 1
        self._pending = tuple(peer for peer, h in self._headers.items() if h.num_parts > part)
        self._rules.open = None
        if self.trace is not None:
            self.trace.stamp(Kind.REPLIED, batch.layer, batch.micro_batch)

    def _answer_whole(self, batch: ExpertBatch, peer: int, share: torch.Tensor, rows: int) -> None:
        """Answer a frame that take_request() took: one call writes rows and header."""
        assert self._records is not None
        micro_batch = batch.micro_batch
        partial_at = 0
        if self._is_at_hand(share):
            partial_at = share.data_ptr()
        elif rows:
            self.lines.outbox(peer, micro_batch).first(rows).hidden.copy_(share)
        times = self._batch_times
        times[hops.GATHERED_NS // 8], times[hops.IDLE_NS // 8] = self._gathered_ns, self._idle_ns
        arguments = (self._records[peer][micro_batch].place, partial_at, times.buffer_info()[0], 0)
        finish = partial(self._finish_answer, batch.layer, micro_batch, peer, share)
        launch_alone(hops.send_answer, arguments, finish)

    def _is_at_hand(self, share: torch.Tensor) -> bool:
        """Return whether rows lie in host memory just as they are sent."""
        return share.dtype == self.shape.payload and share.is_cpu and share.is_contiguous()

    def _source(self, share: torch.Tensor) -> memoryview | None:
        """Return the rows' bytes if the lines can send them from there."""
        if self._in_place is None or not len(share) or not self._is_at_hand(share):
            return None
        return bytes_of(share)

    def _send(self, hop: Hop, rows: int, sequence: int, source: memoryview | None) -> None:
        """Publish the answer in the outbox; `source` are its rows if they are not there."""
        if source is None:
            self.lines.send(hop, rows, sequence)
        else:
            assert self._in_place is not None
            self._in_place.send_from(hop, rows, sequence, [source])

    def _delay(self, peer: int, micro_batch: int, payload_bytes: int) -> None:
        """Give the answer in the window its delivery time over the emulated link, if any."""
        shaper = self._shapers[peer]
        if shaper is not None:
            size = HEADER_BYTES + payload_bytes
            deliver_ns = shaper.deliver_ns(size, now_ns=time.monotonic_ns())
            self.lines.outbox(peer, micro_batch).words[DELIVER_WORD] = deliver_ns

    def _answer_part(
        self, batch: ExpertBatch, peer: int, share: torch.Tensor, request: FrameHeader
    ) -> None:
        """Answer one part, or a frame that needs more than copying its rows."""
        window = self.lines.outbox(peer, batch.micro_batch)
        source = self._source(share)
        if source is None and request.rows:
            window.first(request.rows).hidden.copy_(share)
        write_header(window.header, self._answer(request, peer))
        hop = self._hop(peer, batch.micro_batch, batch.layer)
        self._send(hop, request.rows, request.sequence, source)

    def finish(self) -> None:
        """Do nothing: on the host all answers have left."""

    def missing(self) -> list[int]:
        """Return the attention nodes whose frame the next round of gather() would wait for."""
        arrived = self.lines.arrived
        return [peer for peer in self._pending if not arrived(peer, self._micro_batch)]

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        self._rules.close()
        self._rules.open = None
        self._records, self._deliver_words = None, {}
        self.lines.close()

    def _recorded(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        """Yield the one batch of a recording's layer, with a bucket of rows per participant."""
        ticket = self._rules.check_gather(micro_batch)
        bucket, num_peers = max(ticket.row_buckets[micro_batch], 1), len(ticket.participants)
        rows, top_k = bucket * num_peers, self.shape.top_k
        hidden = torch.empty((rows, self.shape.hidden_size), dtype=self.shape.payload)
        slots = torch.empty((rows, top_k), dtype=torch.int32)
        weights = torch.empty((rows, top_k), dtype=torch.float32)
        for position in range(num_peers):
            first = position * bucket
            wait = partial(self._await_recorded, layer, micro_batch, position)
            place = self._place(layer, micro_batch, position)
            hidden_at = hidden.data_ptr() + first * hidden.stride(0) * hidden.itemsize
            launch_alone(hops.await_frame, (place, hidden_at, bucket), wait)
            if self.trace is not None:
                peer = self._peers(ticket, layer)[position]
                self.trace.stamp(Kind.GATHERED, layer, micro_batch, peer)
            arguments = (
                place,
                layer,
                self._step_words.buffer_info()[0],
                self._rules.num_slots[layer],
                bucket,
                hidden_at,
                slots.data_ptr() + first * slots.stride(0) * slots.itemsize,
                weights.data_ptr() + first * weights.stride(0) * weights.itemsize,
                self._batch_times.buffer_info()[0],
                int(position == 0),
            )
            refuse = partial(self._refuse_recorded, layer, micro_batch, position)
            launch_alone(hops.take_rows, arguments, refuse)
        if self.trace is not None:
            self.trace.stamp(Kind.JOINED, layer, micro_batch)
        batch = self._rules.open = ExpertBatch(
            micro_batch,
            layer,
            0,
            hidden,
            slots,
            weights,
            (bucket,) * num_peers,
            ticket.table_version,
        )
        yield batch

    def _reply_recorded(self, batch: ExpertBatch, partial_rows: torch.Tensor) -> None:
        """Send every participant its rows of a recording's batch."""
        with self._rules:
            self._rules.check_reply(batch, partial_rows, len(batch.hidden))
        if partial_rows.dtype != self.shape.payload or not partial_rows.is_contiguous():
            refuse_recording(f"partial sums in {partial_rows.dtype} are not what travels")
            partial_rows = partial_rows.to(self.shape.payload).contiguous()
        first = 0
        for position, bucket in enumerate(batch.row_counts):
            place = self._place(batch.layer, batch.micro_batch, position)
            is_last = position == len(batch.row_counts) - 1
            times_at = self._batch_times.buffer_info()[0]
            arguments = (place, partial_rows[first:].data_ptr(), times_at, int(is_last))
            share = partial_rows[first : first + bucket]
            finish = partial(self._finish_recorded, batch.layer, batch.micro_batch, position, share)
            launch_alone(hops.send_answer, arguments, finish)
            first += bucket
        self._pending = ()
        self._rules.open = None
        if self.trace is not None:
            self.trace.stamp(Kind.REPLIED, batch.layer, batch.micro_batch)

    def _peers(self, ticket: StepTicket, layer: int) -> tuple[int, ...]:
        """Return who sends the rows of the ticket's participants in a layer."""
        sends_for = self._senders[layer]
        return tuple(sends_for[index] for index in ticket.participants)

    def _place(self, layer: int, micro_batch: int, position: int) -> int:
        """Return the address of the word with the record of the ticket's participant."""
        places = self._places[self._senders[layer]][micro_batch]
        return places.buffer_info()[0] + places.itemsize * position

    def _peer(self, layer: int, position: int) -> int:
        ticket = self._rules.ticket
        assert ticket is not None
        return self._peers(ticket, layer)[position]

    def _await_recorded(self, layer: int, micro_batch: int, position: int) -> None:
        """Wait for a request for longer than hops.await_frame does, or see what is wrong."""
        with self._rules:
            assert self._rules.ticket is not None
            assert self._records is not None
            pending = self._peers(self._rules.ticket, layer)[position:]
            self._receive_slowly(self._hop(pending[0], micro_batch, layer), pending)
            self._records[pending[0]][micro_batch].words[ARRIVED_NS] = time.monotonic_ns()

    def _refuse_recorded(self, layer: int, micro_batch: int, position: int) -> None:
        """Raise the error of a request that does not fit the ticket."""
        with self._rules:
            ticket, peer = self._rules.ticket, self._peer(layer, position)
            assert ticket is not None
            header = read_header(self.lines.inbox(peer, micro_batch).header)
            self._sequences[peer][micro_batch] += 1
            self._check(ticket, header, self._hop(peer, micro_batch, layer), 0, None)
            bucket = ticket.row_buckets[micro_batch]
            if header.num_parts > 1 or header.rows > bucket:
                raise FrameError(
                    f"frame of attention {peer}: {header.rows} rows in {header.num_parts} parts, "
                    f"the ticket said at most {bucket}"
                )
            slots = self.lines.inbox(peer, micro_batch).first(header.rows).slots.clone()
            self._check_slots(slots, layer, micro_batch)
            raise FrameError(f"frame of attention {peer}: it changed while it was read")

    def _finish_recorded(
        self, layer: int, micro_batch: int, position: int, share: torch.Tensor
    ) -> None:
        """Publish a participant's answer that hops.send_answer has written or begun to send."""
        with self._rules:
            self._finish_answer(layer, micro_batch, self._peer(layer, position), share)

    def _finish_answer(self, layer: int, micro_batch: int, peer: int, share: torch.Tensor) -> None:
        """Publish the answer, the first rows of `share`."""
        assert self._records is not None
        rows = self._records[peer][micro_batch].words[ROWS]
        self._delay(peer, micro_batch, rows * self._layout.answer_row_bytes)
        sequence = self._sequences[peer][micro_batch]
        hop = self._hop(peer, micro_batch, layer)
        self._send(hop, rows, sequence, self._source(share[:rows]))

    def _rounds(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        part = 0
        while self._pending:
            ticket = self._rules.check_gather(micro_batch)
            try:
                batch = self._rules.open = self._collect(ticket, micro_batch, layer, part)
            except BaseException as error:
                self._rules.fail(error)
                raise
            yield batch
            part += 1

    def _collect(self, ticket: StepTicket, micro_batch: int, layer: int, part: int) -> ExpertBatch:
        """Receive part `part` of every participant that has one and join the rows."""
        previous, self._headers = self._headers, {}
        self._row_counts = {}
        started_ns = time.monotonic_ns()
        self._placed = set()
        for position, peer in enumerate(self._pending):
            hop = self._hop(peer, micro_batch, layer)
            self._receive(hop, self._pending[position:], sum(self._row_counts.values()))
            if self.trace is not None:
                self.trace.stamp(Kind.GATHERED, layer, micro_batch, peer)
            self._sequences[peer][micro_batch] += 1
            rows = self._take(ticket, peer, micro_batch, layer) if part == 0 else -1
            if rows < 0:
                header = read_header(self.lines.inbox(peer, micro_batch).header)
                self._check(ticket, header, hop, part, previous.get(peer) if part else None)
                self._headers[peer] = header
                rows = header.rows
            self._row_counts[peer] = rows
        self._gathered_ns = time.monotonic_ns()
        self._idle_ns = self._gathered_ns - started_ns
        self._began_ns = time.thread_time_ns()
        batch = self._batch(ticket, micro_batch, layer, part)
        if self._headers:
            self._check_slots(batch.slots, layer, micro_batch)
        if self.trace is not None:
            self.trace.stamp(Kind.JOINED, layer, micro_batch)
        return batch

    def _receive(self, hop: Hop, pending: tuple[int, ...], low: int) -> None:
        """Wait for the next frame of hop.peer, whose first row is row `low` of the batch."""
        if self._records is None:
            self._receive_slowly(hop, pending)
            return
        record = self._records[hop.peer][hop.micro_batch]
        place = 0
        if self._join.takes_rows and len(self._pending) > 1:
            place = self._join.place(low)
        wait = partial(self._receive_slowly, hop, pending)
        launch_alone(hops.await_frame, (record.place, place, self.shape.window_rows), wait)
        if place and record.is_placed:
            self._placed.add(hop.peer)

    def _receive_slowly(self, hop: Hop, pending: tuple[int, ...]) -> None:
        """Wait for longer than hops.await_frame does, or see what is wrong."""
        raw = self.lines.receive(hop, pending)
        if self._deliver_words[hop.peer][hop.micro_batch][DELIVER_WORD]:
            deliver_ns = read_header(raw).deliver_ns
            if not wait_delivery(deliver_ns, deadline_s=hop.deadline_s, spins=self._spins):
                raise late("attention", hop)

    def _take(self, ticket: StepTicket, peer: int, micro_batch: int, layer: int) -> int:
        """Return the rows of a common frame, fully checked; -1 if it is another kind."""
        if self._records is None:
            return -1
        rows: int = take_request(
            self._records[peer][micro_batch].address,
            layer,
            ticket.table_version,
            ticket.step,
            self._sequences[peer][micro_batch],
            self._rules.num_slots[layer],
        )
        return rows

    def _hop(self, peer: int, micro_batch: int, layer: int) -> Hop:
        """Return the hop of a frame whose wait begins now."""
        return Hop(peer, micro_batch, layer, time.monotonic() + self.shape.deadline_s)

    def _batch(self, ticket: StepTicket, micro_batch: int, layer: int, part: int) -> ExpertBatch:
        """Return the rows in the inboxes."""
        inbox = self.lines.inbox
        counts = {peer: rows for peer, rows in self._row_counts.items() if rows}
        joined = None
        if self._records is not None and not self._headers:
            records = self._records
            joined = self._join.join_taken(
                [
                    (records[peer][micro_batch].address, rows, peer in self._placed)
                    for peer, rows in counts.items()
                ]
            )
        hidden, slots, weights = joined or self._join.join(
            [
                Arrived(inbox(peer, micro_batch).first(rows), peer in self._placed)
                for peer, rows in counts.items()
            ]
        )
        return ExpertBatch(
            micro_batch,
            layer,
            part,
            hidden,
            slots,
            weights,
            tuple([counts.get(peer, 0) for peer in ticket.participants]),
            ticket.table_version,
        )

    def _check(
        self,
        ticket: StepTicket,
        header: FrameHeader,
        hop: Hop,
        part: int,
        first: FrameHeader | None,
    ) -> None:
        """Check every field; a later part must agree with the one before it."""
        origin = f"attention {hop.peer}"
        expected = FrameHeader(
            sequence=self._sequences[hop.peer][hop.micro_batch],
            rows=header.rows,
            step=ticket.step,
            table_version=ticket.table_version,
            layer=hop.layer,
            part=part,
            num_parts=first.num_parts if first else header.num_parts,
            incarnation=self._attention[hop.peer],
            reader_incarnation=self._me.incarnation,
            kind=REQUEST,
            payload=self._request_payload,
            attention=hop.peer,
            expert=self._me.index,
            micro_batch=hop.micro_batch,
            hidden_size=self.shape.hidden_size,
            payload_bytes=header.payload_bytes,
        )
        check_header(header, expected, origin=origin)
        check_size(
            header,
            window_rows=self.shape.window_rows,
            row_bytes=self._layout.request_row_bytes,
            origin=origin,
        )

    def _check_slots(self, slots: torch.Tensor, layer: int, micro_batch: int) -> None:
        """Raise FrameError if a slot is not on this node; -1 is a choice served elsewhere."""
        if not slots.numel():
            return
        low, high = (int(bound) for bound in torch.aminmax(slots))
        limit = self._rules.num_slots[layer]
        if low < -1 or high >= limit:
            raise FrameError(
                f"layer {layer}, micro-batch {micro_batch}: slots {low}..{high}, "
                f"{self._rules.name} has 0..{limit - 1}"
            )

    def _answer_counts(self, batch: ExpertBatch) -> list[int]:
        """Return the answer rows of each sender of `batch`."""
        counts = list(self._row_counts.values())
        if not self.shape.per_expert_answers:
            return counts
        return [count_choices(slots) for slots in torch.split(batch.slots, counts)]

    def _answer(self, request: FrameHeader, peer: int) -> FrameHeader:
        """Return the header of the answer to `request`: the same frame, the other way."""
        payload_bytes = request.rows * self._layout.answer_row_bytes
        deliver_ns = 0
        shaper = self._shapers[peer]
        if shaper is not None:
            deliver_ns = shaper.deliver_ns(HEADER_BYTES + payload_bytes, now_ns=time.monotonic_ns())
        return answer_to(request, payload=self._answer_payload)._replace(
            payload_bytes=payload_bytes,
            deliver_ns=deliver_ns,
            compute_ns=time.monotonic_ns() - self._gathered_ns,
            idle_ns=self._idle_ns,
        )
