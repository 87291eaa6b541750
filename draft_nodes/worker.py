"""The draft node: hear verdicts, make a pass, send offers.

Owns one turn of the loop between the sockets and spec_decode.rounds; the node's life is
topspin.processes.node_life's. Attention nodes connect to it directly; the scheduler only starts and
stops it and asks for its trace. Runs in the process's one busy thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from draft_nodes.model import DraftModel
from spec_decode.forest import Growth
from spec_decode.rounds import Counts, DraftRounds
from topspin.errors import ProtocolError
from topspin.messages import AnyMessage, DraftCounts, Verdict, Verdicts, Welcome, pack_ints
from topspin.plan.spec import NodeConfig
from topspin.processes.channel import ControlClient, ControlServer, Event, PeerGone, Received
from topspin.processes.listening import in_url
from topspin.processes.node_life import CacheSize, NodeLife
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork
from topspin.processes.trace_node import ring_of
from topspin.trace import Kind, Ring

IDLE_S = 0.05
"""How long a node with nothing to do waits for verdicts before it looks for a Stop."""
COUNTS_INTERVAL_S = 1.0
NUM_WARM_UP_PASSES = 3
"""One feeds a text, two expand leaves: the second of a shape is recorded."""

Load = Callable[[NodeConfig], tuple[DraftModel, Growth]]


class DraftWorker:
    """One draft node, a topspin.processes.node_life.Worker. Knows no generation and no step."""

    def __init__(
        self,
        control: ControlClient,
        *,
        index: int,
        load: Load,
        clock: Callable[[], float] = time.monotonic,
        network: NodeNetwork = ON_ONE_HOST,
    ) -> None:
        """`load` returns the model and how its trees grow; `network` says who may connect."""
        self._network = network
        self._life = NodeLife(control, role="draft", index=index, can_reform=False)
        self._index = index
        self._load = load
        self._clock = clock
        self._logger = logging.getLogger("draft")
        self._rounds: DraftRounds | None = None
        self._server: ControlServer | None = None
        self._trace: Ring | None = None
        self._sent_counts = Counts()
        self._sent_s = clock()
        self._is_growing = False

    @torch.inference_mode()
    def serve(self) -> None:
        """Join, serve until told to stop; raises Stopped, or an error."""
        self._life.introduce(None)
        try:
            self._life.serve(self)
        finally:
            if self._server is not None:
                self._server.close()

    def load(self, welcome: Welcome) -> CacheSize:
        config = welcome.config
        model, growth = self._load(config)
        self._rounds = DraftRounds(model, growth, max_length=model.max_length)
        self._warm_up(self._rounds)
        self._trace = self._life.inbox.trace = ring_of(config)
        address = config.node.address
        assert address is not None, "the launcher gives draft nodes their addresses"
        if self._network.host is not None:
            # Others find it by a name, to which no socket can be bound.
            address = f"tcp://{in_url(self._network.host)}:{address.rpartition(':')[2]}"
        self._server = ControlServer(address, keys=self._network.keys, groups=self._network.peers)
        return CacheSize()

    def _warm_up(self, rounds: DraftRounds) -> None:
        """Make passes for a text of no one, so that the first request finds code and memory."""
        text = Verdict(seq_id=0, start=0, tokens=pack_ints([0] * 4), at_most=2, num_prompt=4)
        rounds.hear(b"", Verdicts(epoch=1, verdicts=(text,)), self._clock())
        for _ in range(NUM_WARM_UP_PASSES):
            rounds.take_offers()
            rounds.grow()
        rounds.lose(b"")
        rounds.counts = Counts()

    def form(self, welcome: Welcome) -> None:
        pass

    def disband(self) -> None:
        pass  # attention nodes say which sequences end

    def wait_s(self) -> float | None:
        """Make one turn: what has come, answers, a pass."""
        assert self._rounds is not None
        assert self._server is not None
        rounds, server = self._rounds, self._server
        events = server.poll(0.0 if self._is_growing else IDLE_S)
        self._stamp(Kind.VERDICTS_RECEIVED)
        for event in events:
            self._hear(rounds, event)
        for peer, offers in rounds.take_offers():
            server.send(peer, offers)  # who does not read them is answered when it asks again
            self._stamp(Kind.OFFERED)
        began_s = self._clock()
        self._is_growing = rounds.grow()
        if self._is_growing:
            rounds.took(self._clock() - began_s)
            self._stamp(Kind.DRAFTED)
        self._report_counts()
        return 0.0

    def _hear(self, rounds: DraftRounds, event: Event) -> None:
        if isinstance(event, PeerGone):
            rounds.lose(event.peer)
            return
        try:
            if not isinstance(event, Received) or not isinstance(event.message, Verdicts):
                raise ProtocolError("not a Verdicts")
            rounds.hear(event.peer, event.message, self._clock())
        except ProtocolError as error:
            self._logger.warning("draft %d: dropped a message: %s", self._index, error)

    def _report_counts(self) -> None:
        assert self._rounds is not None
        counts, now_s = self._rounds.counts, self._clock()
        if counts == self._sent_counts or now_s - self._sent_s < COUNTS_INTERVAL_S:
            return
        self._sent_counts, self._sent_s = counts, now_s
        self._life.send(DraftCounts(index=self._index, **counts._asdict()))

    def _stamp(self, kind: Kind) -> None:
        if self._trace is not None:
            self._trace.stamp(kind)

    def idle(self) -> None:
        pass

    def handle(self, message: AnyMessage) -> None:
        raise ProtocolError(f"a draft node got {type(message).__name__}")
