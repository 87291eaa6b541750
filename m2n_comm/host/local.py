"""M2N within one process: attention and expert nodes composed by one hub, no extra threads.

Owns the windows (the same layout as shm), the condition that attention threads wait on, and the
expert programs, which run inline in the first attention thread that waits for an answer once every
participant's frame is there. The rules, versions and errors are those of the other transports: the
two sides are the same code. With one attention node nothing ever waits. This is the reference of
the contract, and the monolithic mode.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from m2n_comm.emulate import LinkEmulation
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.frames.memory_order import consume, publish
from m2n_comm.host.frames.records import FramePort
from m2n_comm.host.frames.windows import PairLayout, PairWindows, private_memory
from m2n_comm.host.lines import NodeLines
from m2n_comm.net import NetShape, Serve
from m2n_comm.pairing.hello import Identity, NodeRole
from m2n_comm.rules import describe
from m2n_comm.waits import Hop, late, lost
from topspin.errors import PeerLost
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket

__all__ = ["LocalHub", "LocalLines", "Serve"]


class LocalHub:
    """Every pair of M attention and N expert nodes of this process.

    attach_expert() for each expert node and attention_net() for each attention node, then
    use the nets; each attention net belongs to one thread.
    """

    def __init__(
        self,
        shape: NetShape,
        num_attention: int,
        num_experts: int,
        *,
        link: LinkEmulation | None = None,
    ) -> None:
        layout = PairLayout(shape)
        self.shape = shape
        self.layout = layout
        self.link = link
        self.num_attention = num_attention
        self.num_experts = num_experts
        self.changed = threading.Condition(threading.RLock())
        self.closed: set[int] = set()
        self.pairs: list[list[PairWindows]] = [
            [layout.map(private_memory(layout)) for _ in range(num_experts)]
            for _ in range(num_attention)
        ]
        self._programs: dict[int, _ExpertProgram] = {}
        self.begun: list[tuple[int, int]] = [(0, 0)] * num_attention
        self._failure: str | None = None

    def attention_net(self, index: int, table: ExpertTable) -> AttentionSide:
        """Return the net of attention node `index`. Raises ProtocolError for a wrong table."""
        return AttentionSide(
            Identity(role="attention", index=index, incarnation=0, shape=self.shape),
            expert_incarnations=(0,) * self.num_experts,
            table=table,
            lines=LocalLines(self, "attention", index),
            link=self.link,
        )

    def attach_expert(self, index: int, serve: Serve, *, table: ExpertTable) -> ExpertSide:
        """Let `serve` compute the partial [R, H] of every batch of expert node `index`.

        `serve` runs in the attention threads, one at a time. Returns the node's net, for
        set_table(); gather and reply are called by the hub.
        """
        net = ExpertSide(
            Identity(role="expert", index=index, incarnation=0, shape=self.shape),
            attention_incarnations=(0,) * self.num_attention,
            lines=LocalLines(self, "expert", index),
            links=(self.link,) * self.num_attention,
            table=table,
        )
        self._programs[index] = _ExpertProgram(self, net, serve)
        return net

    def begin(self, index: int, ticket: StepTicket) -> None:
        """Queue the ticket that attention node `index` begins, once for all participants."""
        with self.changed:
            self.begun[index] = (ticket.generation, ticket.step)
            for program in self._programs.values():
                program.add(ticket)
                if not program.net.is_sent_rows(ticket):
                    self._advance(program)  # nobody will wait for its answers

    def drive(self, hop: Hop, arrived: Callable[[], bool]) -> None:
        """Run expert hop.peer until `arrived`, or wait for other attention threads.

        Raises the error of the expert's program, PeerLost if a participant has closed its
        net, DeadlineExceeded.
        """
        with self.changed:
            while not arrived():
                if self._failure is not None:
                    raise PeerLost(f"an expert of this process failed: {self._failure}")
                program = self._programs.get(hop.peer)
                if program is None:
                    raise PeerLost(f"expert {hop.peer} was never attached to the hub")
                if self._advance(program):
                    self.changed.notify_all()
                    continue
                gone = self.closed.intersection(program.net.missing())
                if gone:
                    raise lost("attention", min(gone), hop)
                left_s = hop.deadline_s - time.monotonic()
                if left_s <= 0:
                    raise late("expert", hop)
                self.changed.wait(left_s)

    def close_attention(self, index: int) -> None:
        """Tell waiting threads that this attention node is gone; the last one drops all memory."""
        with self.changed:
            self.closed.add(index)
            self.changed.notify_all()
            if len(self.closed) == self.num_attention:
                for program in self._programs.values():
                    program.net.close()
                self._programs.clear()
                self.pairs = []

    def _advance(self, program: _ExpertProgram) -> bool:
        try:
            return next(program.turns)
        except BaseException as error:
            self._failure = describe(error)
            self.changed.notify_all()
            raise


class _ExpertProgram:
    """An expert node's loop, suspended where it would have to wait.

    `turns` yields True after each answered batch, False when a frame or ticket is missing.
    """

    def __init__(self, hub: LocalHub, net: ExpertSide, serve: Serve) -> None:
        self.net = net
        self.turns = self._run(serve)
        self._hub = hub
        self._tickets: dict[tuple[int, int], StepTicket] = {}
        self._last = (0, 0)

    def add(self, ticket: StepTicket) -> None:
        """Take a ticket; each participant brings the same one."""
        key = (ticket.generation, ticket.step)
        if key > self._last:
            self._tickets[key] = ticket

    def _next_ticket(self) -> StepTicket | None:
        """Return the next ticket of the chain, or None while an earlier one may still come.

        A node that does not take part in a step may begin the next one before the participants have
        begun it.
        """
        if not self._tickets:
            return None
        key = min(self._tickets)
        previous = self._tickets[key].previous
        follows = previous in (0, self._last[1]) or all(begun >= key for begun in self._hub.begun)
        if not follows:
            return None
        self._last = key
        return self._tickets.pop(key)

    def _run(self, serve: Serve) -> Iterator[bool]:
        while True:
            while (ticket := self._next_ticket()) is None:
                yield False
            self.net.begin(ticket)
            for layer in range(self._hub.shape.num_layers):
                if layer in self.net.local:
                    continue
                for micro_batch in range(ticket.num_micro_batches):
                    yield from self._serve_one(serve, micro_batch, layer)

    def _serve_one(self, serve: Serve, micro_batch: int, layer: int) -> Iterator[bool]:
        batches = self.net.gather(micro_batch, layer)
        while True:
            while self.net.missing():
                yield False
            batch = next(batches, None)
            if batch is None:
                return
            self.net.reply(batch, serve(batch))
            yield True


class LocalLines(NodeLines):
    """All pairs of one node of the hub."""

    def __init__(self, hub: LocalHub, role: NodeRole, index: int) -> None:
        attends = role == "attention"
        pairs = hub.pairs[index] if attends else [row[index] for row in hub.pairs]
        super().__init__(hub.layout, role, dict(enumerate(pairs)))
        self._hub: LocalHub | None = hub
        self._attends = attends
        self._index = index
        if not attends:  # both ends share the windows of a pair; the attention end counts them
            self.registered_bytes = 0

    def port(self, peer: int, micro_batch: int) -> FramePort | None:
        """Return None: threads take turns here, and a recording's threads would not."""
        return None

    def begin(self, ticket: StepTicket) -> None:
        """Pass an attention node's ticket on to the experts."""
        if self._attends:
            self._open_hub().begin(self._index, ticket)

    def send(self, hop: Hop, rows: int, sequence: int) -> None:
        """Publish the outbox and wake the threads that wait."""
        hub = self._open_hub()
        with hub.changed:
            publish(self._outbox[hop.peer][hop.micro_batch].flag, sequence)
            hub.changed.notify_all()

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Return the next header of hop.peer; an attention node runs the expert for it."""
        peer, micro_batch = hop.peer, hop.micro_batch
        if self._attends:
            self._open_hub().drive(hop, lambda: self.arrived(peer, micro_batch))
        else:
            assert self.arrived(peer, micro_batch), "the hub asks missing() first"
        window = self._inbox[peer][micro_batch]
        self.consumed[peer][micro_batch] = consume(window.flag)
        return bytes(window.header)

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Return whether the peer has published since the last receive()."""
        flag = self._inbox[peer][micro_batch].flag
        return consume(flag) != self.consumed[peer][micro_batch]

    def close(self) -> None:
        """Leave the hub."""
        hub, self._hub = self._hub, None
        self.drop_windows()
        if hub is not None and self._attends:
            hub.close_attention(self._index)

    def _open_hub(self) -> LocalHub:
        assert self._hub is not None, "the net is closed"
        return self._hub
