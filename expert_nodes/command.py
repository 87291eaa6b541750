"""The expert node's command line, and its net; everything else comes with Welcome."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

from expert_nodes.experts import Experts
from expert_nodes.worker import ExpertWorker
from m2n_comm.gpu.staged import StagedExpertNet
from m2n_comm.net import ExpertNet, wait_policy
from m2n_comm.open import Between, ExpertListener, listen_expert
from topspin.channel import FAILOVER_HEARTBEAT, RELAXED_HEARTBEAT, ControlClient
from topspin.messages import Welcome
from topspin.node_life import NodeLife, run_node
from topspin.process import follow_parent, start_logging

# Others may load for as long as their checkpoint takes; the scheduler ends the wait if one of
# them is lost (Inbox.check).
CONNECT_TIMEOUT_S = 3600.0


def accept_attention(
    listener: ExpertListener, welcome: Welcome, experts: Experts, life: NodeLife, *, index: int
) -> ExpertNet:
    """Accept the attention nodes of the topology; experts on a device get their rows there."""
    config, topology, runtime = welcome.config, welcome.topology, experts.runtime
    shape = experts.net_shape(config)
    is_ipc = config.m2n.transport == "cuda_ipc"
    accept: Callable[..., ExpertNet] = (
        partial(listener.accept_device, runtime=runtime)
        if is_ipc
        else partial(listener.accept, wait=wait_policy(config))
    )
    net = accept(
        shape,
        index=index,
        incarnation=life.incarnation,
        attention_incarnations=topology.attention_incarnations,
        timeout_s=CONNECT_TIMEOUT_S,
        table=topology.table,
        generation=topology.generation,
        check=life.check,
        reuse=config.restart,
    )
    if config.compute.place("expert").is_device and not is_ipc:
        count = len(topology.attention_incarnations)
        return StagedExpertNet(net, runtime, shape=shape, num_attention=count)
    return net


def run_worker(control: ControlClient, *, index: int, model_path: Path, transport: Between) -> None:
    """Run expert node `index`, the attention nodes being in other processes."""
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
