"""The attention node's command line; everything else comes with the scheduler's Welcome."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypedDict

from attention_nodes.model_runner import ModelRunner
from attention_nodes.worker import AttentionWorker
from kernels.runtime import open_runtime
from m2n_comm.gpu.ipc_open import connect_ipc
from m2n_comm.gpu.staged import StagedNet
from m2n_comm.host.emulate import LinkEmulation
from m2n_comm.host.lines import Check
from m2n_comm.net import AttentionNet, wait_policy
from m2n_comm.open import connect_attention
from topspin.channel import FAILOVER_HEARTBEAT, RELAXED_HEARTBEAT, ControlClient
from topspin.expert_table import ExpertTable
from topspin.messages import ExpertPeer, Welcome
from topspin.node_life import NodeLife, run_node
from topspin.process import follow_parent, start_logging

# Experts answer once they have loaded, however long that takes; the scheduler ends the wait if
# one of them is lost (Inbox.check).
CONNECT_TIMEOUT_S = 3600.0


class _Joining(TypedDict):
    """What the nets of all transports are told."""

    index: int
    incarnation: int
    experts: tuple[ExpertPeer | None, ...]
    table: ExpertTable
    timeout_s: float
    generation: int
    check: Check


def connect_worker(control: ControlClient, *, index: int, model_path: Path) -> None:
    """Run attention node `index`, its experts being in other processes."""

    def connect(welcome: Welcome, runner: ModelRunner, life: NodeLife) -> AttentionNet:
        config, topology = welcome.config, welcome.topology
        shape = runner.net_shape(config)
        joining: _Joining = {
            "index": index,
            "incarnation": life.incarnation,
            "experts": topology.experts,
            "table": welcome.table,
            "timeout_s": CONNECT_TIMEOUT_S,
            "generation": topology.generation,
            "check": life.check,
        }
        if config.m2n.transport == "cuda_ipc":
            runtime = open_runtime(config.compute.attention_device)
            return connect_ipc(shape, runtime=runtime, **joining)
        net = connect_attention(
            shape,
            link=LinkEmulation(latency_us=config.m2n.link_latency_us, gbps=config.m2n.link_gbps),
            wait=wait_policy(config),
            **joining,
        )
        if not config.compute.place("attention").is_device:
            return net
        runtime = open_runtime(config.compute.attention_device)
        return StagedNet(net, runtime, shape=shape, max_rows=config.max_num_batched_tokens)

    worker = AttentionWorker(control, index=index, model_path=model_path, open_net=connect)
    worker.introduce()
    worker.serve()


def main() -> int:
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
        body=lambda control: connect_worker(control, index=args.index, model_path=args.model),
        heartbeat=FAILOVER_HEARTBEAT if args.failover else RELAXED_HEARTBEAT,
    )
