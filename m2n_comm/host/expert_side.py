"""The expert node's end of M2N, the same for every transport: implements ExpertNet.

Owns the rounds (part r of every participant that has one, joined), and the return of every answer
row to its sender. hops.py checks requests and writes answers, also in recorded tickets; Python does
what it leaves undone: it waits for long, and names what is wrong. rules.ExpertRules checks tickets
and tables. Knows no socket, no memory mapping and no weights. Runs in the one busy thread of an
expert node; local.py runs it inline.

While a ticket is recorded, a batch has as many rows of each participant as the ticket's bucket
says, in memory of its own: a thread that comes late to a kernel of the recording still reads them
when the next batch is there. Ops find the records of the participants by their place among them, so
a recording serves other participants too; only its stamps name those of the recorded ticket.

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
from torch import Tensor

from kernels.cpu.compiled.runtime import is_recording, launch_alone, refuse_recording
from kernels.recordings import MAX_RECORDED_ROWS
from m2n_comm.emulate import LinkEmulation, wait_delivery
from m2n_comm.host.frames import hops
from m2n_comm.host.frames.records import (
    ANSWER_ROWS,
    ARRIVED_NS,
    NUM_PARTS,
    ROWS,
    Record,
    travels_plain,
)
from m2n_comm.host.frames.windows import PairLayout
from m2n_comm.host.frames.wire import (
    DELIVER_WORD,
    HEADER_BYTES,
    MAX_PARTS,
    REQUEST,
    check_header,
    check_size,
    payload_code,
    read_header,
)
from m2n_comm.host.join import Buffers, Join, Taken
from m2n_comm.host.lines import InPlaceLines, PairLines, bytes_of
from m2n_comm.net import ExpertBatch, Senders
from m2n_comm.pairing.hello import Identity
from m2n_comm.rules import ExpertRules
from m2n_comm.waits import Hop, WaitPolicy, late
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Kind, Stamps


class _Sender(NamedTuple):
    """Who sends the rows of the ticket's participant number `position`, for one micro-batch.

    `place` is the address of the word with the record's address.
    """

    position: int
    peer: int
    record: Record
    place: int


class ExpertSide:
    """Invariant: outside of recordings, `_pending` are the senders that have a part in the open
    batch, or of whom the next round waits for one."""

    epoch = 0

    def __init__(
        self,
        me: Identity,
        *,
        attention_incarnations: Sequence[int | None],
        lines: PairLines,
        table: ExpertTable,
        links: Sequence[LinkEmulation | None] = (),
        wait: WaitPolicy = "block",
        senders: Senders = (),
    ) -> None:
        """Serve the attention nodes with these incarnations (None: an absent one)."""
        shape = me.shape
        num_attention = len(attention_incarnations)
        self.shape = shape
        self._travels_plain = travels_plain(shape)
        self.trace: Stamps | None = None
        self._me = me
        self._spins = wait == "spin"
        self._attention = {
            peer: each for peer, each in enumerate(attention_incarnations) if each is not None
        }
        self._rules = ExpertRules(me.index, shape, peers=self._attention)
        self._layout = PairLayout(shape)
        self._shapers = [link.shaper if link else None for link in links or [None] * num_attention]
        # By attention node and micro-batch, the number of frames taken.
        self._sequences = {
            peer: array("Q", bytes(8 * shape.num_micro_batches)) for peer in self._attention
        }
        self._step_words, self._times = array("Q", (0, 0)), array("q", (0, 0, 0, 0))
        self._step_at, self._times_at = (
            each.buffer_info()[0] for each in (self._step_words, self._times)
        )
        self._senders = senders or (tuple(range(num_attention)),) * shape.num_layers
        # By who sends for whom and by micro-batch, the addresses of the participants' records.
        self._places = {
            each: [array("Q", bytes(8 * len(each))) for _ in range(shape.num_micro_batches)]
            for each in self._senders
        }
        # The same for the open step's senders.
        self._found: dict[tuple[int, ...], list[tuple[_Sender, ...]]] = {}
        self._join = Join(shape, num_attention)
        self._micro_batch = 0
        self._pending: tuple[_Sender, ...] = ()
        self.use(lines)
        self.set_table(table)

    def use(self, lines: PairLines) -> None:
        """Send and receive over `lines` from now on."""
        self.lines = lines
        self._in_place = lines if isinstance(lines, InPlaceLines) else None
        hops.prepare()
        pairs = [
            (peer, micro_batch)
            for peer in self._attention
            for micro_batch in range(self.shape.num_micro_batches)
        ]
        ports = {pair: lines.port(*pair) for pair in pairs}
        self._has_ports = None not in ports.values()
        self._records = {
            (peer, micro_batch): Record(
                self._layout,
                (peer, self._me.index, micro_batch),
                (self._me.incarnation, self._attention[peer]),
                outbox=lines.outbox(peer, micro_batch),
                inbox=lines.inbox(peer, micro_batch),
                count=self._sequences[peer],
                port=ports[peer, micro_batch],
                shaper=self._shapers[peer],
            )
            for peer, micro_batch in pairs
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
            and self._travels_plain
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
        return self._times[hops.BUSY_NS // 8] * 1e-9

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
        self._found = {
            sends_for: [
                tuple(
                    [
                        self._sender(words, sends_for[index], micro_batch, position)
                        for position, index in enumerate(ticket.participants)
                    ]
                )
                for micro_batch, words in enumerate(places[: ticket.num_micro_batches])
            ]
            for sends_for, places in self._places.items()
        }
        if self.trace is not None:
            self.trace.step = ticket.step
            self.trace.stamp(Kind.STEP_BEGAN)
        self.lines.begin(ticket)

    def _sender(self, places: array[int], peer: int, micro_batch: int, position: int) -> _Sender:
        """Write the address of a participant's record to its place."""
        record = self._records[peer, micro_batch]
        places[position] = record.address
        place = places.buffer_info()[0] + places.itemsize * position
        return _Sender(position, peer, record, place)

    def is_sent_rows(self, ticket: StepTicket) -> bool:
        """Say whether any layer of a step is not local."""
        return len(self._rules.local_of(ticket.table_version)) < self.shape.num_layers

    def gather(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        """Yield the parts of that micro-batch, each joined over the ticket's participants.

        Raises TransportError: PeerLost, DeadlineExceeded, StaleFrame, FrameError.
        """
        self._rules.check_gather(micro_batch)
        self._micro_batch = micro_batch
        self._pending = self._found[self._senders[layer]][micro_batch]
        return self._rounds(micro_batch, layer)

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
        """Take part `part` of every participant that has one and join the rows."""
        is_recorded, pending, join = is_recording(), self._pending, self._join
        counts = [0] * len(ticket.participants)
        most = max(ticket.row_buckets[micro_batch], 1) if is_recorded else self.shape.window_rows
        places_rows = is_recorded or (join.takes_rows and len(pending) > 1)
        buffers = Buffers(self.shape, most * len(pending)) if is_recorded else join.buffers
        taken: list[Taken] = []
        low = 0
        for order, (position, peer, record, place) in enumerate(pending):
            hidden_at, slots_at, weights_at = buffers.places(low)
            # Made before the wait: what comes after it holds up the peer.
            arguments = (
                place,
                layer,
                part,
                1 if is_recorded else MAX_PARTS,
                self._step_at,
                self._rules.num_slots[layer],
                most,
                hidden_at,
                slots_at if is_recorded else 0,
                weights_at,
                self._times_at,
                int(order == 0),
            )
            refuse = partial(self._refuse, layer, micro_batch, position, part)
            wait = partial(self._await_long, layer, micro_batch, position, part)
            launch_alone(hops.await_frame, (place, hidden_at if places_rows else 0, most), wait)
            if self.trace is not None:
                self.trace.stamp(Kind.GATHERED, layer, micro_batch, peer)
            launch_alone(hops.take_rows, arguments, refuse)
            rows = counts[position] = most if is_recorded else record.words[ROWS]
            low += rows
            if rows and not is_recorded:
                window = self.lines.inbox(peer, micro_batch)
                taken.append(Taken(record, window, rows, places_rows and record.is_placed))
        found = buffers.first(low) if is_recorded else join.join(taken)
        if self.trace is not None:
            self.trace.stamp(Kind.JOINED, layer, micro_batch)
        return ExpertBatch(micro_batch, layer, part, *found, tuple(counts), ticket.table_version)

    def reply(self, batch: ExpertBatch, partial: Tensor) -> None:
        """Send partial [R, H] (any float dtype) back, each row to its sender."""
        if self.trace is not None:
            self.trace.stamp(Kind.COMPUTED, batch.layer, batch.micro_batch)
        self._rules.check_usable()
        try:
            self._answer(batch, partial)
        except BaseException as error:
            self._rules.fail(error)
            raise
        self._rules.open = None
        if self.trace is not None:
            self.trace.stamp(Kind.REPLIED, batch.layer, batch.micro_batch)

    def _answer(self, batch: ExpertBatch, partial_rows: Tensor) -> None:
        """Send every sender of the batch its rows; leave those pending that have another part."""
        layer, micro_batch, pending = batch.layer, batch.micro_batch, self._pending
        counts: Sequence[int] = [sender.record.words[ANSWER_ROWS] for sender in pending]
        if is_recording():
            counts = batch.row_counts
        num_rows = sum(counts)
        self._rules.check_reply(batch, partial_rows, num_rows)
        is_at_hand = self._is_at_hand(partial_rows)
        if not is_at_hand:
            refuse_recording(f"partial sums in {partial_rows.dtype} are not what travels")
        low, is_last = 0, len(pending) - 1
        for order, (sender, rows) in enumerate(zip(pending, counts, strict=True)):
            share = partial_rows if rows == num_rows else partial_rows[low : low + rows]
            low += rows
            if rows and not is_at_hand:
                self.lines.outbox(sender.peer, micro_batch).first(rows).hidden.copy_(share)
            arguments = (
                sender.place,
                share.data_ptr() if is_at_hand else 0,
                self._times_at,
                int(order == is_last),
            )
            finish = partial(self._finish_answer, layer, micro_batch, sender.position, share)
            launch_alone(hops.send_answer, arguments, finish)
        self._pending = tuple(
            [sender for sender in pending if sender.record.words[NUM_PARTS] > batch.part + 1]
        )

    def finish(self) -> None:
        """Do nothing: on the host all answers have left."""

    def missing(self) -> list[int]:
        """Return the attention nodes whose frame the next round of gather() would wait for."""
        arrived = self.lines.arrived
        return [each.peer for each in self._pending if not arrived(each.peer, self._micro_batch)]

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        self._rules.close()
        self._rules.open = None
        self._records, self._found, self._pending = {}, {}, ()
        self.lines.close()

    def _hop(self, peer: int, micro_batch: int, layer: int) -> Hop:
        """Return the hop of a frame whose wait begins now."""
        return Hop(peer, micro_batch, layer, time.monotonic() + self.shape.deadline_s)

    def _await_long(self, layer: int, micro_batch: int, position: int, part: int) -> None:
        """Wait for a request for longer than hops.await_frame does, or see what is wrong."""
        with self._rules:
            senders = self._found[self._senders[layer]][micro_batch][position:]
            peers = tuple(
                [each.peer for each in senders if not part or each.record.words[NUM_PARTS] > part]
            )
            hop = self._hop(peers[0], micro_batch, layer)
            self.lines.receive(hop, peers)
            deliver_ns = self.lines.inbox(peers[0], micro_batch).words[DELIVER_WORD]
            if deliver_ns and not wait_delivery(
                deliver_ns, deadline_s=hop.deadline_s, spins=self._spins
            ):
                raise late("attention", hop)
            senders[0].record.words[ARRIVED_NS] = time.monotonic_ns()

    def _is_at_hand(self, rows: Tensor) -> bool:
        """Return whether rows lie in host memory just as they are sent."""
        return rows.dtype == self.shape.payload and rows.is_cpu and rows.is_contiguous()

    def _finish_answer(self, layer: int, micro_batch: int, position: int, share: Tensor) -> None:
        """Publish a participant's answer that hops.send_answer has written or begun to send.

        It is the first rows of `share`.
        """
        with self._rules:
            _, peer, record, _ = self._found[self._senders[layer]][micro_batch][position]
            rows = record.words[ANSWER_ROWS]
            shaper = self._shapers[peer]
            if shaper is not None:
                size = HEADER_BYTES + rows * self._layout.answer_row_bytes
                deliver_ns = shaper.deliver_ns(size, now_ns=time.monotonic_ns())
                self.lines.outbox(peer, micro_batch).words[DELIVER_WORD] = deliver_ns
            hop, sequence = self._hop(peer, micro_batch, layer), self._sequences[peer][micro_batch]
            if self._in_place is not None and rows and self._is_at_hand(share):
                self._in_place.send_from(hop, rows, sequence, [bytes_of(share[:rows])])
            else:
                self.lines.send(hop, rows, sequence)

    def _refuse(self, layer: int, micro_batch: int, position: int, part: int) -> None:
        """Raise FrameError or StaleFrame for a request that hops.take_rows has not taken."""
        with self._rules:
            ticket = self._rules.ticket
            assert ticket is not None
            _, peer, record, _ = self._found[self._senders[layer]][micro_batch][position]
            window = self.lines.inbox(peer, micro_batch)
            origin, header = f"attention {peer}", read_header(window.header)
            before = read_header(record.request)
            expected = header._replace(
                sequence=self._sequences[peer][micro_batch] + 1,
                step=ticket.step,
                table_version=ticket.table_version,
                layer=layer,
                part=part,
                num_parts=before.num_parts if part else header.num_parts,
                incarnation=self._attention[peer],
                reader_incarnation=self._me.incarnation,
                kind=REQUEST,
                payload=payload_code(self.shape.request_dtype),
                attention=peer,
                expert=self._me.index,
                micro_batch=micro_batch,
                hidden_size=self.shape.hidden_size,
            )
            check_header(header, expected, origin=origin)
            check_size(
                header,
                window_rows=self.shape.window_rows,
                row_bytes=self._layout.request_row_bytes,
                origin=origin,
            )
            self._check_slots(window.first(header.rows).slots, layer, micro_batch)
            bucket = ticket.row_buckets[micro_batch]
            if header.num_parts > 1 or header.rows > bucket:
                raise FrameError(
                    f"frame of {origin}: {header.rows} rows in {header.num_parts} parts, "
                    f"the ticket said at most {bucket}"
                )
            raise FrameError(f"frame of {origin}: it changed while it was read")

    def _check_slots(self, slots: Tensor, layer: int, micro_batch: int) -> None:
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
