"""The attention node's command line; everything else comes with the scheduler's Welcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attention_nodes.stages.relay import Relay
from attention_nodes.step.model_runner import ModelRunner
from attention_nodes.worker import AttentionWorker, MakeDrafter, text_drafter
from kernels.runtime import open_runtime
from m2n_comm.emulate import LinkEmulation
from m2n_comm.host.stage_link import StageLink
from m2n_comm.net import AttentionNet, stage_shape
from m2n_comm.open import connect_attention, connect_stage, waits_of
from m2n_comm.pairing.hello import Identity
from topspin.messages import Welcome
from topspin.processes.channel import ControlClient
from topspin.processes.node_command import run_command
from topspin.processes.node_life import NodeLife
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork


def connect_worker(
    control: ControlClient,
    *,
    index: int,
    model_path: Path,
    make_drafter: MakeDrafter = text_drafter,
    network: NodeNetwork = ON_ONE_HOST,
    expects_grammars: bool = False,
) -> None:
    """Run attention node `index` with its experts in other processes."""

    def connect(welcome: Welcome, runner: ModelRunner, life: NodeLife) -> AttentionNet:
        config, topology = welcome.config, welcome.topology
        node = config.attention
        return connect_attention(
            Identity(
                role="attention",
                index=index,
                incarnation=life.incarnation,
                shape=runner.net_shape(config),
                generation=topology.generation,
            ),
            topology.experts,
            welcome.table,
            waits_of(config, life),
            runtime=open_runtime(node.device) if node.place.is_device else None,
            max_rows=node.max_num_batched_tokens,
            link=LinkEmulation(latency_us=config.link.latency_us, gbps=config.link.gbps),
            network=network,
        )

    def relay(welcome: Welcome, runner: ModelRunner, life: NodeLife) -> Relay:
        config, topology = welcome.config, welcome.topology
        links: list[StageLink] = []
        for stage, each in enumerate(config.stages):
            if each.of != index:
                continue
            peer = topology.stages[stage]
            assert peer is not None, "an attention node serves with all its stages"
            link = connect_stage(
                Identity(
                    role="attention",
                    index=index,
                    incarnation=life.incarnation,
                    shape=stage_shape(config, runner.hidden_size, each),
                    generation=topology.generation,
                ),
                stage,
                peer,
                waits_of(config, life),
                link=LinkEmulation(latency_us=config.link.latency_us, gbps=config.link.gbps),
                network=network,
            )
            links.append(link)
        return Relay(links, runner.runtime)

    worker = AttentionWorker(
        control,
        index=index,
        model_path=model_path,
        open_net=connect,
        make_drafter=make_drafter,
        open_relay=relay,
        expects_grammars=expects_grammars,
    )
    worker.introduce()
    worker.serve()


def main(drafter_for: Callable[[NodeNetwork], MakeDrafter] = lambda network: text_drafter) -> int:
    """Run one attention node, with the drafter for its network; returns its exit status."""
    return run_command(
        "attention",
        "attention_nodes",
        lambda control, args, network: connect_worker(
            control,
            index=args.index,
            model_path=args.model,
            make_drafter=drafter_for(network),
            network=network,
            expects_grammars=True,
        ),
        about=__doc__,
    )
