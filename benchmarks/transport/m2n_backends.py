"""The two roles of every backend that m2n compares, behind one small interface.

Owns the exchange of rows between an attention node and an expert node over Topspin's
transports, over torch.distributed gloo (send/recv, all_to_all) and over plain ZeroMQ. Each trip
sends `rows` hidden rows to every expert node and returns as many. Topspin's also plans the
sends, carries slots and weights, checks every header and sums in fp32; the others only carry
bytes.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast, get_args

import torch
import torch.distributed as dist
import zmq

from m2n_comm.host.local import LocalHub
from m2n_comm.net import AttentionNet, ExpertBatch, ExpertNet, NetShape
from m2n_comm.open import ExpertListener, connect_attention, listen_expert
from m2n_comm.pairing.addresses import Between
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from topspin.expert_table import ExpertTable, uniform_table
from topspin.messages import ExpertPeer, StepTicket
from topspin.processes.keys import KeyDirectory
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork

HIDDEN_SIZE = 2048
ROW_BYTES = HIDDEN_SIZE * 2
TOP_K = 8
NUM_EXPERTS = 16
NUM_LAYERS = 4
DEPTH = 4
WINDOW_ROWS = 256
DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ExchangeCase:
    """One measurement: `rows` of ROW_BYTES each way between every pair."""

    backend: str
    num_attention: int
    num_experts: int
    rows: int
    rendezvous: str = ""
    keys: str = ""

    @property
    def waits(self) -> Waits:
        """The wait policy of our transports."""
        policy: Literal["spin", "block"] = "spin" if self.backend.endswith("spin") else "block"
        return Waits(timeout_s=DEADLINE_S, policy=policy)


class Player(Protocol):
    """One node of a case. `trip` and `burst` mirror each other on both roles."""

    def trip(self) -> None:
        """Send to every peer and receive the answers (attention), or serve one trip (expert)."""

    def burst(self, count: int) -> None:
        """Do `count` x DEPTH trips with DEPTH of them in flight."""

    def close(self) -> None:
        """Release everything."""


_SHAPE: Final = NetShape(
    hidden_size=HIDDEN_SIZE,
    top_k=TOP_K,
    num_layers=NUM_LAYERS,
    payload=torch.bfloat16,
    window_rows=WINDOW_ROWS,
    num_micro_batches=DEPTH,
    deadline_s=DEADLINE_S,
)


def _table(num_experts: int) -> ExpertTable:
    return uniform_table(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_nodes=num_experts)


class _Course:
    """Divides trips into steps of NUM_LAYERS layers, equally in both roles.

    Trips and turns of bursts come in multiples of NUM_LAYERS, so steps are always complete.
    """

    def __init__(self, case: ExchangeCase) -> None:
        self._case = case
        self._step = 0
        self._layer = NUM_LAYERS

    def next(self, net: Any, micro_batches: int) -> int:
        """Return the layer of the next trip; begins a new step after the last layer."""
        self._layer += 1
        if self._layer >= NUM_LAYERS:
            self._layer = 0
            self._step += 1
            net.begin(
                StepTicket(
                    step=self._step,
                    previous=self._step - 1,
                    generation=1,
                    table_version=1,
                    num_micro_batches=micro_batches,
                    participants=tuple(range(self._case.num_attention)),
                    row_buckets=(self._case.rows,) * micro_batches,
                )
            )
        return self._layer


class OurAttention:
    """An attention node of Topspin: every row goes to every expert node."""

    def __init__(self, case: ExchangeCase, net: AttentionNet) -> None:
        self._net = net
        self._course = _Course(case)
        self._hidden = torch.randn(case.rows, HIDDEN_SIZE).to(torch.bfloat16)
        order = torch.rand(case.rows, NUM_EXPERTS // TOP_K, TOP_K).argsort(dim=1)[:, 0]
        self._experts = torch.arange(TOP_K) * (NUM_EXPERTS // TOP_K) + order
        self._weights = torch.rand(case.rows, TOP_K)
        self._outs = [torch.empty(case.rows, HIDDEN_SIZE) for _ in range(DEPTH)]

    def trip(self) -> None:
        """Dispatch and combine one micro-batch."""
        layer = self._course.next(self._net, 1)
        self._net.dispatch(0, layer, self._hidden, self._experts, self._weights)
        self._net.combine(0, layer, self._outs[0])

    def burst(self, count: int) -> None:
        """Keep DEPTH micro-batches in flight, as the rally does."""
        net, last = self._net, [0] * DEPTH
        for turn in range(count):
            closing = turn % NUM_LAYERS == 0
            if closing and turn:
                for mb in range(DEPTH):
                    net.combine(mb, last[mb], self._outs[mb])
            layer = self._course.next(net, DEPTH)
            for mb in range(DEPTH):
                if not closing:
                    net.combine(mb, last[mb], self._outs[mb])
                net.dispatch(mb, layer, self._hidden, self._experts, self._weights)
                last[mb] = layer
        for mb in range(DEPTH):
            net.combine(mb, last[mb], self._outs[mb])

    def close(self) -> None:
        """Close the net."""
        self._net.close()


class OurExpert:
    """An expert node of Topspin that answers zeros."""

    def __init__(self, case: ExchangeCase, net: ExpertNet) -> None:
        self._net = net
        self._course = _Course(case)
        self._partial = torch.zeros(
            case.rows * case.num_attention, HIDDEN_SIZE, dtype=torch.bfloat16
        )

    def trip(self) -> None:
        """Gather and reply one micro-batch."""
        self._serve(self._course.next(self._net, 1), 0)

    def burst(self, count: int) -> None:
        """Serve `count` layers of DEPTH micro-batches."""
        for _ in range(count):
            layer = self._course.next(self._net, DEPTH)
            for mb in range(DEPTH):
                self._serve(layer, mb)

    def _serve(self, layer: int, micro_batch: int) -> None:
        for batch in self._net.gather(micro_batch, layer):
            rows = batch.hidden.shape[0]
            partial = self._partial
            self._net.reply(batch, partial if rows == partial.shape[0] else partial[:rows])

    def close(self) -> None:
        """Close the net."""
        self._net.close()


def local_attention(case: ExchangeCase) -> OurAttention:
    """Return an attention node whose experts run inside combine()."""
    hub = LocalHub(_SHAPE, 1, case.num_experts)
    partial = torch.zeros(case.rows, HIDDEN_SIZE, dtype=torch.bfloat16)

    def serve(batch: ExpertBatch) -> torch.Tensor:
        rows = batch.hidden.shape[0]
        return partial if rows == partial.shape[0] else partial[:rows]

    for index in range(case.num_experts):
        hub.attach_expert(index, serve, table=_table(case.num_experts))
    return OurAttention(case, hub.attention_net(0, _table(case.num_experts)))


def our_attention(case: ExchangeCase, index: int, addresses: list[str]) -> OurAttention:
    """Connect attention node `index`."""
    net = connect_attention(
        Identity(role="attention", index=index, incarnation=1, shape=_SHAPE),
        [ExpertPeer(address=address, incarnation=2) for address in addresses],
        _table(case.num_experts),
        case.waits,
        network=_network(case, "attention"),
    )
    return OurAttention(case, net)


def our_expert(case: ExchangeCase, index: int, listener: ExpertListener) -> OurExpert:
    """Accept all attention nodes as expert node `index`."""
    net = listener.accept(
        Identity(role="expert", index=index, incarnation=2, shape=_SHAPE),
        (1,) * case.num_attention,
        _table(case.num_experts),
        case.waits,
    )
    return OurExpert(case, net)


class GlooPlayer:
    """Either role over torch.distributed gloo, point to point; tensors are reused."""

    def __init__(self, case: ExchangeCase, *, attention: bool, index: int) -> None:
        _join_gloo(case, attention=attention, index=index)
        self._attention = attention
        first = case.num_attention if attention else 0
        count = case.num_experts if attention else case.num_attention
        self._peers = range(first, first + count)
        shape = (DEPTH, count, case.rows, HIDDEN_SIZE)
        self._out = torch.zeros(shape, dtype=torch.bfloat16)
        self._in = torch.zeros(shape, dtype=torch.bfloat16)

    def _receive(self, slot: int) -> list[Any]:
        pairs = zip(self._in[slot], self._peers, strict=True)
        return [dist.irecv(rows, peer, tag=slot) for rows, peer in pairs]

    def _send(self, slot: int) -> list[Any]:
        pairs = zip(self._out[slot], self._peers, strict=True)
        return [dist.isend(rows, peer, tag=slot) for rows, peer in pairs]

    def trip(self) -> None:
        """Exchange once with every peer."""
        if self._attention:
            _wait(self._receive(0) + self._send(0))
        else:
            _wait(self._receive(0))
            _wait(self._send(0))

    def burst(self, count: int) -> None:
        """Exchange with DEPTH slots in flight."""
        posted = [self._receive(slot) for slot in range(DEPTH)]
        sent: list[list[Any]] = [[] for _ in range(DEPTH)]
        if self._attention:
            sent = [self._send(slot) for slot in range(DEPTH)]
        for turn in range(count):
            for slot in range(DEPTH):
                _wait(posted[slot] + sent[slot])
                last = turn == count - 1
                posted[slot] = [] if last else self._receive(slot)
                sent[slot] = self._send(slot) if not (last and self._attention) else []
        for each in sent:
            _wait(each)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


class AllToAllPlayer:
    """Either role over gloo's all_to_all_single: one for the way out, one for the way back."""

    def __init__(self, case: ExchangeCase, *, attention: bool, index: int) -> None:
        _join_gloo(case, attention=attention, index=index)
        m, n = case.num_attention, case.num_experts
        to_experts = [0] * m + [case.rows] * n
        to_attention = [case.rows] * m + [0] * n
        nothing = [0] * (m + n)
        # (sent, received) on the way out, and on the way back.
        self._ways = (
            ((to_experts, nothing), (nothing, to_experts))
            if attention
            else ((nothing, to_attention), (to_attention, nothing))
        )
        count = sum(to_experts if attention else to_attention)
        self._full = [
            torch.zeros(count, HIDDEN_SIZE, dtype=torch.bfloat16) for _ in range(2 * DEPTH)
        ]
        self._empty = torch.zeros(0, HIDDEN_SIZE, dtype=torch.bfloat16)

    def _start(self, way: int, slot: int) -> Any:
        send, receive = self._ways[way]
        buffer = self._full[2 * slot + way]
        return dist.all_to_all_single(
            buffer if sum(receive) else self._empty,
            buffer if sum(send) else self._empty,
            output_split_sizes=receive,
            input_split_sizes=send,
            async_op=True,
        )

    def trip(self) -> None:
        """Go out and back once."""
        self._start(0, 0).wait()
        self._start(1, 0).wait()

    def burst(self, count: int) -> None:
        """Go out and back with DEPTH in flight; collectives must start in the same order."""
        out = [self._start(0, slot) for slot in range(DEPTH)]
        for turn in range(count):
            back = []
            for slot in range(DEPTH):
                out[slot].wait()
                back.append(self._start(1, slot))
            for slot in range(DEPTH):
                back[slot].wait()
                if turn < count - 1:
                    out[slot] = self._start(0, slot)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def _join_gloo(case: ExchangeCase, *, attention: bool, index: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{case.rendezvous}",
        rank=index if attention else case.num_attention + index,
        world_size=case.num_attention + case.num_experts,
    )


class ZmqPlayer:
    """Either role over one PAIR socket per peer; large messages are not copied by pyzmq."""

    def __init__(
        self, case: ExchangeCase, *, attention: bool, sockets: list[zmq.Socket[bytes]]
    ) -> None:
        self._attention = attention
        self._sockets = sockets
        self._message = memoryview(bytearray(case.rows * ROW_BYTES))

    def _send(self) -> None:
        for sock in self._sockets:
            sock.send(self._message, copy=False)

    def _receive(self) -> None:
        for sock in self._sockets:
            frame = sock.recv(copy=False)
            assert len(frame.buffer) == len(self._message)

    def trip(self) -> None:
        """Exchange once with every peer."""
        if self._attention:
            self._send()
            self._receive()
        else:
            self._receive()
            self._send()

    def burst(self, count: int) -> None:
        """Exchange with DEPTH messages in flight."""
        if not self._attention:
            for _ in range(count * DEPTH):
                self.trip()
            return
        for _ in range(DEPTH):
            self._send()
        for turn in range(count):
            for _ in range(DEPTH):
                self._receive()
                if turn < count - 1:
                    self._send()

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._sockets:
            sock.close(1000)  # ms for the last message to leave


def zmq_listen(
    case: ExchangeCase, context: zmq.Context[Any]
) -> tuple[str, list[zmq.Socket[bytes]]]:
    """Bind one socket per attention node; returns their addresses, joined by commas."""
    sockets = [context.socket(zmq.PAIR) for _ in range(case.num_attention)]
    for sock in sockets:
        ipc = f"ipc://@bench-{secrets.token_hex(8)}"
        sock.bind("tcp://127.0.0.1:*" if case.backend == "zmq tcp" else ipc)
    names = [sock.getsockopt_string(zmq.LAST_ENDPOINT) for sock in sockets]
    return ",".join(names), sockets


def zmq_connect(
    context: zmq.Context[Any], index: int, addresses: list[str]
) -> list[zmq.Socket[bytes]]:
    """Connect attention node `index` to every expert."""
    sockets = []
    for names in addresses:
        sock = context.socket(zmq.PAIR)
        sock.connect(names.split(",")[index])
        sockets.append(sock)
    return sockets


def open_listener(case: ExchangeCase) -> ExpertListener:
    """Listen for the attention nodes of a case over Topspin."""
    transport = case.backend.split()[0]
    assert transport in get_args(Between)
    return listen_expert(cast(Between, transport), _network(case, "expert"))


def _network(case: ExchangeCase, group: str) -> NodeNetwork:
    """Return a network with the keys of a group, if frames of the case carry codes."""
    if not case.backend.endswith("keys"):
        return ON_ONE_HOST
    return NodeNetwork(keys=KeyDirectory(Path(case.keys) / group, group))
