"""An expert node's tickets over cuda_ipc: the kernels from gather to reply in one recording."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from expert_nodes.worker import TicketGraphs, run_ticket
from m2n_comm.net import ExpertBatch
from tests.checkpoints import make_checkpoint
from tests.expert_nodes.nodes import load, taken
from tests.m2n_comm.gpu.ipc_fleet import NEEDS_INTERPRETER, ipc_fleet, ipc_shape, ticket_of
from tests.m2n_comm.harness import NUM_EXPERTS
from topspin.expert_table import uniform_table

pytestmark = NEEDS_INTERPRETER

WIDTH = 32
HELD = (tuple(range(NUM_EXPERTS)),)
BUCKETS = (2, 1)


def test_tickets_are_recorded_once_and_follow_what_is_sent(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path,
        "mixtral",
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_local_experts=NUM_EXPERTS,
    )
    experts, oracle = (load(path, HELD, kernels=each) for each in ("triton", "reference"))
    graphs = TicketGraphs(experts.runtime)
    shape = ipc_shape(hidden_size=WIDTH, top_k=2, num_layers=1)
    table = uniform_table(num_layers=1, num_experts=NUM_EXPERTS, num_nodes=1)
    generator = torch.Generator().manual_seed(0)
    with ipc_fleet(1, 1, shape=shape, table=table) as fleet:
        (net,) = fleet.attention
        for step in (1, 2, 3):
            ticket = ticket_of(step, buckets=BUCKETS)
            net.begin(ticket)
            sent: list[tuple[Tensor, Tensor, Tensor]] = []
            for mb, bucket in enumerate(BUCKETS):
                size = (step + mb) % (bucket + 1)
                hidden = torch.randn(size, WIDTH, generator=generator)
                weights, chosen = torch.rand(size, NUM_EXPERTS, generator=generator).topk(2)
                net.dispatch(mb, 0, hidden, chosen, weights)
                sent.append((hidden, chosen, weights))
            run_ticket(fleet.experts[0], experts, ticket, graphs=graphs)
            assert len(graphs) == min(step - 1, 1)
            for mb, (hidden, chosen, weights) in enumerate(sent):
                out = torch.full(hidden.shape, float("nan"))
                net.combine(mb, 0, out)
                count = (len(hidden),)
                batch = ExpertBatch(mb, 0, 0, hidden, chosen.int(), weights, count, 1)
                torch.testing.assert_close(out, oracle.compute(batch), rtol=1e-4, atol=1e-5)
    assert taken(experts) == taken(oracle)
