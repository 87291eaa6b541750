"""An expert node as a process: `python -m tests.m2n_comm.expert_process TRANSPORT [HOST KEYS]`.

Prints its address, serves the steps of TICKETS for one attention node, then waits for a step that
never comes. Used by test_processes.py, which kills it. Without a GPU both ends of cuda_ipc
interpret their kernels over shared memory; with one they take turns on it, which shows that the
driver's shared memory is right and says nothing about time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import torch

from kernels.runtime import open_runtime
from m2n_comm.net import ExpertBatch, NetShape
from m2n_comm.open import listen_expert
from m2n_comm.pairing.addresses import Between
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.gpu.ipc_fleet import DEVICE, ticket_of
from tests.m2n_comm.harness import NUM_EXPERTS, FakeExperts, make_shape, make_table
from topspin.processes.keys import KeyDirectory
from topspin.processes.node_network import NodeNetwork

EXPERT_INCARNATION = 2**63 + 5
ATTENTION_INCARNATION = 2**64 - 1
# The second micro-batch of the first step takes three windows.
TICKETS = (ticket_of(1, buckets=(3, 8)), ticket_of(2, buckets=(2,)))
HELD = ticket_of(3, buckets=(2,))


def process_shape() -> NetShape:
    return make_shape(window_rows=3, num_micro_batches=2, deadline_s=60.0)


def main(transport: str, host: str | None = None, keys: str | None = None) -> None:
    """Serve until killed; `host`: the address to listen on; `keys`: the folder of its keys."""
    shape = process_shape()
    table = make_table(shape, 1)
    mine = None if keys is None else KeyDirectory(Path(keys), "expert")
    listener = listen_expert(cast("Between", transport), NodeNetwork(host, mine, ("attention",)))
    print(listener.address, flush=True)
    me = Identity(role="expert", index=0, incarnation=EXPERT_INCARNATION, shape=shape)
    runtime = open_runtime(DEVICE) if transport == "cuda_ipc" else None
    waits = Waits(timeout_s=60.0)
    net = listener.accept(me, (ATTENTION_INCARNATION,), table, waits, runtime=runtime)
    on_host = FakeExperts(shape, NUM_EXPERTS).serve(table, 0)

    def serve(batch: ExpertBatch) -> torch.Tensor:
        hidden, slots, weights = batch.hidden.cpu(), batch.slots.cpu(), batch.weights.cpu()
        taken = batch._replace(hidden=hidden, slots=slots, weights=weights)
        return on_host(taken).to(batch.hidden.device)

    for ticket in TICKETS:
        net.begin(ticket)
        for layer in range(shape.num_layers):
            for mb in range(ticket.num_micro_batches):
                for batch in net.gather(mb, layer):
                    net.reply(batch, serve(batch))
        net.finish()
    print("served", flush=True)
    # The next frame is gathered and never answered; the one after it never comes.
    net.begin(HELD)
    next(iter(net.gather(0, 0)))
    net.finish()
    print("holding", flush=True)
    input()


if __name__ == "__main__":
    main(*sys.argv[1:])
