"""The stage's command line, and its lines; everything else comes with the scheduler's Welcome."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from attention_nodes.stages.runner import StageRunner
from attention_nodes.stages.worker import StageWorker
from m2n_comm.emulate import LinkEmulation
from m2n_comm.host.stage_link import StageLink
from m2n_comm.net import AttentionNet, stage_shape
from m2n_comm.open import ExpertListener, connect_attention, listen_expert, waits_of
from m2n_comm.pairing.addresses import Between
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import TURN_S
from topspin.messages import Welcome
from topspin.processes.channel import ControlClient
from topspin.processes.node_command import run_command
from topspin.processes.node_life import NodeLife
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork


def connect_experts(
    welcome: Welcome, runner: StageRunner, life: NodeLife, *, index: int, network: NodeNetwork
) -> AttentionNet:
    """Connect to the expert nodes as the sender of some layers of its attention node."""
    config, topology = welcome.config, welcome.topology
    num_attention = config.num_attention - len(config.stages)
    return connect_attention(
        Identity(
            role="attention",
            index=num_attention + index,
            incarnation=life.incarnation,
            shape=runner.net_shape(config),
            generation=topology.generation,
            participant=config.stage.of,
        ),
        topology.experts,
        welcome.table,
        waits_of(config, life),
        link=LinkEmulation(latency_us=config.link.latency_us, gbps=config.link.gbps),
        network=network,
    )


def accept_head(
    listener: ExpertListener, welcome: Welcome, runner: StageRunner, life: NodeLife, *, index: int
) -> StageLink:
    """Wait for the attention node of this stage.

    A wait for its rows has no limit of its own: the attention node's wait for the answer has one,
    and the scheduler watches the step.
    """
    config, topology = welcome.config, welcome.topology
    of = config.stage.of
    shape = stage_shape(config, runner.hidden_size, config.stages[index])
    incarnation = topology.attention_incarnations[of]
    assert incarnation is not None, "a stage serves with its attention node"
    return listener.accept_head(
        Identity(
            role="expert",
            index=index,
            incarnation=life.incarnation,
            shape=replace(shape, deadline_s=TURN_S),
            generation=topology.generation,
        ),
        of,
        incarnation,
        waits_of(config, life),
    )


def run_worker(
    control: ControlClient,
    *,
    index: int,
    model_path: Path,
    transport: Between,
    network: NodeNetwork = ON_ONE_HOST,
) -> None:
    """Run stage `index`; the other nodes are other processes."""
    listener = listen_expert(transport, network)
    try:
        StageWorker(
            control,
            index=index,
            model_path=model_path,
            open_net=partial(connect_experts, index=index, network=network),
            open_link=partial(accept_head, listener, index=index),
        ).serve(listener.address)
    finally:
        listener.close()


def main() -> int:
    """Run one stage; returns its exit status."""
    return run_command(
        "stage",
        "attention_nodes.stages",
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
