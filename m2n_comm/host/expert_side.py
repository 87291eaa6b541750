"""The expert node's end of M2N, the same for every transport: implements ExpertNet.

Owns the rounds (part r of every participant that has one, joined), the headers and their
checks, and the way of every answer row back. Knows no socket, no memory mapping and no
weights. Runs in the one busy thread of an expert node; local.py runs it inline.

When only one participant has rows, in the compute dtype, they are read in place, in the
window that it wrote; otherwise they are joined in a buffer allocated at start. The check
of the slots trusts that a peer (same user, same engine) does not rewrite a window after
publishing it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from m2n_comm.host.emulate import LinkEmulation, wait_delivery
from m2n_comm.host.lines import Hop, Lines, describe, late
from m2n_comm.host.native import Record, take_request, write_answer
from m2n_comm.host.native import serves as native_serves
from m2n_comm.host.pair_sums import count_pairs
from m2n_comm.host.windows import PairLayout, WindowRows
from m2n_comm.host.wire import (
    ANSWER,
    DELIVER_WORD,
    HEADER_BYTES,
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
from m2n_comm.net import ExpertBatch, NetShape, WaitPolicy
from m2n_comm.payload import unpack_rows
from topspin.errors import FrameError, ProtocolError, TransportError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Kind, Ring

_MAX_SLOTS = 2**31 - 1


class ExpertSide:
    """Invariant: `_open` is the batch that reply() owes an answer to, if there is one.

    None in `attention_incarnations` is an absent node: it takes part in no step.
    """

    is_graph_safe = False
    epoch = 0

    def __init__(
        self,
        *,
        shape: NetShape,
        index: int,
        incarnation: int,
        attention_incarnations: tuple[int | None, ...],
        lines: Lines,
        links: tuple[LinkEmulation | None, ...] = (),
        table: ExpertTable | None = None,
        wait: WaitPolicy = "block",
    ) -> None:
        self.lines = lines
        self._spins = wait == "spin"
        self.shape = shape
        self._index = index
        self._incarnation = incarnation
        self._attention = {
            peer: each for peer, each in enumerate(attention_incarnations) if each is not None
        }
        layout = PairLayout(shape)
        self._request_row_bytes = layout.request_row_bytes
        self._answer_row_bytes = layout.answer_row_bytes
        self._payload = payload_code(shape.request_dtype)
        self._answer_start = (ANSWER, payload_code(shape.payload))
        self._shapers = [link.shaper if link else None for link in links] or [
            None for _ in attention_incarnations
        ]
        self._sequences = [[0] * shape.num_micro_batches for _ in attention_incarnations]
        rows = shape.window_rows * len(attention_incarnations)
        compute = shape.compute or shape.payload
        self._hidden = torch.empty((rows, shape.hidden_size), dtype=compute)
        self._in_place = compute == shape.request_dtype
        packed_rows = shape.window_rows if shape.compressed else 0
        self._scratch = torch.empty((packed_rows, shape.hidden_size), dtype=torch.float32)
        self._slots = torch.empty((rows, shape.top_k), dtype=torch.int32)
        self._weights = torch.empty((rows, shape.top_k), dtype=torch.float32)
        self._records = self._make_records(layout) if native_serves(shape) else None
        self._deliver_words = {
            peer: [lines.inbox(peer, each).words for each in range(shape.num_micro_batches)]
            for peer in self._attention
        }
        self._num_slots: dict[int, list[int]] = {}
        self._ticket: StepTicket | None = None
        self._micro_batch = 0
        self._pending: tuple[int, ...] = ()
        # The rows of each sender of the open batch; the header if its frame was not a common one.
        self._row_counts: dict[int, int] = {}
        self._headers: dict[int, FrameHeader] = {}
        self._open: ExpertBatch | None = None
        self._gathered_ns = 0
        self._idle_ns = 0
        self.trace: Ring | None = None
        self._failure: str | None = None
        if table is not None:
            self.set_table(table)

    def _make_records(self, layout: PairLayout) -> dict[int, list[Record]]:
        return {
            peer: [
                Record(
                    layout,
                    (peer, self._index, micro_batch),
                    (incarnation, self._incarnation),
                    outbox=self.lines.outbox(peer, micro_batch),
                    inbox=self.lines.inbox(peer, micro_batch),
                )
                for micro_batch in range(layout.shape.num_micro_batches)
            ]
            for peer, incarnation in self._attention.items()
        }

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close: all windows and the join buffer."""
        joined = self._hidden.nbytes + self._slots.nbytes + self._weights.nbytes
        return self.lines.registered_bytes + joined + self._scratch.nbytes

    def set_table(self, table: ExpertTable) -> None:
        """Learn how many slots each layer has here in table `table.version`.

        From then on a ticket of an unknown version is an error, and a slot beyond is
        refused. The newest two tables are kept. Raises ProtocolError if it does not fit.
        """
        table.validate()
        if len(table.slots) != self.shape.num_layers or not self._index < table.num_nodes:
            raise ProtocolError(
                f"expert table {table.version}: {len(table.slots)} layers over "
                f"{table.num_nodes} nodes; this is expert {self._index} of "
                f"{self.shape.num_layers} layers"
            )
        self._num_slots[table.version] = [len(held) for held in table.experts_of(self._index)]
        for version in sorted(self._num_slots)[:-2]:
            del self._num_slots[version]

    def begin(self, ticket: StepTicket) -> None:
        """Open a step. Raises ProtocolError."""
        self._check_usable()
        assert self._open is None, "reply() to the last batch first"
        known = self._attention
        ascending = tuple(sorted(set(ticket.participants))) == ticket.participants
        if not ascending or any(index not in known for index in ticket.participants):
            raise ProtocolError(f"step {ticket.step}: participants {ticket.participants}")
        if not 1 <= ticket.num_micro_batches <= self.shape.num_micro_batches:
            raise ProtocolError(
                f"step {ticket.step}: {ticket.num_micro_batches} micro-batches, "
                f"windows for {self.shape.num_micro_batches}"
            )
        if self._num_slots and ticket.table_version not in self._num_slots:
            raise ProtocolError(
                f"step {ticket.step}: expert table {ticket.table_version}, expert {self._index} "
                f"has {sorted(self._num_slots)}"
            )
        self._ticket = ticket
        if self.trace is not None:
            self.trace.step = ticket.step
            self.trace.stamp(Kind.STEP_BEGAN)
        self.lines.begin(ticket)

    def gather(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        """Yield the parts of that micro-batch, each joined over the ticket's participants.

        Raises TransportError: PeerLost, DeadlineExceeded, StaleFrame, FrameError.
        """
        self._check_usable()
        assert self._ticket is not None, "begin() first"
        assert micro_batch < self._ticket.num_micro_batches, "not a micro-batch of the ticket"
        assert self._open is None, "reply() to the last batch first"
        self._micro_batch = micro_batch
        self._pending = self._ticket.participants
        return self._rounds(micro_batch, layer)

    def reply(self, batch: ExpertBatch, partial: torch.Tensor) -> None:
        """Send partial [R, H] (any float dtype) back, each row to where it came from."""
        self._check_usable()
        assert batch is self._open, "reply() to the batch that gather() yielded last"
        if self.trace is not None:
            self.trace.stamp(Kind.COMPUTED, batch.layer, batch.micro_batch)
        try:
            counts = self._answer_counts(batch)
            want = (sum(counts), self.shape.hidden_size)
            if partial.shape != want or not partial.is_floating_point():
                raise FrameError(
                    f"reply: partial is {tuple(partial.shape)} {partial.dtype}, expected {want}"
                )
            low = 0
            for peer, rows in zip(self._row_counts, counts, strict=True):
                share = partial if rows == want[0] else partial[low : low + rows]
                low += rows
                header = self._headers.get(peer)
                if header is None:
                    self._answer_whole(batch, peer, share, rows)
                else:
                    self._answer_part(batch, peer, share, header._replace(rows=rows))
        except BaseException as error:
            self._failure = describe(error)
            raise
        part = batch.part + 1
        self._pending = tuple(peer for peer, h in self._headers.items() if h.num_parts > part)
        self._open = None
        if self.trace is not None:
            self.trace.stamp(Kind.REPLIED, batch.layer, batch.micro_batch)

    def _answer_whole(self, batch: ExpertBatch, peer: int, share: torch.Tensor, rows: int) -> None:
        """Answer a frame that take_request() took: rows and header are written by one call."""
        assert self._records is not None
        micro_batch = batch.micro_batch
        partial_at = 0
        if share.dtype == self.shape.payload and share.is_cpu and share.is_contiguous():
            partial_at = share.data_ptr()
        elif rows:
            self.lines.outbox(peer, micro_batch).first(rows).hidden.copy_(share)
        now_ns = time.monotonic_ns()
        payload_bytes = write_answer(
            self._records[peer][micro_batch].address,
            partial_at,
            min(now_ns - self._gathered_ns, MAX_MEASURED_NS),
            min(self._idle_ns, MAX_MEASURED_NS),
        )
        shaper = self._shapers[peer]
        if shaper is not None:
            deliver_ns = shaper.deliver_ns(HEADER_BYTES + payload_bytes, now_ns=now_ns)
            set_deliver_ns(self.lines.outbox(peer, micro_batch).header, deliver_ns)
        sequence = self._sequences[peer][micro_batch]
        self.lines.send(self._hop(peer, micro_batch, batch.layer), rows, sequence)

    def _answer_part(
        self, batch: ExpertBatch, peer: int, share: torch.Tensor, request: FrameHeader
    ) -> None:
        """Answer one part, or a frame that needs more than rows copied."""
        window = self.lines.outbox(peer, batch.micro_batch)
        if request.rows:
            window.first(request.rows).hidden.copy_(share)
        write_header(window.header, self._answer(request, peer))
        hop = self._hop(peer, batch.micro_batch, batch.layer)
        self.lines.send(hop, request.rows, request.sequence)

    def finish(self) -> None:
        """Do nothing: on the host what was replied has left."""

    def missing(self) -> list[int]:
        """Return the attention nodes whose frame the next round of gather() would wait for."""
        arrived = self.lines.arrived
        return [peer for peer in self._pending if not arrived(peer, self._micro_batch)]

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        if self._failure is None:
            self._failure = "it is closed"
        self._open = None
        self._records, self._deliver_words = None, {}
        self.lines.close()

    def _rounds(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        part = 0
        while self._pending:
            self._check_usable()
            assert self._open is None, "reply() to each batch before taking the next"
            try:
                self._open = self._collect(micro_batch, layer, part)
            except BaseException as error:
                self._failure = describe(error)
                raise
            yield self._open
            part += 1

    def _collect(self, micro_batch: int, layer: int, part: int) -> ExpertBatch:
        """Receive part `part` of every participant that has one and join the rows."""
        previous, self._headers = self._headers, {}
        self._row_counts = {}
        started_ns = time.monotonic_ns()
        for position, peer in enumerate(self._pending):
            hop = self._hop(peer, micro_batch, layer)
            raw = self.lines.receive(hop, self._pending[position:])
            if self._deliver_words[peer][micro_batch][DELIVER_WORD]:
                deliver_ns = read_header(raw).deliver_ns
                if not wait_delivery(deliver_ns, deadline_s=hop.deadline_s, spins=self._spins):
                    raise late("attention", hop)
            if self.trace is not None:
                self.trace.stamp(Kind.GATHERED, layer, micro_batch, peer)
            self._sequences[peer][micro_batch] += 1
            rows = self._take(peer, micro_batch, layer) if part == 0 else -1
            if rows < 0:
                header = read_header(raw)
                self._check(header, hop, part, previous.get(peer) if part else None)
                self._headers[peer] = header
                rows = header.rows
            self._row_counts[peer] = rows
        self._gathered_ns = time.monotonic_ns()
        self._idle_ns = self._gathered_ns - started_ns
        batch = self._join(micro_batch, layer, part)
        if self._headers:
            self._check_slots(batch)
        if self.trace is not None:
            self.trace.stamp(Kind.JOINED, layer, micro_batch)
        return batch

    def _take(self, peer: int, micro_batch: int, layer: int) -> int:
        """Return the rows of a common frame, all of it checked; -1 if it is not one."""
        if self._records is None:
            return -1
        assert self._ticket is not None
        version = self._ticket.table_version
        rows: int = take_request(
            self._records[peer][micro_batch].address,
            layer,
            version,
            self._ticket.step,
            self._sequences[peer][micro_batch],
            self._limit(version, layer),
        )
        return rows

    def _limit(self, version: int, layer: int) -> int:
        """Return what every slot must be below."""
        return self._num_slots[version][layer] if self._num_slots else _MAX_SLOTS

    def _hop(self, peer: int, micro_batch: int, layer: int) -> Hop:
        """Return a frame's way, whose wait begins now."""
        return Hop(peer, micro_batch, layer, time.monotonic() + self.shape.deadline_s)

    def _join(self, micro_batch: int, layer: int, part: int) -> ExpertBatch:
        assert self._ticket is not None
        with_rows = [(peer, rows) for peer, rows in self._row_counts.items() if rows]
        if len(with_rows) == 1:
            peer, rows = with_rows[0]
            found = self.lines.inbox(peer, micro_batch).first(rows)
            slots, weights, hidden = found.slots, found.weights, found.hidden
            if not self._in_place:
                hidden = self._hidden[:rows]
                self._take_rows(found, hidden)
        else:
            rows = 0
            for peer, count in with_rows:
                found = self.lines.inbox(peer, micro_batch).first(count)
                self._take_rows(found, self._hidden[rows : rows + count])
                self._slots[rows : rows + count].copy_(found.slots)
                self._weights[rows : rows + count].copy_(found.weights)
                rows += count
            slots, weights = self._slots[:rows], self._weights[:rows]
            hidden = self._hidden[:rows]
        counts = dict(with_rows)
        return ExpertBatch(
            micro_batch,
            layer,
            part,
            hidden,
            slots,
            weights,
            tuple([counts.get(peer, 0) for peer in self._ticket.participants]),
            self._ticket.table_version,
        )

    def _take_rows(self, found: WindowRows, out: torch.Tensor) -> None:
        """Copy hidden rows out of a window, in the compute dtype."""
        if self.shape.compressed is None:
            out.copy_(found.hidden)
        else:
            unpack_rows(found.hidden, found.scales, out, self._scratch)

    def _check(self, header: FrameHeader, hop: Hop, part: int, first: FrameHeader | None) -> None:
        """Check every field; a later part must agree with the one before it."""
        assert self._ticket is not None
        origin = f"attention {hop.peer}"
        # By position: once per frame, keywords for so many fields would cost a microsecond.
        expected = FrameHeader(
            REQUEST,
            self._payload,
            hop.peer,
            self._index,
            hop.micro_batch,
            hop.layer,
            part,
            first.num_parts if first else header.num_parts,
            header.rows,
            self.shape.hidden_size,
            self._attention[hop.peer],
            self._incarnation,
            self._ticket.table_version,
            self._ticket.step,
            self._sequences[hop.peer][hop.micro_batch],
            0,
            0,
            0,
        )
        check_header(header, expected, origin=origin)
        check_size(
            header,
            window_rows=self.shape.window_rows,
            row_bytes=self._request_row_bytes,
            origin=origin,
        )

    def _check_slots(self, batch: ExpertBatch) -> None:
        """Raise FrameError if a slot is not on this node; -1 is a pair that went elsewhere."""
        if not batch.slots.numel():
            return
        low, high = (int(bound) for bound in torch.aminmax(batch.slots))
        limit = self._limit(batch.table_version, batch.layer)
        if low < -1 or high >= limit:
            raise FrameError(
                f"layer {batch.layer}, micro-batch {batch.micro_batch}: slots {low}..{high}, "
                f"expert {self._index} has 0..{limit - 1}"
            )

    def _answer_counts(self, batch: ExpertBatch) -> list[int]:
        """Return the answer rows of each sender of `batch`."""
        counts = list(self._row_counts.values())
        if not self.shape.per_pair_answers:
            return counts
        return [count_pairs(slots) for slots in torch.split(batch.slots, counts)]

    def _answer(self, request: FrameHeader, peer: int) -> FrameHeader:
        """Return the header of the answer to `request`: the same frame, the other way."""
        payload_bytes = request.rows * self._answer_row_bytes
        deliver_ns = 0
        shaper = self._shapers[peer]
        if shaper is not None:
            deliver_ns = shaper.deliver_ns(HEADER_BYTES + payload_bytes, now_ns=time.monotonic_ns())
        compute_ns = time.monotonic_ns() - self._gathered_ns
        measured = (min(compute_ns, MAX_MEASURED_NS), min(self._idle_ns, MAX_MEASURED_NS))
        return FrameHeader._make(
            (*self._answer_start, *request[2:NUM_COMPARED], payload_bytes, deliver_ns, 0, *measured)
        )

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise TransportError(
                f"expert {self._index}: this net can not be used any more: {self._failure}"
            )
