"""Builds M x N nets of any transport inside the test process, and the dense oracle.

Every node of shm, tcp and nixl is a thread with its own sockets and mappings; local needs none for
its experts. Each fake expert multiplies rows by its own vector, so that a row in the wrong place,
or served by the wrong expert, changes the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from threading import Thread
from typing import Any, Literal, NamedTuple, cast

import pytest
import torch

from kernels.runtime import HostRuntime, Runtime
from m2n_comm.emulate import LinkEmulation
from m2n_comm.gpu.staged import ExpertStaging, StagedExpertNet, StagedNet
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.local import LocalHub
from m2n_comm.net import ExpertBatch, NetShape, Serve, WaitPolicy
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.addresses import Between
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from topspin.expert_table import ExpertTable, uniform_table
from topspin.messages import ExpertPeer, StepTicket

Transport = Literal["local", "shm", "tcp", "nixl", "cuda_ipc", "staged-local", "staged-shm"]
HAS_NIXL = pytest.mark.skipif(
    find_spec("nixl") is None, reason="nixl is not installed: pip install -e .[rdma]"
)
# By default there are sums over it (test_contract.py), what is its own, and engines.
NIXL = pytest.param("nixl", marks=[HAS_NIXL, pytest.mark.slow])
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


def make_table(shape: NetShape, num_nodes: int, *, num_experts: int = NUM_EXPERTS) -> ExpertTable:
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


class Rows(NamedTuple):
    """The input of one dispatch."""

    hidden: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def random_rows(
    shape: NetShape, num_rows: int, *, seed: int, choose_from: Sequence[int] = range(NUM_EXPERTS)
) -> Rows:
    """Return random hidden rows routed to distinct experts out of `choose_from`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, shape.hidden_size, generator=generator).to(shape.payload)
    score = torch.rand(num_rows, len(choose_from), generator=generator)
    pool = torch.tensor(list(choose_from), dtype=torch.int64)
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

    def serve(self, table: ExpertTable, node: int) -> Serve:
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

    def partials(self, table: ExpertTable, layer: int, rows: Rows) -> torch.Tensor:
        """Return the sum in fp32, in node order, of what the nodes compute, to its last bit."""
        total = torch.zeros(rows.hidden.shape)
        for node, held in enumerate(table.slots[layer]):
            slots = [[held.index(e) if e in held else -1 for e in r] for r in rows.experts.tolist()]
            here = torch.tensor(slots, dtype=torch.int32).view(rows.experts.shape)
            batch = ExpertBatch(0, layer, 0, rows.hidden, here, rows.weights, (len(slots),))
            total += self.serve(table, node)(batch).float()
        return total


RowsOf = Callable[[StepTicket, int, int, int], Rows]
Collected = dict[tuple[int, int, int, int], torch.Tensor]
Play = Callable[[AttentionSide, StepTicket, int], None]


@dataclass
class Fleet:
    """The open nets of M attention and N expert nodes, all with `table` at first."""

    transport: Transport
    shape: NetShape
    attention: list[AttentionSide]
    experts: list[ExpertSide]
    serves: list[Serve]
    table: ExpertTable
    failures: dict[str, BaseException] = field(default_factory=dict)
    close_failed: bool = True

    def run(
        self,
        tickets: list[StepTicket],
        attention: Play,
        expert: Callable[[ExpertSide, list[StepTicket], Serve], None] | None = None,
    ) -> dict[str, BaseException]:
        """Play all tickets on all nodes; return the errors by node name ("expert 0").

        `expert` is what expert nodes do (None: serve_steps); the hub of local does it for them.
        """

        def play(net: AttentionSide, index: int) -> None:
            for ticket in tickets:
                if index in ticket.participants:
                    net.begin(ticket)
                    attention(net, ticket, index)

        def serve(net: ExpertSide, index: int) -> None:
            (expert or serve_steps)(net, tickets, self.serves[index])

        threads = [self._thread("attention", *each, play) for each in enumerate(self.attention)]
        if self.transport != "local":
            threads += [self._thread("expert", *each, serve) for each in enumerate(self.experts)]
        run_all(threads)
        return self.failures

    def check(self, tickets: list[StepTicket], rows_of: RowsOf) -> Collected:
        """Play `tickets` without an error, and compare every sum; returns them."""
        results: Collected = {}
        assert self.run(tickets, rally(rows_of, results)) == {}
        steps = {ticket.step: ticket for ticket in tickets}
        self.check_sums(results, lambda ticket, *where: rows_of(steps[ticket.step], *where))
        count = sum(len(each.participants) * each.num_micro_batches for each in tickets)
        assert len(results) == count * self.shape.num_layers
        return results

    def check_sums(self, results: Collected, rows_of: RowsOf, *, rtol: float = 1e-5) -> None:
        """Compare the sums that came back with the dense reference."""
        fake = FakeExperts(self.shape, self.table.num_experts)
        atol = 2e-5 if self.shape.payload == torch.float32 else 2e-2
        for (step, index, layer, mb), got in results.items():
            rows = rows_of(make_ticket(step), index, layer, mb)
            want = fake.expected(self.table, layer, rows)
            torch.testing.assert_close(got.float(), want, rtol=rtol, atol=atol)

    def close(self) -> None:
        """Close every net."""
        for net in (*self.attention, *self.experts):
            net.close()

    def _thread(self, role: str, index: int, net: Any, target: Callable[..., None]) -> Thread:
        name = f"{role} {index}"

        def body() -> None:
            try:
                target(net, index)
            except BaseException as error:
                self.failures[name] = error
                if self.close_failed:
                    net.close()  # as a node does before it exits

        return Thread(target=body, name=name, daemon=True)


def run_all(threads: list[Thread]) -> None:
    """Start the threads and wait until all have ended."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), f"{thread.name} hangs"


def serve_steps(net: ExpertSide, tickets: list[StepTicket], serve: Serve) -> None:
    """Do an expert node's work for `tickets`."""
    for ticket in tickets:
        net.begin(ticket)
        for layer in range(net.shape.num_layers):
            for micro_batch in range(ticket.num_micro_batches):
                for batch in net.gather(micro_batch, layer):
                    net.reply(batch, serve(batch))


def fleet_of(*args: Any, **settings: Any) -> closing[Fleet]:
    """Open a fleet as open_fleet() does, and close it afterwards."""
    return closing(open_fleet(*args, **settings))


def open_fleet(
    transport: Transport,
    m: int = 1,
    n: int = 1,
    *,
    shape: NetShape | None = None,
    table: ExpertTable | None = None,
    serves: list[Serve] | None = None,
    link: LinkEmulation | None = None,
    wait: WaitPolicy = "block",
    runtimes: Callable[[], Runtime] = HostRuntime,
) -> Fleet:
    """Open the nets of `m` attention and `n` expert nodes, by default of fake experts.

    Of a staged transport every node is on a device of its own, of `runtimes`.
    """
    shape = shape or make_shape()
    table = table or make_table(shape, n)
    fake = FakeExperts(shape, table.num_experts)
    serves = serves or [fake.serve(table, node) for node in range(n)]
    inner = STAGED.get(transport, transport)
    fleet = Fleet(inner, shape, [], [], serves, table)
    # What replaces a serve later counts.
    served: list[Serve] = [lambda batch, node=node: serves[node](batch) for node in range(n)]
    if transport == "staged-local":
        stagings = [ExpertStaging(runtimes(), shape, num_attention=m) for _ in serves]
        served = [_staged(*each) for each in zip(stagings, served, strict=True)]
    if inner == "local":
        hub = LocalHub(shape, m, n, link=link)
        fleet.experts = [
            hub.attach_expert(node, serve, table=table) for node, serve in enumerate(served)
        ]
        fleet.attention = [hub.attention_net(index, table) for index in range(m)]
    else:
        connect(fleet, m, n, Waits(timeout_s=10.0, policy=wait), link=link)
    if transport == "staged-shm":
        staged: list[Any] = [
            StagedExpertNet(net, runtimes(), shape=shape, num_attention=m) for net in fleet.experts
        ]
        fleet.experts = staged
    if transport in STAGED:
        # Micro-batches have up to 40 rows here, and the buffers fewer: they have to grow.
        nets: list[Any] = [
            StagedNet(net, runtimes(), shape=shape, max_rows=20) for net in fleet.attention
        ]
        fleet.attention = nets
    return fleet


def _staged(staging: ExpertStaging, serve: Serve) -> Serve:
    """Return a serve for a host's batches that computes on the staging's device."""
    return lambda batch: staging.to_host(serve(staging.to_device(batch)))


def connect(
    fleet: Fleet,
    m: int,
    n: int,
    waits: Waits,
    *,
    link: LinkEmulation | None = None,
    runtime: Runtime | None = None,
) -> None:
    """Open the nets of nodes that are processes elsewhere, each in a thread."""
    shape, table = fleet.shape, fleet.table
    listeners = [listen_expert(cast("Between", fleet.transport)) for _ in range(n)]
    peers = [ExpertPeer(address=each.address, incarnation=100 + e) for e, each in
             enumerate(listeners)]  # fmt: skip
    opened: dict[tuple[str, int], Any] = {}

    def accept(index: int) -> None:
        me = Identity(role="expert", index=index, incarnation=100 + index, shape=shape)
        opened["expert", index] = listeners[index].accept(
            me, range(200, 200 + m), table, waits, runtime=runtime
        )

    def dial(index: int) -> None:
        me = Identity(role="attention", index=index, incarnation=200 + index, shape=shape)
        opened["attention", index] = connect_attention(
            me, peers, table, waits, link=link, runtime=runtime
        )

    run_all(
        [Thread(target=accept, args=(index,), daemon=True) for index in range(n)]
        + [Thread(target=dial, args=(index,), daemon=True) for index in range(m)]
    )
    fleet.attention = [opened["attention", index] for index in range(m)]
    fleet.experts = [opened["expert", index] for index in range(n)]


def rally(rows_of: RowsOf, results: Collected) -> Play:
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
        return random_rows(shape, size, seed=seed)

    return rows_of


def few_rows(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
    """Return 5 rows, one part, for a fleet of one expert node."""
    return random_rows(make_shape(), 5, seed=ticket.step + layer + mb)


def reader_of(transport: Transport, side: str) -> str:
    """Return the node in which a fault of `side`'s frames shows; local runs in one thread."""
    if transport == "local" or side == "expert":
        return "attention 0"
    return "expert 0"
