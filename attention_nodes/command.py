"""The attention node's command line; everything else comes with the scheduler's Welcome."""

from __future__ import annotations

import argparse
from pathlib import Path

from attention_nodes.model_runner import ModelRunner
from attention_nodes.relay import Relay
from attention_nodes.worker import AttentionWorker, MakeDrafter, text_drafter
from kernels.runtime import open_runtime
from m2n_comm.emulate import LinkEmulation
from m2n_comm.hello import Identity
from m2n_comm.host.stage_link import StageLink
from m2n_comm.net import AttentionNet, stage_shape, wait_policy
from m2n_comm.open import connect_attention, connect_stage
from m2n_comm.waits import Waits
from topspin.channel import FAILOVER_HEARTBEAT, RELAXED_HEARTBEAT, ControlClient
from topspin.logs import start_logging
from topspin.messages import Welcome
from topspin.node_life import NodeLife, run_node
from topspin.plan import NodeConfig
from topspin.process import follow_parent

# Experts accept once they have loaded, which may take long; the scheduler ends the wait if one of
# them is lost (Inbox.check).
CONNECT_TIMEOUT_S = 3600.0


def waits_of(config: NodeConfig, life: NodeLife) -> Waits:
    """Return how a node waits for its peers."""
    return Waits(
        timeout_s=CONNECT_TIMEOUT_S,
        policy=wait_policy(config),
        check=life.check,
        resume=life.progress.beat,
    )


def connect_worker(
    control: ControlClient,
    *,
    index: int,
    model_path: Path,
    make_drafter: MakeDrafter = text_drafter,
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
            )
            links.append(link)
        return Relay(links)

    worker = AttentionWorker(
        control,
        index=index,
        model_path=model_path,
        open_net=connect,
        make_drafter=make_drafter,
        open_relay=relay,
    )
    worker.introduce()
    worker.serve()


def main(make_drafter: MakeDrafter = text_drafter) -> int:
    """Run one attention node; returns its exit status."""
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m attention_nodes", description=__doc__)
    parser.add_argument("--control", required=True, help="address of the scheduler")
    parser.add_argument("--index", type=int, required=True, help="which attention node this is")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument(
        "--failover", action="store_true", help="leave soon when the scheduler is not heard"
    )
    args = parser.parse_args()
    return run_node(
        "attention",
        args.index,
        args.control,
        logger=start_logging("attention"),
        body=lambda control: connect_worker(
            control, index=args.index, model_path=args.model, make_drafter=make_drafter
        ),
        heartbeat=FAILOVER_HEARTBEAT if args.failover else RELAXED_HEARTBEAT,
    )
