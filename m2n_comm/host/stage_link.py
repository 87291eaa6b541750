"""The rows that pass between an attention node and one of its stages, on any transport.

Owns one end of such a pair: a frame of a micro-batch's hidden rows each way, its header and the
checks of it, and the deadline of a wait. The windows are those of other pairs, whose slots and
weights stay unused; an attention node requests and a stage answers. Knows no layers and no socket.
Belongs to the node's one busy thread; m2n_comm.open makes it.
"""

from __future__ import annotations

import time

from torch import Tensor

from kernels.frame_header import FrameHeader
from m2n_comm.emulate import LinkEmulation, wait_delivery
from m2n_comm.host.frames.windows import PairLayout
from m2n_comm.host.frames.wire import (
    ANSWER,
    HEADER_BYTES,
    REQUEST,
    check_header,
    check_size,
    payload_code,
    read_header,
    write_header,
)
from m2n_comm.host.lines import NodeLines, PairLines
from m2n_comm.net import NO_TIMES, NetTimes
from m2n_comm.pairing.hello import Identity
from m2n_comm.rules import NetRules
from m2n_comm.waits import Hop, WaitPolicy, late
from topspin.errors import FrameError
from topspin.messages import StepTicket


class StageLink:
    """One end of a pair.

    Invariant: a window is written only when the peer has read what was in it: each end sends a
    micro-batch's frame, and the other end sends its own only after it has received that one.
    """

    def __init__(
        self,
        me: Identity,
        *,
        peer: int,
        incarnation: int,
        lines: PairLines,
        link: LinkEmulation | None,
        wait: WaitPolicy,
    ) -> None:
        """`peer` has that `incarnation`; `me.shape.deadline_s` bounds each wait for it."""
        self._me = me
        self._peer = peer
        self._incarnation = incarnation
        self._lines = lines
        self._shaper = None if link is None else link.shaper
        self._spins = wait == "spin"
        self._attends = me.role == "attention"
        self._peer_role = "stage" if self._attends else "attention"
        self._peer_name = f"{self._peer_role} {peer}"
        if isinstance(lines, NodeLines):
            lines.peer_role = self._peer_role
        self._rules = NetRules(f"link to {self._peer_name}", me.shape)
        layout = PairLayout(me.shape)
        self._row_bytes = (layout.request_row_bytes, layout.answer_row_bytes)
        self._payload = payload_code(me.shape.payload)
        self._sent = [0] * me.shape.num_micro_batches
        self._received = [0] * me.shape.num_micro_batches
        self._ticket: StepTicket | None = None
        self._times = NO_TIMES

    def begin(self, ticket: StepTicket) -> None:
        """Open a step; raises TransportError if the link has failed."""
        with self._rules:
            self._ticket = ticket
            self._times = NO_TIMES

    @property
    def times(self) -> NetTimes:
        """Return the times that the peer has sent in this step; those of a stage for experts."""
        return self._times

    def send(self, micro_batch: int, rows: Tensor, times: NetTimes = NO_TIMES) -> None:
        """Send rows [T, H] of a micro-batch; they may be changed after return.

        `times` are those of the sender's net so far. Raises PeerLost, DeadlineExceeded, FrameError
        for rows that do not fit.
        """
        with self._rules:
            shape = self._me.shape
            count = len(rows)
            if rows.dtype != shape.payload or rows.shape[1:] != (shape.hidden_size,):
                raise FrameError(f"rows {tuple(rows.shape)} {rows.dtype} to {self._peer_name}")
            if count > shape.window_rows:
                raise FrameError(f"{count} rows to {self._peer_name}, of {shape.window_rows}")
            window = self._lines.outbox(self._peer, micro_batch)
            window.first(count).hidden.copy_(rows)
            self._sent[micro_batch] += 1
            kind = REQUEST if self._attends else ANSWER
            header = self._header(micro_batch, count, kind, self._sent[micro_batch])._replace(
                compute_ns=round(times.expert_s * 1e9), idle_ns=round(times.wait_s * 1e9)
            )
            if self._shaper is not None:
                size = HEADER_BYTES + header.payload_bytes
                now_ns = time.monotonic_ns()
                header = header._replace(deliver_ns=self._shaper.deliver_ns(size, now_ns=now_ns))
            write_header(window.header, header)
            self._lines.send(self._hop(micro_batch), count, self._sent[micro_batch])

    def receive(self, micro_batch: int, out: Tensor) -> None:
        """Fill `out` [T, H] with the micro-batch's rows from the peer.

        Raises PeerLost, DeadlineExceeded, StaleFrame, FrameError.
        """
        with self._rules:
            hop = self._hop(micro_batch)
            raw = self._lines.receive(hop, (self._peer,))
            found = read_header(raw)
            if found.deliver_ns and not wait_delivery(
                found.deliver_ns, deadline_s=hop.deadline_s, spins=self._spins
            ):
                raise late(self._peer_role, hop)
            self._received[micro_batch] += 1
            kind = ANSWER if self._attends else REQUEST
            expected = self._header(micro_batch, len(out), kind, self._received[micro_batch])
            check_header(found, expected, origin=self._peer_name)
            check_size(
                found,
                window_rows=self._me.shape.window_rows,
                row_bytes=self._row_bytes[kind == ANSWER],
                origin=self._peer_name,
            )
            self._times = NetTimes(found.idle_ns * 1e-9, found.compute_ns * 1e-9, None)
            out.copy_(self._lines.inbox(self._peer, micro_batch).first(len(out)).hidden)

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        self._rules.close()
        self._lines.close()

    def _hop(self, micro_batch: int) -> Hop:
        deadline_s = time.monotonic() + self._me.shape.deadline_s
        return Hop(self._peer, micro_batch, 0, deadline_s)

    def _header(self, micro_batch: int, rows: int, kind: int, sequence: int) -> FrameHeader:
        ticket = self._ticket
        assert ticket is not None, "begin() first"
        ends = (self._me.index, self._peer)
        incarnations = (self._me.incarnation, self._incarnation)
        if (kind == REQUEST) != self._attends:
            incarnations = incarnations[::-1]
        attention, stage = ends if self._attends else ends[::-1]
        return FrameHeader(
            sequence=sequence,
            rows=rows,
            step=ticket.step,
            table_version=ticket.table_version,
            layer=0,
            part=0,
            num_parts=1,
            incarnation=incarnations[0],
            reader_incarnation=incarnations[1],
            kind=kind,
            payload=self._payload,
            attention=attention,
            expert=stage,
            micro_batch=micro_batch,
            hidden_size=self._me.shape.hidden_size,
            payload_bytes=rows * self._row_bytes[kind == ANSWER],
        )
