"""Nets of cuda_ipc in the test process, on the CPU; one thread plays all nodes in turn.

Triton's interpreter patches Triton while a kernel runs, so no two threads may run kernels at once:
all attention nodes dispatch, then the expert nodes serve, then all attention nodes combine.
test_processes.py tests kernels that wait for another process.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kernels.runtime import HostRuntime, Runtime
from m2n_comm.gpu.ipc_attention import IpcAttentionNet
from m2n_comm.gpu.ipc_expert import IpcExpertNet
from m2n_comm.net import NetShape
from m2n_comm.waits import Check, Waits, wait_on
from tests.m2n_comm.harness import (
    NUM_EXPERTS,
    Collected,
    FakeExperts,
    Fleet,
    Rows,
    RowsOf,
    connect,
    make_shape,
    make_table,
    make_ticket,
    random_rows,
)
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket

NEEDS_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels on the CPU are interpreted only where is no GPU"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ticket_of(
    step: int, *, buckets: tuple[int, ...] = (4,), participants: tuple[int, ...] = (0,),
    version: int = 1, previous: int | None = None,
) -> StepTicket:  # fmt: skip
    ticket = make_ticket(step, participants=participants, m=len(buckets), version=version)
    return replace(ticket, row_buckets=buckets, previous=step - 1 if previous is None else previous)


def ipc_shape(**changes: Any) -> NetShape:
    return make_shape(**({"num_micro_batches": 3} | changes))


def small_rows(shape: NetShape, most: int = 4) -> RowsOf:
    """Return rows whose number, 0 to `most`, varies with node, layer and micro-batch."""

    def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        seed = ticket.step * 1000 + index * 100 + layer * 10 + mb
        size = (ticket.step + index * 2 + layer + 3 * mb) % (most + 1)
        return random_rows(shape, size, seed=seed)

    return rows_of


class IpcFleet(Fleet):
    """M attention and N expert nodes of cuda_ipc, played in one thread."""

    attention: list[IpcAttentionNet]  # type: ignore[assignment]
    experts: list[IpcExpertNet]  # type: ignore[assignment]

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

    def check(self, tickets: list[StepTicket], rows_of: RowsOf, *, rtol: float = 1e-5) -> Collected:
        """Play `tickets` and compare every sum; returns them."""
        results: Collected = {}
        for ticket in tickets:
            self._play(ticket, rows_of, results)
        steps = {ticket.step: ticket for ticket in tickets}
        self.check_sums(results, lambda ticket, *at: rows_of(steps[ticket.step], *at), rtol=rtol)
        return results

    def _play(self, ticket: StepTicket, rows_of: RowsOf, results: Collected) -> None:
        self.begin(ticket)
        for layer in range(self.shape.num_layers + 1):
            for mb in range(ticket.num_micro_batches):
                for index in ticket.participants:
                    net = self.attention[index]
                    if layer > 0:
                        rows = rows_of(ticket, index, layer - 1, mb)
                        out = torch.full(rows.hidden.shape, float("nan"))
                        key = (ticket.step, index, layer - 1, mb)
                        results[key] = net.combine(mb, layer - 1, out)
                    if layer < self.shape.num_layers:
                        net.dispatch(mb, layer, *rows_of(ticket, index, layer, mb))
                if layer < self.shape.num_layers:
                    self.serve(layer, mb)
        for expert in self.experts:
            expert.finish()
        for index in ticket.participants:
            self.attention[index].settle()


def open_ipc_fleet(
    m: int = 1,
    n: int = 1,
    *,
    shape: NetShape | None = None,
    table: ExpertTable | None = None,
    check: Check = wait_on,
    runtime: Runtime | None = None,
) -> IpcFleet:
    """Open all nets of fake experts, each in its own thread; no kernel runs meanwhile."""
    shape = shape or ipc_shape()
    table = table or make_table(shape, n)
    fake = FakeExperts(shape, NUM_EXPERTS)
    serves = [fake.serve(table, node) for node in range(n)]
    fleet = IpcFleet("cuda_ipc", shape, [], [], serves, table)
    connect(fleet, m, n, Waits(timeout_s=10.0, check=check), runtime=runtime or HostRuntime())
    return fleet


def ipc_fleet(m: int = 1, n: int = 1, **settings: Any) -> closing[IpcFleet]:
    """Open a fleet as open_ipc_fleet() does, and close it afterwards."""
    return closing(open_ipc_fleet(m, n, **settings))
