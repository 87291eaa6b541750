"""Times decode steps of layouts: the process behind app.launch.calibrate.

Owns a small engine of real parts and no scheduler: a ModelRunner and Experts with the first layers
of the checkpoint, loaded once, and the plans of a batch that decodes for ever. Each candidate is
measured in forks, connected by the real net: one for the attention node and, unless all is one
process, one for the expert node, each with its own threads and cores. Reads the candidates from
stdin, reports when it has loaded, and then prints each one's seconds per step. Run as
`python -m app.launch.trial`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from app.launch.calibrate import Candidate, CandidateNode, expert_layer_bytes
from attention_nodes.step import kv_cache
from attention_nodes.step.absent_experts import AbsentExperts
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.model_runner import ModelRunner
from expert_nodes.experts import Experts
from expert_nodes.worker import graphs_of, run_ticket
from kernels.dispatch import Ops, select_ops
from kernels.runtime import open_runtime
from m2n_comm.gpu.local import DeviceNet, takes_rows_of_host
from m2n_comm.host.frames import hops
from m2n_comm.host.local import LocalHub
from m2n_comm.net import AttentionNet, ExpertNet, wait_policy
from m2n_comm.open import ExpertListener, connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weights import stream_attention_weights, stream_expert_weights
from models.description.config import ModelConfig, load_model_config
from topspin.devices import NodeRole
from topspin.errors import TransportError
from topspin.expert_table import ExpertTable, uniform_table
from topspin.logs import start_logging
from topspin.messages import (
    SAMPLE,
    ExpertPeer,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepTicket,
    pack_ints,
)
from topspin.plan.precision import formats
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
TIMEOUT_S = 30.0


class Trial:
    """The first layers of a model, loaded and warmed up. Starts no thread itself.

    OpenMP starts its threads at the first parallel region with several; a fork would lack them.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._path = Path(config.model.path)
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        whole = load_model_config(self._path, config.model.hf_overrides)
        assert whole.moe is not None
        layer_bytes = expert_layer_bytes(config.model.dtype, whole)
        num_moe = min(-(-WEIGHT_BYTES // layer_bytes), len(whole.moe_layers))
        last = whole.moe_layers[num_moe - 1]
        self._model: ModelConfig = replace(whole, layers=whole.layers[: last + 1])
        self._whole_over_part = whole.num_layers / self._model.num_layers
        self._table: ExpertTable = uniform_table(
            num_layers=num_moe, num_experts=whole.moe.num_experts, num_nodes=1
        )
        self._num_rows = min(NUM_ROWS, config.attention.max_num_seqs)
        self._context = max(1, min(CONTEXT, config.model.max_model_len - NUM_STEPS - 1))
        self._blocks_each = -(-(self._context + NUM_STEPS + 1) // config.kv_cache.block_size)
        # Compiled kernels are kept, so the two halves are compiled side by side, as by the nodes.
        compiled = fork(self._compile)
        self._runner = self._load_runner()
        self._runner.execute(self._plan(self._ticket(1)), AbsentExperts(), index=0)
        compiled()
        self._experts = self._load_experts()

    def measure(self, candidate: Candidate) -> float:
        """Return the seconds of a step of the whole model; call in a fork."""
        attention, expert = candidate.nodes
        if candidate.choice.transport == "local":
            settle(attention)
            shape = self._runner.net_shape(self._config)
            if takes_rows_of_host(candidate.config, shape):
                serves = [self._experts.compute]
                runtime = self._runner.runtime
                runtime.prepare_capture()
                return self._decode(
                    DeviceNet(runtime, shape, index=0, serves=serves, table=self._table)
                )
            hub = LocalHub(shape, 1, 1)
            hub.attach_expert(0, self._experts.compute, table=self._table)
            return self._decode(hub.attention_net(0, self._table))
        listener = listen_expert(candidate.choice.transport)

        def serve() -> int:
            settle(expert)
            # The attention node leaves when its time is over.
            graphs = graphs_of(candidate.config, self._experts)
            with closing(self._accept(listener, candidate)) as net, suppress(TransportError):
                for step in range(2, NUM_STEPS + 1):
                    run_ticket(net, self._experts, self._ticket(step), graphs=graphs)
            return 0

        served = fork(serve)
        listener.close()
        settle(attention)
        net = connect_attention(
            Identity(
                role="attention",
                index=0,
                incarnation=1,
                shape=self._runner.net_shape(self._config),
            ),
            [ExpertPeer(address=listener.address, incarnation=2)],
            self._table,
            Waits(timeout_s=TIMEOUT_S, policy=wait_policy(candidate.config)),
        )
        step_s = self._decode(net)
        served()
        return step_s

    def _compile(self) -> float:
        """Leave compiled kernels in the cache, those of recordings too."""
        open_runtime("cpu", self._config.node.kernels).prepare_capture()
        hops.prepare()
        return self._load_experts().num_layers

    def _accept(self, listener: ExpertListener, candidate: Candidate) -> ExpertNet:
        return listener.accept(
            Identity(
                role="expert",
                index=0,
                incarnation=2,
                shape=self._experts.net_shape(self._config),
            ),
            [1],
            self._table,
            Waits(timeout_s=TIMEOUT_S, policy=wait_policy(candidate.config)),
        )

    def _ops(self, role: NodeRole) -> Ops:
        asked = formats(self._config.precision, role)
        return select_ops(self._config.node.kernels, self._dtype, asked)

    def _load_experts(self) -> Experts:
        held = self._table.experts_of(0)
        experts = Experts(
            self._model,
            stream_expert_weights(
                Checkpoint(self._path),
                self._model,
                dtype=self._dtype,
                experts=held,
                precision=self._config.precision,
            ),
            self._ops("expert"),
            held=held,
            per_expert_answers=self._config.execution.deterministic,
            runtime=open_runtime("cpu", self._config.node.kernels),
            precision=self._config.precision,
        )
        experts.warm_up((1, self._num_rows))
        return experts

    def _load_runner(self) -> ModelRunner:
        num_blocks = self._num_rows * self._blocks_each
        kept = self._config.kv_cache
        cache = kv_cache.of_blocks(
            kv_cache.layer_specs(self._model, self._dtype, kept),
            num_blocks,
            block_size=kept.block_size,
        )
        weights = stream_attention_weights(
            Checkpoint(self._path),
            self._model,
            dtype=self._dtype,
            precision=self._config.precision,
        )
        decoder = Decoder(
            self._model,
            weights,
            self._ops("attention"),
            cache,
            precision=self._config.precision,
        )
        runtime = open_runtime("cpu", self._config.node.kernels)
        return ModelRunner(self._model, decoder, num_blocks, self._config, runtime)

    def _decode(self, net: AttentionNet) -> float:
        """Return the seconds of a step, scaled to the layers of the whole model.

        One user and a batch count alike: the mean is geometric.
        """
        found: dict[int, list[float]] = {1: [], self._num_rows: []}
        began = time.perf_counter()
        for step in range(2, NUM_STEPS + 1):
            is_over = time.perf_counter() > began + BUDGET_S
            if is_over and step > 2 * (NUM_WARM_UP + MIN_STEPS) + 1:
                break
            started = time.perf_counter()
            result = self._runner.execute(self._plan(self._ticket(step)), net, index=0)
            layers_s = result.timings.attention_s + result.timings.wait_s
            step_s = time.perf_counter() - started
            whole_s = step_s + (self._whole_over_part - 1) * layers_s
            found[self._rows_of(step)].append(whole_s)
        net.close()
        # Other load on the machine only adds time, so the fastest steps count.
        return statistics.geometric_mean(
            statistics.quantiles(each[NUM_WARM_UP:], n=4)[0] for each in found.values()
        )

    def _rows_of(self, step: int) -> int:
        """Return how many sequences advance: all and one in turn."""
        return 1 if step % 2 else self._num_rows

    def _ticket(self, step: int) -> StepTicket:
        return StepTicket(
            step=step,
            previous=step - 1,
            generation=1,
            table_version=1,
            num_micro_batches=1,
            participants=(0,),
            row_buckets=(self._rows_of(step) if step > 1 else self._num_rows,),
        )

    def _plan(self, ticket: StepTicket) -> StepPlan:
        """Advance sequences by a token; the first step admits all, with a context."""
        everyone = range(self._num_rows)
        ids = range(ticket.row_buckets[0])
        new = [
            NewSequence(
                seq_id=seq_id,
                tokens=pack_ints([seq_id] * (self._context + 1)),
                num_prompt_tokens=self._context + 1,
                num_computed=self._context,
                blocks=pack_ints(
                    range(seq_id * self._blocks_each, (seq_id + 1) * self._blocks_each)
                ),
                max_length=self._context + NUM_STEPS + 2,
                sampling=SamplingParams(max_tokens=NUM_STEPS + 1, seed=seq_id),
            )
            for seq_id in everyone
        ]
        return StepPlan(
            ticket=ticket,
            finished=b"",
            new=tuple(new) if ticket.step == 1 else (),
            micro_batches=(
                MicroBatch(
                    seq_ids=pack_ints(ids),
                    num_tokens=pack_ints([1] * len(ids)),
                    wanted=bytes([SAMPLE] * len(ids)),
                    block_counts=pack_ints([0] * len(ids)),
                    block_ids=b"",
                ),
            ),
        )


def settle(node: CandidateNode) -> None:
    """Give this fork the cores and threads of `node`."""
    if node.cores:
        os.sched_setaffinity(0, node.cores)
    torch.set_num_threads(node.num_threads)


def fork(work: Callable[[], float]) -> Callable[[], float]:
    """Start `work` in a child process; return a function that waits for its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, repr(work()).encode())
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)

    def wait() -> float:
        with os.fdopen(reader) as file:
            text = file.read()
        os.waitpid(child, 0)
        if not text:
            raise SystemExit(1)  # the child has said why
        return float(text)

    return wait


def main() -> int:
    """Measure the candidates named on stdin; print each one's seconds per step."""
    follow_parent()
    start_logging("trial")
    torch.set_num_threads(1)
    candidates = msgspec.json.decode(sys.stdin.readline(), type=list[Candidate])
    with torch.inference_mode():
        trial = Trial(candidates[0].config)
        print("ready", flush=True)
        times = [fork(partial(trial.measure, candidate))() for candidate in candidates]
    print(msgspec.json.encode(times).decode(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
