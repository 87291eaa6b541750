"""The monolithic node process: attention and experts composed in one process.

Owns the composition for `--transport local`: every role joins the scheduler by its own control
connection and thread, as if it were a process, but rows are handed over in memory and the experts
are computed by the attention node's thread: inside combine(), or, if both roles share a device,
enqueued by dispatch() (m2n_comm.gpu.local). The expert threads do the rest of their nodes' work:
they load, report counts and prepare tables. If the roles' devices differ, the one on a GPU gets its
rows through pinned memory (m2n_comm.gpu.staged). Knows no arithmetic.

On a shared device the experts are loaded one node after the other, and before the attention node
loads: each checks the free memory, and the KV cache gets the remainder.
"""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch

from attention_nodes.loading import OpenDryNet
from attention_nodes.step.model_runner import ModelRunner
from attention_nodes.worker import AttentionWorker
from draft_nodes.drafter import make_drafter
from expert_nodes.experts import Experts
from expert_nodes.worker import ExpertWorker, InlineNet, load_experts
from kernels.runtime import open_runtime
from m2n_comm.emulate import LinkEmulation
from m2n_comm.gpu.local import DeviceNet, takes_rows_of_host
from m2n_comm.gpu.staged import ExpertStaging, StagedNet
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.local import LocalHub, Serve
from m2n_comm.net import AttentionNet, NetShape
from m2n_comm.waits import CHECK_INTERVAL_S
from topspin.errors import PeerLost
from topspin.expert_table import ExpertTable
from topspin.logs import start_logging
from topspin.messages import Role, Welcome
from topspin.process import follow_parent
from topspin.processes.channel import RELAXED_HEARTBEAT, ControlClient, Heartbeat
from topspin.processes.node_command import add_failover_argument, heartbeat_of
from topspin.processes.node_life import NodeLife, run_node

# The pause after each millisecond of reading experts for another table: the computing thread shares
# the interpreter.
PREPARE_PAUSE_S = 0.003

JOIN_TIMEOUT_S = 5.0


class LocalNode:
    """All nodes of one engine as threads of this process, around one net."""

    def __init__(
        self,
        *,
        address: str,
        model_path: Path,
        attention_nodes: int,
        expert_nodes: int,
        expects_grammars: bool = False,
        heartbeat: Heartbeat = RELAXED_HEARTBEAT,
    ) -> None:
        self._address = address
        self._heartbeat = heartbeat
        self._model_path = model_path
        self._num_attention = attention_nodes
        self._num_experts = expert_nodes
        self._expects_grammars = expects_grammars
        self._logger = logging.getLogger("local")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._hub: LocalHub | None = None
        self._generation = 0
        self._sides: dict[int, ExpertSide] = {}
        self._experts: dict[int, Experts] = {}
        # The expert nodes whose experts are on a device.
        self._on_device: set[int] = set()
        self._threads: list[threading.Thread] = []
        # Set once every expert node has loaded, and once attention nodes may begin to load.
        self._all_loaded = threading.Event()
        self._may_attend = threading.Event()
        if not expert_nodes:
            self._may_attend.set()
        # The exit statuses of expert nodes that have ended.
        self._ended: list[int] = []

    def run(self) -> int:
        """Serve until the scheduler stops; returns the process's exit status."""
        for index in range(self._num_experts):
            self._start("expert", index)
        for index in range(1, self._num_attention):
            self._start("attention", index)
        status = self._run_attention(0)
        # A thread that is inside torch while the interpreter ends aborts the process.
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        return max([status, *self._ended])

    def _start(self, role: Role, index: int) -> None:
        target = self._run_expert if role == "expert" else self._run_attention
        thread = threading.Thread(target=target, args=(index,), name=f"{role}-{index}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_attention(self, index: int) -> int:
        def body(control: ControlClient) -> None:
            def open_net(welcome: Welcome, runner: ModelRunner, life: NodeLife) -> AttentionNet:
                # The experts may load for long.
                while not self._all_loaded.wait(CHECK_INTERVAL_S):
                    life.inbox.check()
                return self._open_net(index, runner.net_shape(welcome.config), welcome)

            worker = AttentionWorker(
                control,
                index=index,
                model_path=self._model_path,
                open_net=open_net,
                dry_net=lambda welcome: self._dry_net(index, welcome),
                make_drafter=make_drafter,
                can_reform=False,
                expects_grammars=self._expects_grammars,
            )
            worker.introduce()
            self._may_attend.wait()
            if any(self._ended):
                raise PeerLost("an expert node of this process has failed")
            worker.serve()

        return self._run("attention", index, body)

    def _run(self, role: Role, index: int, body: Callable[[ControlClient], None]) -> int:
        return run_node(
            role, index, self._address, logger=self._logger, body=body, heartbeat=self._heartbeat
        )

    def _open_net(self, index: int, shape: NetShape, welcome: Welcome) -> AttentionNet:
        """Return the net from attention node `index` to all experts; runs in that node's thread."""
        config = welcome.config
        node = config.attention
        is_host = takes_rows_of_host(config, shape) and not self._on_device
        if config.shares_device or is_host:
            experts = [self._experts[each] for each in range(self._num_experts)]
            runtime = open_runtime(node.device, node.kernels)
            return DeviceNet(
                runtime,
                shape,
                index=index,
                serves=[each.compute for each in experts],
                table=welcome.table,
                traces=[
                    None if runtime.is_asynchronous else runtime.stamps_of(each.trace)
                    for each in experts
                ],
            )
        net = self._get_hub(shape, welcome).attention_net(index, welcome.table)
        if not node.place.is_device:
            return net
        runtime = open_runtime(node.device)
        return StagedNet(net, runtime, shape=shape, max_rows=node.max_num_batched_tokens)

    def _dry_net(self, index: int, welcome: Welcome) -> OpenDryNet | None:
        """Return an opener of the net for the dry run, if experts share the cache's device."""
        config = welcome.config
        if not config.shares_device:
            return None
        return lambda runner: self._open_net(index, runner.net_shape(config), welcome)

    def _get_hub(self, shape: NetShape, welcome: Welcome) -> LocalHub:
        """Return the generation's hub, with all experts attached.

        The first attention node makes it; no thread uses the last one any more.
        """
        link = welcome.config.link
        with self._lock:
            if self._hub is None or self._generation != welcome.topology.generation:
                self._generation = welcome.topology.generation
                hub = LocalHub(
                    shape,
                    num_attention=self._num_attention,
                    num_experts=self._num_experts,
                    link=LinkEmulation(latency_us=link.latency_us, gbps=link.gbps),
                )
                for node, experts in self._experts.items():
                    serve = self._serve_of(node, experts, shape)
                    side = hub.attach_expert(node, serve, table=welcome.table)
                    side.trace = experts.trace
                    self._sides[node] = side
                self._hub = hub
            return self._hub

    def _serve_of(self, node: int, experts: Experts, shape: NetShape) -> Serve:
        """Return the function that computes a batch whose tensors are the host's."""
        if node not in self._on_device:
            return experts.compute
        # Opened here because a runtime belongs to the thread that uses it.
        runtime = open_runtime(str(experts.runtime.device))
        staging = ExpertStaging(runtime, shape, num_attention=self._num_attention)
        return lambda batch: staging.to_host(experts.compute(staging.to_device(batch)))

    def _run_expert(self, index: int) -> int:
        status = self._run("expert", index, lambda control: self._serve_expert(control, index))
        self._ended.append(status)
        self._may_attend.set()
        return status

    def _serve_expert(self, control: ControlClient, index: int) -> None:
        def open_net(welcome: Welcome, experts: Experts, life: NodeLife) -> InlineNet:
            return InlineNet(set_table)

        def set_table(table: ExpertTable) -> None:
            if (side := self._sides.get(index)) is not None:
                side.set_table(table)

        ExpertWorker(
            control,
            index=index,
            model_path=self._model_path,
            open_net=open_net,
            load=lambda welcome: self._load_experts(welcome, index),
            pause_s=PREPARE_PAUSE_S,
            can_reform=False,
        ).serve("local")

    def _load_experts(self, welcome: Welcome, index: int) -> Experts:
        """Load in a temporary thread, whose OpenMP threads end with it.

        libgomp counts the threads of all pools: if there are more than cores, none spins, and every
        parallel region of the computing thread has to wake its helpers.
        """

        def load() -> Experts:
            with torch.inference_mode():
                return load_experts(self._model_path, welcome, index)

        is_device = welcome.config.node.place.is_device
        if not is_device:
            self._may_attend.set()
        with self._loading if is_device else nullcontext(), ThreadPoolExecutor(1) as loader:
            experts = loader.submit(load).result()
        # Steps are computed in another thread, with its pool of threads.
        torch.set_num_threads(1)
        # Another table's experts are packed by this thread, and torch's current GPU is per thread.
        open_runtime(str(experts.runtime.device))
        with self._lock:
            self._experts[index] = experts
            if is_device:
                self._on_device.add(index)
            is_last = len(self._experts) == self._num_experts
        if is_last:
            self._all_loaded.set()
            self._may_attend.set()
        return experts


def main() -> int:
    """Run the node process; returns its exit status."""
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m app.launch.local_node", description=__doc__)
    parser.add_argument("--control", required=True, help="address of the scheduler")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--attention-nodes", type=int, default=1)
    parser.add_argument("--expert-nodes", type=int, default=1)
    add_failover_argument(parser)
    args = parser.parse_args()
    start_logging("local")
    return LocalNode(
        address=args.control,
        model_path=args.model,
        attention_nodes=args.attention_nodes,
        expert_nodes=args.expert_nodes,
        expects_grammars=True,
        heartbeat=heartbeat_of(args),
    ).run()


if __name__ == "__main__":
    raise SystemExit(main())
