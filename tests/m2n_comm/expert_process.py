"""An expert node as a process: `python -m tests.m2n_comm.expert_process TRANSPORT [HOST KEYS]`.

Prints its address, serves STEPS steps of one attention node, then waits for a step that
never comes. Used by test_processes.py, which kills it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast, get_args

from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.open import listen_expert
from m2n_comm.pairing.addresses import Between
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import FakeExperts, make_shape, make_table, make_ticket, serve_steps
from topspin.processes.keys import KeyDirectory
from topspin.processes.node_network import NodeNetwork

EXPERT_INCARNATION = 2**63 + 5
ATTENTION_INCARNATION = 2**64 - 1
STEPS = 6


def main(transport: str, host: str | None = None, keys: str | None = None) -> None:
    """Serve until killed; `host`: the address to listen on; `keys`: the folder of its keys."""
    shape = make_shape()
    table = make_table(shape, 1)
    assert transport in get_args(Between)
    mine = None if keys is None else KeyDirectory(Path(keys), "expert")
    listener = listen_expert(cast(Between, transport), NodeNetwork(host, mine, ("attention",)))
    print(listener.address, flush=True)
    me = Identity(role="expert", index=0, incarnation=EXPERT_INCARNATION, shape=shape)
    net = listener.accept(me, (ATTENTION_INCARNATION,), table, Waits(timeout_s=20.0))
    assert isinstance(net, ExpertSide)
    serve = FakeExperts(shape, 7).serve(table, 0)
    serve_steps(net, [make_ticket(step, m=2) for step in range(1, STEPS + 1)], serve)
    print("served", flush=True)
    # The next frame is gathered and never answered.
    net.begin(make_ticket(STEPS + 1, m=2))
    next(iter(net.gather(0, 0)))
    print("holding", flush=True)
    next(iter(net.gather(1, 0)))


if __name__ == "__main__":
    main(*sys.argv[1:])
