"""The expert node's command line, and its net; everything else comes with Welcome."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import get_args

from expert_nodes.experts import Experts
from expert_nodes.worker import ExpertWorker
from m2n_comm.addresses import Between
from m2n_comm.hello import Identity
from m2n_comm.net import ExpertNet, wait_policy
from m2n_comm.open import ExpertListener, listen_expert
from m2n_comm.waits import Waits
from topspin.channel import FAILOVER_HEARTBEAT, RELAXED_HEARTBEAT, ControlClient
from topspin.logs import start_logging
from topspin.messages import Welcome
from topspin.node_life import NodeLife, run_node
from topspin.process import follow_parent

# Other nodes connect once their checkpoint is loaded; the scheduler ends the wait if one of them
# is lost (Inbox.check).
CONNECT_TIMEOUT_S = 3600.0


def accept_attention(
    listener: ExpertListener, welcome: Welcome, experts: Experts, life: NodeLife, *, index: int
) -> ExpertNet:
    """Accept the attention nodes of the topology; experts on a device get their rows there."""
    config, topology = welcome.config, welcome.topology
    return listener.accept(
        Identity(
            role="expert",
            index=index,
            incarnation=life.incarnation,
            shape=experts.net_shape(config),
            generation=topology.generation,
        ),
        topology.attention_incarnations,
        topology.table,
        Waits(
            timeout_s=CONNECT_TIMEOUT_S,
            policy=wait_policy(config),
            check=life.check,
            resume=life.progress.beat,
        ),
        runtime=experts.runtime if config.node.place.is_device else None,
        reuse=config.restart,
        senders=experts.senders(config),
    )


def run_worker(control: ControlClient, *, index: int, model_path: Path, transport: Between) -> None:
    """Run expert node `index` with the attention nodes in other processes."""
    listener = listen_expert(transport)
    try:
        ExpertWorker(
            control,
            index=index,
            model_path=model_path,
            open_net=partial(accept_attention, listener, index=index),
        ).serve(listener.address)
    finally:
        listener.close()


def main() -> int:
    """Run one expert node; returns its exit status."""
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m expert_nodes", description=__doc__)
    parser.add_argument("--control", required=True, help="address of the scheduler")
    parser.add_argument("--index", type=int, required=True, help="which expert node this is")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--transport", choices=get_args(Between), required=True)
    parser.add_argument(
        "--failover", action="store_true", help="leave soon when the scheduler is not heard"
    )
    args = parser.parse_args()
    return run_node(
        "expert",
        args.index,
        args.control,
        logger=start_logging("expert"),
        body=lambda control: run_worker(
            control, index=args.index, model_path=args.model, transport=args.transport
        ),
        heartbeat=FAILOVER_HEARTBEAT if args.failover else RELAXED_HEARTBEAT,
    )
