"""Nets of cuda_ipc in the test process, on the CPU; one thread plays all nodes in turn.

Triton's interpreter patches Triton while a kernel runs, so no two threads may run kernels at once:
all attention nodes dispatch, then the expert nodes serve, then all attention nodes combine.
test_ipc_processes.py tests kernels that wait for another process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kernels.runtime import HostRuntime, Runtime
from m2n_comm.gpu.ipc_attention import IpcAttentionNet
from m2n_comm.gpu.ipc_expert import IpcExpertNet
from m2n_comm.net import ExpertBatch, NetShape
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Check, Waits, wait_on
from tests.m2n_comm.harness import (
    NUM_EXPERTS,
    Collected,
    FakeExperts,
    Rows,
    RowsOf,
    make_shape,
    make_table,
    random_rows,
)
from topspin.expert_table import ExpertTable
from topspin.messages import ExpertPeer, StepTicket

NEEDS_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels on the CPU are interpreted only where is no GPU"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Serve = Callable[[ExpertBatch], torch.Tensor]


def ticket_of(
    step: int, *, buckets: tuple[int, ...] = (4,), participants: tuple[int, ...] = (0,),
    version: int = 1, previous: int | None = None,
) -> StepTicket:  # fmt: skip
    return StepTicket(
        step=step,
        previous=step - 1 if previous is None else previous,
        generation=1,
        table_version=version,
        num_micro_batches=len(buckets),
        participants=participants,
        row_buckets=buckets,
    )


def ipc_shape(**changes: Any) -> NetShape:
    return make_shape(**({"num_micro_batches": 3} | changes))


def small_rows(shape: NetShape, most: int = 4) -> RowsOf:
    """Return rows whose number, 0 to `most`, varies with node, layer and micro-batch."""

    def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        seed = ticket.step * 1000 + index * 100 + layer * 10 + mb
        size = (ticket.step + index * 2 + layer + 3 * mb) % (most + 1)
        return random_rows(shape, size, choose_from=tuple(range(NUM_EXPERTS)), seed=seed)

    return rows_of


@dataclass
class IpcFleet:
    """M attention and N expert nodes, and the computation of each expert node."""

    shape: NetShape
    attention: list[IpcAttentionNet]
    experts: list[IpcExpertNet]
    serves: list[Serve]
    results: Collected = field(default_factory=dict)

    def set_table(self, table: ExpertTable) -> None:
        for net in (*self.attention, *self.experts):
            net.set_table(table)

    def begin(self, ticket: StepTicket) -> None:
        for index in ticket.participants:
            self.attention[index].begin(ticket)
        for expert in self.experts:
            expert.begin(ticket)

    def serve(self, layer: int, mb: int) -> None:
        """Let all expert nodes serve a micro-batch."""
        for expert, serve in zip(self.experts, self.serves, strict=True):
            for batch in expert.gather(mb, layer):
                expert.reply(batch, serve(batch))

    def run(self, ticket: StepTicket, rows_of: RowsOf) -> None:
        """Play a step; keep the sums by (step, node, layer, micro-batch)."""
        self.begin(ticket)
        for layer in range(self.shape.num_layers + 1):
            for mb in range(ticket.num_micro_batches):
                for index in ticket.participants:
                    net = self.attention[index]
                    if layer > 0:
                        rows = rows_of(ticket, index, layer - 1, mb)
                        out = torch.full(rows.hidden.shape, float("nan"))
                        key = (ticket.step, index, layer - 1, mb)
                        self.results[key] = net.combine(mb, layer - 1, out)
                    if layer < self.shape.num_layers:
                        rows = rows_of(ticket, index, layer, mb)
                        net.dispatch(mb, layer, rows.hidden, rows.experts, rows.weights)
                if layer < self.shape.num_layers:
                    self.serve(layer, mb)
        for net in self.experts:
            net.finish()
        for index in ticket.participants:
            self.attention[index].settle()

    def check_sums(self, rows_of: RowsOf, tickets: list[StepTicket], *, rtol: float = 1e-5) -> None:
        """Compare all sums so far with the dense reference."""
        fake, table = FakeExperts(self.shape, NUM_EXPERTS), make_table(self.shape, 1)
        count = 0
        for ticket in tickets:
            for index in ticket.participants:
                for layer in range(self.shape.num_layers):
                    for mb in range(ticket.num_micro_batches):
                        rows = rows_of(ticket, index, layer, mb)
                        torch.testing.assert_close(
                            self.results[ticket.step, index, layer, mb],
                            fake.expected(table, layer, rows),
                            rtol=rtol,
                            atol=rtol * 8,
                        )
                        count += 1
        assert count == len(self.results)

    def close(self) -> None:
        for net in (*self.attention, *self.experts):
            net.close()


def open_ipc_fleet(
    m: int,
    n: int,
    *,
    shape: NetShape,
    table: ExpertTable,
    check: Check = wait_on,
    runtime: Runtime | None = None,
) -> IpcFleet:
    """Open all nets, each in its own thread; no kernel runs meanwhile."""
    runtime = runtime or HostRuntime()
    listeners = [listen_expert("cuda_ipc") for _ in range(n)]
    peers = [ExpertPeer(address=each.address, incarnation=100 + e) for e, each in
             enumerate(listeners)]  # fmt: skip
    opened: dict[tuple[str, int], Any] = {}
    waits = Waits(timeout_s=10.0, check=check)

    def accept(index: int) -> None:
        me = Identity(role="expert", index=index, incarnation=100 + index, shape=shape)
        opened["expert", index] = listeners[index].accept(
            me, range(200, 200 + m), table, waits, runtime=runtime
        )

    def connect(index: int) -> None:
        me = Identity(role="attention", index=index, incarnation=200 + index, shape=shape)
        opened["attention", index] = connect_attention(me, peers, table, waits, runtime=runtime)

    threads = [threading.Thread(target=accept, args=(e,), daemon=True) for e in range(n)]
    threads += [threading.Thread(target=connect, args=(a,), daemon=True) for a in range(m)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive(), "opening hangs"
    fake = FakeExperts(shape, NUM_EXPERTS)
    return IpcFleet(
        shape,
        [opened["attention", a] for a in range(m)],
        [opened["expert", e] for e in range(n)],
        [fake.serve(table, e) for e in range(n)],
    )


@contextmanager
def ipc_fleet(
    m: int = 1,
    n: int = 1,
    *,
    shape: NetShape | None = None,
    table: ExpertTable | None = None,
    check: Check = wait_on,
    runtime: Runtime | None = None,
) -> Iterator[IpcFleet]:
    """Open a fleet of fake experts and close it afterwards."""
    shape = shape or ipc_shape()
    table = table or make_table(shape, n)
    fleet = open_ipc_fleet(m, n, shape=shape, table=table, check=check, runtime=runtime)
    try:
        yield fleet
    finally:
        fleet.close()
