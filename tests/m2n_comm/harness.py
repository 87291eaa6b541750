"""Builds M x N nets of any transport inside the test process, and the dense oracle.

Every node of shm, tcp and nixl is a thread with its own sockets and mappings; local needs none for
its experts. Each fake expert multiplies rows by its own vector, so that a row in the wrong place,
or served by the wrong expert, changes the sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal, cast

import pytest
import torch

from kernels.runtime import HostRuntime, Runtime
from m2n_comm.emulate import LinkEmulation
from m2n_comm.gpu.staged import ExpertStaging, StagedExpertNet, StagedNet
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.local import LocalHub
from m2n_comm.net import ExpertBatch, NetShape
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from topspin.expert_table import ExpertTable, uniform_table
from topspin.messages import ExpertPeer, StepTicket

Transport = Literal["local", "shm", "tcp", "nixl", "staged-local", "staged-shm"]
_HAS_NIXL = pytest.mark.skipif(
    find_spec("nixl") is None, reason="nixl is not installed: pip install -e .[rdma]"
)
NIXL = pytest.param("nixl", marks=_HAS_NIXL)
TRANSPORTS = ("local", "shm", "tcp", NIXL)
# Nets for a device over nets for the host.
STAGED: dict[str, Transport] = {"staged-local": "local", "staged-shm": "shm"}
JOIN_S = 20.0
NUM_EXPERTS = 7
SIZES = (0, 1, 8, 9, 3, 27, 5, 16, 2, 0, 33)


def make_shape(**changes: Any) -> NetShape:
    """Return a small shape: 24 wide, top 3, 2 layers, windows of 8 rows, 4 micro-batches."""
    values: dict[str, Any] = {
        "hidden_size": 24,
        "top_k": 3,
        "num_layers": 2,
        "payload": torch.float32,
        "window_rows": 8,
        "num_micro_batches": 4,
        "deadline_s": 20.0,
    }
    return NetShape(**(values | changes))


def make_table(shape: NetShape, num_nodes: int, *, num_experts: int = 7) -> ExpertTable:
    """Return the uniform table for `shape`."""
    return uniform_table(num_layers=shape.num_layers, num_experts=num_experts, num_nodes=num_nodes)


def make_ticket(
    step: int, *, participants: tuple[int, ...] = (0,), m: int = 1, version: int = 1
) -> StepTicket:
    """Return a ticket; the data plane does not read the row buckets."""
    return StepTicket(
        step=step,
        previous=step - 1,
        generation=1,
        table_version=version,
        num_micro_batches=m,
        participants=participants,
        row_buckets=(64,) * m,
    )


@dataclass(frozen=True)
class Rows:
    """The input of one dispatch."""

    hidden: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def random_rows(shape: NetShape, num_rows: int, *, choose_from: tuple[int, ...], seed: int) -> Rows:
    """Return random hidden rows routed to distinct experts out of `choose_from`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, shape.hidden_size, generator=generator).to(shape.payload)
    score = torch.rand(num_rows, len(choose_from), generator=generator)
    pool = torch.tensor(choose_from, dtype=torch.int64)
    experts = pool[score.argsort(dim=1)[:, : shape.top_k]]
    weights = torch.rand(num_rows, shape.top_k, generator=generator)
    return Rows(hidden, experts.view(num_rows, shape.top_k), weights)


class FakeExperts:
    """Fake experts, scale [L, E, H]: expert e of layer l maps a row h to h * scale[l, e]."""

    def __init__(self, shape: NetShape, num_experts: int) -> None:
        generator = torch.Generator().manual_seed(99)
        size = (shape.num_layers, num_experts, shape.hidden_size)
        self.scale = torch.randn(size, generator=generator)
        self.payload = shape.payload

    def serve(self, table: ExpertTable, node: int) -> Callable[[ExpertBatch], torch.Tensor]:
        """Return the computation of expert node `node`, from slots alone."""
        scales = [
            self.scale[layer, list(held)] for layer, held in enumerate(table.experts_of(node))
        ]

        def compute(batch: ExpertBatch) -> torch.Tensor:
            here = batch.slots >= 0
            scale = scales[batch.layer][batch.slots.clamp(min=0).long()]
            weights = torch.where(here, batch.weights, torch.zeros(()))
            return ((scale * weights[:, :, None]).sum(1) * batch.hidden.float()).to(self.payload)

        return compute

    def expected(self, table: ExpertTable, layer: int, rows: Rows) -> torch.Tensor:
        """Return the dense sum over all experts, one rounding to the payload per node."""
        owner = {expert: found[0].node for expert, found in enumerate(table.replicas(layer))}
        out = torch.zeros(rows.hidden.shape, dtype=torch.float32)
        for node in range(table.num_nodes):
            gate = torch.zeros(rows.hidden.shape[0], table.num_experts)
            for expert in range(table.num_experts):
                if owner[expert] == node:
                    gate[:, expert] = (rows.weights * (rows.experts == expert)).sum(1)
            partial = (gate @ self.scale[layer]) * rows.hidden.float()
            out += partial.to(self.payload).float()
        return out


@dataclass
class Fleet:
    """The open nets of M attention and N expert nodes."""

    transport: Transport
    shape: NetShape
    attention: list[AttentionSide]
    experts: list[ExpertSide]
    serves: list[Callable[[ExpertBatch], torch.Tensor]]
    failures: dict[str, BaseException] = field(default_factory=dict)
    close_failed: bool = True

    def run(
        self,
        tickets: list[StepTicket],
        attention: Callable[[AttentionSide, StepTicket, int], None],
    ) -> dict[str, BaseException]:
        """Play all tickets on all nodes; return the errors by node name ("expert 0")."""
        threads = []
        for index, net in enumerate(self.attention):
            threads.append(
                self._thread(f"attention {index}", net, self._play, attention, tickets, index)
            )
        if self.transport != "local":
            for index, expert in enumerate(self.experts):
                threads.append(
                    self._thread(
                        f"expert {index}", expert, serve_steps, expert, tickets, self.serves[index]
                    )
                )
        _run_all(threads)
        return self.failures

    def replace_serve(self, index: int, serve: Callable[[ExpertBatch], torch.Tensor]) -> None:
        """Let expert node `index` use `serve` from now on."""
        self.serves[index] = serve

    def close(self) -> None:
        """Close every net."""
        for attention in self.attention:
            attention.close()
        for expert in self.experts:
            expert.close()

    def _play(
        self,
        attention: Callable[[AttentionSide, StepTicket, int], None],
        tickets: list[StepTicket],
        index: int,
    ) -> None:
        for ticket in tickets:
            if index in ticket.participants:
                self.attention[index].begin(ticket)
                attention(self.attention[index], ticket, index)

    def _thread(
        self, name: str, net: AttentionSide | ExpertSide, target: Callable[..., None], *args: Any
    ) -> threading.Thread:
        def body() -> None:
            try:
                target(*args)
            except BaseException as error:
                self.failures[name] = error
                if self.close_failed:
                    net.close()  # as a node does before it exits

        return threading.Thread(target=body, name=name, daemon=True)


def _run_all(threads: list[threading.Thread]) -> None:
    """Start the threads and wait until all have ended."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), f"{thread.name} hangs"


def _current(
    serves: list[Callable[[ExpertBatch], torch.Tensor]], index: int
) -> Callable[[ExpertBatch], torch.Tensor]:
    """Return a serve that calls the current serve of node `index`."""
    return lambda batch: serves[index](batch)


def serve_steps(
    net: ExpertSide, tickets: list[StepTicket], serve: Callable[[ExpertBatch], torch.Tensor]
) -> None:
    """Do an expert node's work for `tickets`."""
    for ticket in tickets:
        net.begin(ticket)
        for layer in range(net.shape.num_layers):
            for micro_batch in range(ticket.num_micro_batches):
                for batch in net.gather(micro_batch, layer):
                    net.reply(batch, serve(batch))


def _open_local(
    num_attention: int,
    *,
    shape: NetShape,
    table: ExpertTable,
    serves: list[Callable[[ExpertBatch], torch.Tensor]],
    link: LinkEmulation | None,
) -> Fleet:
    """Open a hub and attach everyone."""
    hub = LocalHub(shape, num_attention, len(serves), link=link)
    experts = [
        hub.attach_expert(index, _current(serves, index), table=table)
        for index in range(len(serves))
    ]
    nets = [hub.attention_net(index, table) for index in range(num_attention)]
    return Fleet("local", shape, nets, experts, serves)


def open_fleet(
    transport: Transport,
    num_attention: int,
    num_experts: int,
    *,
    shape: NetShape,
    table: ExpertTable,
    serves: list[Callable[[ExpertBatch], torch.Tensor]],
    link: LinkEmulation | None = None,
    wait: Literal["block", "spin"] = "block",
) -> Fleet:
    """Open all nets. Every node gets `table`."""
    if transport in STAGED:
        return open_staged(
            STAGED[transport], num_attention, shape=shape, table=table, serves=serves, link=link
        )
    if transport == "local":
        return _open_local(num_attention, shape=shape, table=table, serves=serves, link=link)
    listeners = [listen_expert(transport) for _ in range(num_experts)]
    peers = [
        ExpertPeer(address=listener.address, incarnation=100 + index)
        for index, listener in enumerate(listeners)
    ]
    opened: dict[str, Any] = {}
    waits = Waits(timeout_s=10.0, policy=wait)

    def accept(index: int) -> None:
        me = Identity(role="expert", index=index, incarnation=100 + index, shape=shape)
        incarnations = range(200, 200 + num_attention)
        opened[f"expert {index}"] = listeners[index].accept(me, incarnations, table, waits)

    def connect(index: int) -> None:
        me = Identity(role="attention", index=index, incarnation=200 + index, shape=shape)
        opened[f"attention {index}"] = connect_attention(me, peers, table, waits, link=link)

    threads = [threading.Thread(target=accept, args=(i,), daemon=True) for i in range(num_experts)]
    threads += [
        threading.Thread(target=connect, args=(i,), daemon=True) for i in range(num_attention)
    ]
    _run_all(threads)
    return Fleet(
        transport,
        shape,
        [opened[f"attention {index}"] for index in range(num_attention)],
        [opened[f"expert {index}"] for index in range(num_experts)],
        serves,
    )


def _staged_serve(
    staging: ExpertStaging, serve: Callable[[ExpertBatch], torch.Tensor]
) -> Callable[[ExpertBatch], torch.Tensor]:
    """Return a serve for a host's batches that computes on the staging's device."""
    return lambda batch: staging.to_host(serve(staging.to_device(batch)))


def open_staged(
    transport: Transport,
    num_attention: int,
    *,
    shape: NetShape,
    table: ExpertTable,
    serves: list[Callable[[ExpertBatch], torch.Tensor]],
    link: LinkEmulation | None,
    runtimes: Callable[[], Runtime] = HostRuntime,
) -> Fleet:
    """Open a fleet with every node on its own device; local's experts around `serve`.

    A step's micro-batches have up to 40 rows here, and the buffers fewer: they have to grow.
    """
    if transport == "local":
        stagings = [ExpertStaging(runtimes(), shape, num_attention=num_attention) for _ in serves]
        hub_serves = [
            _staged_serve(staging, _current(serves, index))
            for index, staging in enumerate(stagings)
        ]
        fleet = _open_local(num_attention, shape=shape, table=table, serves=hub_serves, link=link)
        fleet.serves = serves
    else:
        fleet = open_fleet(
            transport,
            num_attention,
            len(serves),
            shape=shape,
            table=table,
            serves=serves,
            link=link,
        )
        staged = [
            StagedExpertNet(net, runtimes(), shape=shape, num_attention=num_attention)
            for net in fleet.experts
        ]
        fleet.experts = cast("list[ExpertSide]", staged)
    nets = [StagedNet(net, runtimes(), shape=shape, max_rows=20) for net in fleet.attention]
    fleet.attention = cast("list[AttentionSide]", nets)
    return fleet


RowsOf = Callable[[StepTicket, int, int, int], Rows]
Collected = dict[tuple[int, int, int, int], torch.Tensor]


@contextmanager
def fleet_of(
    transport: Transport,
    m: int = 1,
    n: int = 1,
    *,
    shape: NetShape | None = None,
    table: ExpertTable | None = None,
    link: LinkEmulation | None = None,
) -> Iterator[Fleet]:
    """Open a fleet of fake experts and close it afterwards."""
    shape = shape or make_shape()
    table = table or make_table(shape, n)
    fake = FakeExperts(shape, NUM_EXPERTS)
    fleet = open_fleet(
        transport,
        m,
        n,
        shape=shape,
        table=table,
        serves=[fake.serve(table, node) for node in range(n)],
        link=link,
    )
    try:
        yield fleet
    finally:
        fleet.close()


def rally(rows_of: RowsOf, results: Collected) -> Callable[[AttentionSide, StepTicket, int], None]:
    """Return a function that uses an attention node's net in rally order.

    It keeps the results by (step, node, layer, micro-batch).
    """

    def play(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        shape = net.shape
        micro_batches = range(ticket.num_micro_batches)
        sizes: dict[int, int] = {}
        for layer in range(shape.num_layers + 1):
            for mb in micro_batches:
                if layer > 0:
                    out = torch.full((sizes[mb], shape.hidden_size), float("nan"))
                    results[ticket.step, index, layer - 1, mb] = net.combine(mb, layer - 1, out)
                if layer < shape.num_layers:
                    rows = rows_of(ticket, index, layer, mb)
                    sizes[mb] = rows.hidden.shape[0]
                    hidden, weights = rows.hidden.clone(), rows.weights.clone()
                    experts = rows.experts.clone()
                    net.dispatch(mb, layer, hidden, experts, weights)
                    if sizes[mb] <= shape.window_rows:
                        hidden.fill_(float("nan"))
                        weights.fill_(float("nan"))
                        experts.fill_(0)

    return play


def mixed_rows(shape: NetShape) -> RowsOf:
    """Return rows whose number varies with node, layer and micro-batch, some in many parts."""

    def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        seed = ticket.step * 1000 + index * 100 + layer * 10 + mb
        size = SIZES[(ticket.step * 5 + index * 3 + layer * 2 + mb) % len(SIZES)]
        return random_rows(shape, size, choose_from=tuple(range(NUM_EXPERTS)), seed=seed)

    return rows_of


def few_rows(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
    """Return 5 rows, one part, for a fleet of one expert node."""
    everything = tuple(range(NUM_EXPERTS))
    return random_rows(make_shape(), 5, choose_from=everything, seed=ticket.step + layer + mb)


def reader_of(transport: Transport, side: str) -> str:
    """Return the node in which a fault of `side`'s frames shows; local runs in one thread."""
    if transport == "local" or side == "expert":
        return "attention 0"
    return "expert 0"


def assert_right_sums(results: Collected) -> None:
    """Check all returned sums, in spite of a fault."""
    shape = make_shape()
    fake = FakeExperts(shape, NUM_EXPERTS)
    for (step, index, layer, mb), got in results.items():
        rows = few_rows(make_ticket(step), index, layer, mb)
        want = fake.expected(make_table(shape, 1), layer, rows)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
