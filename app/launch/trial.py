"""Times decode steps of layouts: the process behind app.launch.calibrate.

Owns a small engine of real parts and no scheduler (deploy.rig): a ModelRunner and Experts with the
first layers of the checkpoint, loaded once, and the plans of a batch that decodes for ever. Each
candidate is measured in forks, connected by the real net: one for the attention node and, unless
all is one process, one for the expert node, each with its own threads and cores. Reads the
candidates from stdin, reports when it has loaded, and then prints each one's seconds per step. Run
as `python -m app.launch.trial`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from app.launch.calibrate import CandidateNode, LayoutCandidate, expert_layer_bytes
from attention_nodes.step.absent_experts import AbsentExperts
from deploy.rig.forks import fork
from deploy.rig.nets import ProcessPair, local_net
from deploy.rig.nodes import Rig
from expert_nodes.experts import Experts
from expert_nodes.worker import graphs_of, run_ticket
from kernels.runtime import open_runtime
from m2n_comm.host.frames import hops
from m2n_comm.net import AttentionNet
from models.description.config import load_model_config
from topspin.errors import TransportError
from topspin.logs import start_logging
from topspin.plan.spec import NodeConfig
from topspin.process import follow_parent

NUM_ROWS = 16
CONTEXT = 128
NUM_STEPS = 40
NUM_WARM_UP = 4
# A candidate on a slow machine stops after this time, with as few measured steps as MIN_STEPS.
BUDGET_S = 0.3
MIN_STEPS = 3
# Experts larger than processor caches, as a whole model's are.
WEIGHT_BYTES = 64 * 2**20


class LayoutTrial:
    """The first layers of a model, loaded and warmed up. Starts no thread itself.

    OpenMP starts its threads at the first parallel region with several; a fork would lack them.
    """

    def __init__(self, config: NodeConfig) -> None:
        path = Path(config.model.path)
        whole = load_model_config(path, config.model.hf_overrides)
        assert whole.moe is not None
        layer_bytes = expert_layer_bytes(config.model.dtype, config.precision, whole)
        num_moe = min(-(-WEIGHT_BYTES // layer_bytes), len(whole.moe_layers))
        last = whole.moe_layers[num_moe - 1]
        model = replace(whole, layers=whole.layers[: last + 1])
        self._whole_over_part = whole.num_layers / model.num_layers
        self._num_rows = min(NUM_ROWS, config.attention.max_num_seqs)
        context = max(1, min(CONTEXT, config.model.max_model_len - NUM_STEPS - 1))
        blocks_each = -(-(context + NUM_STEPS + 2) // config.kv_cache.block_size)
        num_blocks = self._num_rows * blocks_each
        self._rig = Rig(model, config, path)
        batch = self._rig.batch(range(num_blocks))
        batch.begin(self._num_rows, context, growth=NUM_STEPS + 1)
        first = batch.decode()
        # One user and a batch, in turn.
        self._plans = [
            (rows, batch.decode(rows=rows))
            for step in range(2, NUM_STEPS + 1)
            for rows in (1 if step % 2 else self._num_rows,)
        ]
        # Compiled kernels are kept, so the two halves are compiled side by side, as by the nodes.
        compiled = fork(self._compile, int)
        self._runner = self._rig.runner(self._rig.decoder(num_blocks))
        self._runner.execute(first, AbsentExperts(), index=0)
        compiled()
        self._experts = self._load_experts()

    def measure(self, candidate: LayoutCandidate) -> float:
        """Return the seconds of a step of the whole model; call in a fork."""
        attention, expert = candidate.nodes
        if candidate.choice.transport == "local":
            settle(attention)
            self._runner.runtime.prepare_capture()
            return self._decode(local_net(self._rig, self._runner, self._experts))
        pair = ProcessPair(self._rig, candidate.config)

        def serve() -> None:
            settle(expert)
            # The attention node leaves when its time is over.
            graphs = graphs_of(candidate.config, self._experts)
            with closing(pair.accept(self._experts)) as net, suppress(TransportError):
                for _, plan in self._plans:
                    run_ticket(net, self._experts, plan.ticket, graphs=graphs)

        served = fork(serve, type(None))
        pair.close()
        settle(attention)
        step_s = self._decode(pair.connect(self._runner))
        served()
        return step_s

    def _compile(self) -> int:
        """Leave compiled kernels in the cache, those of recordings too."""
        node = self._rig.config.node
        open_runtime(node.device, node.kernels).prepare_capture()
        hops.prepare()
        return self._load_experts().num_layers

    def _load_experts(self) -> Experts:
        experts = self._rig.experts()
        experts.warm_up((1, self._num_rows))
        return experts

    def _decode(self, net: AttentionNet) -> float:
        """Return the seconds of a step, scaled to the layers of the whole model.

        One user and a batch count alike: the mean is geometric.
        """
        found: dict[int, list[float]] = {1: [], self._num_rows: []}
        began = time.perf_counter()
        for idx, (rows, plan) in enumerate(self._plans):
            is_over = time.perf_counter() > began + BUDGET_S
            if is_over and idx >= 2 * (NUM_WARM_UP + MIN_STEPS):
                break
            started = time.perf_counter()
            result = self._runner.execute(plan, net, index=0)
            layers_s = result.timings.attention_s + result.timings.wait_s
            step_s = time.perf_counter() - started
            found[rows].append(step_s + (self._whole_over_part - 1) * layers_s)
        net.close()
        # Other load on the machine only adds time, so the fastest steps count.
        return statistics.geometric_mean(
            statistics.quantiles(each[NUM_WARM_UP:], n=4)[0] for each in found.values()
        )


def settle(node: CandidateNode) -> None:
    """Give this fork the cores and threads of `node`."""
    if node.cores:
        os.sched_setaffinity(0, node.cores)
    torch.set_num_threads(node.num_threads)


def main() -> int:
    """Measure the candidates named on stdin; print each one's seconds per step."""
    follow_parent()
    start_logging("trial")
    torch.set_num_threads(1)
    candidates = msgspec.json.decode(sys.stdin.readline(), type=list[LayoutCandidate])
    with torch.inference_mode():
        trial = LayoutTrial(candidates[0].config)
        print("ready", flush=True)
        times = [fork(partial(trial.measure, candidate), float)() for candidate in candidates]
    print(msgspec.json.encode(times).decode(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
