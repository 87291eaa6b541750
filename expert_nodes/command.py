"""The expert node's command line, and its net; everything else comes with Welcome."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import get_args

from expert_nodes.experts import Experts
from expert_nodes.worker import ExpertWorker
from m2n_comm.net import ExpertNet
from m2n_comm.open import ExpertListener, listen_expert, waits_of
from m2n_comm.pairing.addresses import Between
from m2n_comm.pairing.hello import Identity
from topspin.messages import Welcome
from topspin.processes.channel import ControlClient
from topspin.processes.node_command import run_command
from topspin.processes.node_life import NodeLife
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork


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
        waits_of(config, life),
        runtime=experts.runtime if config.node.place.is_device else None,
        reuse=config.restart,
        senders=experts.senders(config),
    )


def run_worker(
    control: ControlClient,
    *,
    index: int,
    model_path: Path,
    transport: Between,
    network: NodeNetwork = ON_ONE_HOST,
) -> None:
    """Run expert node `index` with the attention nodes in other processes."""
    listener = listen_expert(transport, network)
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
    return run_command(
        "expert",
        "expert_nodes",
        lambda control, args, network: run_worker(
            control,
            index=args.index,
            model_path=args.model,
            transport=args.transport,
            network=network,
        ),
        about=__doc__,
        transports=get_args(Between),
    )
