"""Expert nodes that accept in a thread, and attention nodes that connect to them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.tcp import TcpLines
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.addresses import Between
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import (
    FakeExperts,
    make_shape,
    make_table,
    make_ticket,
    random_rows,
    serve_steps,
)
from topspin.messages import ExpertPeer
from topspin.processes.keys import KeyDirectory
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork

EXPERT, ATTENTION = 7, 50
"""The incarnations of an expert node, and of attention node 0; others count from there."""


def of(keys: Path, group: str, *peers: str, host: str | None = None) -> NodeNetwork:
    """Return the network of a node with the keys of a group, which trusts `peers` (none: all)."""
    return NodeNetwork(host, KeyDirectory(keys / group, group), peers or None)


class Meeting:
    """An expert node that accepts in a thread, and attention nodes that connect to it."""

    def __init__(
        self, transport: Between, pool: ThreadPoolExecutor, network: NodeNetwork = ON_ONE_HOST
    ) -> None:
        self.transport = transport
        self.listener = listen_expert(transport, network)
        self._pool = pool
        self._nets: list[Any] = []

    def accept(self, num_attention: int = 1, **changes: Any) -> Future[ExpertSide]:
        """Accept in the background."""
        own = {"role": "expert", "index": 0, "incarnation": EXPERT}
        me, waits, others = _split(own | changes)
        incarnations = tuple(range(ATTENTION, ATTENTION + num_attention))
        table = others.pop("table", make_table(me.shape, me.index + 1))
        return self._pool.submit(self._accept, me, incarnations, table, waits, **others)

    def connect(self, index: int = 0, network: NodeNetwork = ON_ONE_HOST, **changes: Any) -> Any:
        """Connect as attention node `index`."""
        address = changes.pop("address", self.listener.address)
        incarnation = changes.pop("expert_incarnation", EXPERT)
        peer = ExpertPeer(address=address, incarnation=incarnation)
        own = {"role": "attention", "index": index, "incarnation": ATTENTION + index}
        me, waits, others = _split(own | changes)
        experts = others.pop("experts", [peer])
        table = others.pop("table", make_table(me.shape, 1))
        net = connect_attention(me, experts, table, waits, network=network, **others)
        self._nets.append(net)
        return net

    def check(self, attention: AttentionSide, expert: ExpertSide, step: int = 1) -> None:
        """Let rows of one attention node travel with codes, and check their sums."""
        assert isinstance(attention.lines, TcpLines)
        assert attention.lines.authenticated == {0: True}
        shape, table = attention.shape, make_table(attention.shape, 1)
        fake, ticket = FakeExperts(shape, 7), make_ticket(step)
        served = self._pool.submit(serve_steps, expert, [ticket], fake.serve(table, 0))
        attention.begin(ticket)
        for layer in range(shape.num_layers):
            rows = random_rows(shape, 5, seed=layer)
            attention.dispatch(0, layer, *rows)
            got = attention.combine(0, layer, torch.empty(rows.hidden.shape))
            want = fake.expected(table, layer, rows)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
        served.result(10)

    def stranger(self) -> socket.socket:
        """Return a connection of somebody."""
        address = self.listener.address.removeprefix("nixl:")
        if address.startswith("unix:@"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect("\0" + address.removeprefix("unix:@"))
            return sock
        _, host, port = address.split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def close(self) -> None:
        """Close everything that was opened."""
        for net in self._nets:
            net.close()
        self.listener.close()

    def _accept(self, *args: Any, **others: Any) -> ExpertSide:
        net = self.listener.accept(*args, **others)
        assert isinstance(net, ExpertSide)
        self._nets.append(net)
        return net


def _split(values: dict[str, Any]) -> tuple[Identity, Waits, dict[str, Any]]:
    """Split arguments into a node's identity, its waits, and the rest."""
    values = {"shape": make_shape(), "timeout_s": 10.0} | values
    me = {name: values.pop(name) for name in list(values) if name in Identity.__slots__}
    waits = {name: values.pop(name) for name in list(values) if name in Waits.__slots__}
    return Identity(**me), Waits(**waits), values


@contextmanager
def meeting_of(transport: Between, network: NodeNetwork = ON_ONE_HOST) -> Iterator[Meeting]:
    """Open a meeting and close it afterwards."""
    with ThreadPoolExecutor(4) as pool:
        meeting = Meeting(transport, pool, network)
        try:
            yield meeting
        finally:
            meeting.close()
