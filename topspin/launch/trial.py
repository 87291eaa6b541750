"""Times decode steps of one layout: the process behind a candidate of topspin.launch.calibrate.

Owns a small engine of real parts and no scheduler: a Replica and Experts with the first layers
of the checkpoint, joined by the real net, and the plans of a batch that decodes for ever. The
expert node is a fork, so that both have threads (and cores) of their own. Reads the candidate
from stdin, says when it is ready, and measures when it is told to. Knows no other candidate.
Run as `python -m topspin.launch.trial`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from attention_nodes import kv_cache
from attention_nodes.decoder import Decoder
from attention_nodes.replica import Replica
from expert_nodes.experts import Experts
from expert_nodes.worker import run_ticket
from kernels.dispatch import Ops, select_ops
from m2n_comm.host.local import LocalHub
from m2n_comm.net import AttentionNet, wait_policy
from m2n_comm.open import ExpertListener, connect_attention, listen_expert
from models.checkpoint import Checkpoint
from models.config import ModelConfig, load_model_config
from models.weights import stream_attention_weights, stream_expert_weights
from topspin.cores import CORES_VARIABLE, take_cores
from topspin.expert_table import ExpertTable, uniform_table
from topspin.launch.calibrate import Candidate, expert_layer_bytes
from topspin.messages import (
    ExpertPeer,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepTicket,
    pack_ints,
)
from topspin.process import follow_parent

NUM_ROWS = 16
CONTEXT = 128
NUM_STEPS = 24
NUM_WARM_UP = 4
# Experts beyond the caches of processors, which a whole model's are too.
WEIGHT_BYTES = 96 * 2**20
TIMEOUT_S = 30.0


class Trial:
    """The first layers of the candidate's model, and its settings."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate
        self._config = candidate.config
        self._path = Path(candidate.config.model.path)
        whole = load_model_config(self._path)
        layer_bytes = expert_layer_bytes(self._config.model.dtype, whole)
        num_moe = min(-(-WEIGHT_BYTES // layer_bytes), len(whole.moe_layers))
        last = whole.moe_layers[num_moe - 1]
        self._model: ModelConfig = replace(whole, layers=whole.layers[: last + 1])
        self._whole_over_part = whole.num_layers / self._model.num_layers
        assert whole.moe is not None
        self._table: ExpertTable = uniform_table(
            num_layers=num_moe, num_experts=whole.moe.num_experts, num_nodes=1
        )

    def run(self) -> float:
        """Load, say so, wait for a line, measure; returns seconds per step of the whole model."""
        if self._candidate.choice.transport == "local":
            replica, experts = self._load_replica(), self._load_experts()
            hub = LocalHub(replica.net_shape(self._config), 1, 1)
            hub.attach_expert(0, experts.compute, table=self._table)
            return self._measure(replica, hub.attention_net(0, self._table), ready=lambda: None)
        with closing(listen_expert(self._candidate.choice.transport)) as listener:
            go_reader, go_writer = os.pipe()
            # Forked before any thread exists: OpenMP starts its own at the first parallel region.
            child = os.fork()
            if child == 0:
                os.close(go_writer)
                status = 1
                try:
                    self._serve(listener, go_reader)
                    status = 0
                finally:
                    os._exit(status)
        take_cores()
        replica = self._load_replica()
        net = connect_attention(
            replica.net_shape(self._config),
            index=0,
            incarnation=1,
            experts=[ExpertPeer(address=listener.address, incarnation=2)],
            table=self._table,
            timeout_s=TIMEOUT_S,
            wait=wait_policy(self._config),
        )
        step_s = self._measure(replica, net, ready=lambda: os.close(go_writer))
        os.waitpid(child, 0)
        return step_s

    def _serve(self, listener: ExpertListener, go_reader: int) -> None:
        """Be the expert node: the first ticket at once, the others after `go_reader` has ended."""
        if self._candidate.expert_cores:
            os.environ[CORES_VARIABLE] = ",".join(map(str, self._candidate.expert_cores))
            take_cores()
        experts = self._load_experts()
        net = listener.accept(
            experts.net_shape(self._config),
            index=0,
            incarnation=2,
            attention_incarnations=(1,),
            timeout_s=TIMEOUT_S,
            table=self._table,
            wait=wait_policy(self._config),
        )
        with closing(net):
            for ticket in _tickets():
                if ticket.step == 2:
                    os.read(go_reader, 1)  # a wait within a step may spin
                run_ticket(net, experts, ticket)

    def _ops(self) -> Ops:
        model = self._config.model
        return select_ops(self._config.compute.kernels, self._dtype, model.quantization)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._config.model.dtype)
        return dtype

    def _load_experts(self) -> Experts:
        held = self._table.experts_of(0)
        experts = Experts(
            self._model,
            stream_expert_weights(
                Checkpoint(self._path), self._model, dtype=self._dtype, experts=held
            ),
            self._ops(),
            held=held,
            per_pair_answers=self._config.compute.deterministic,
        )
        experts.warm_up((1, NUM_ROWS))
        return experts

    def _load_replica(self) -> Replica:
        num_blocks = NUM_ROWS * self._blocks_each
        cache = kv_cache.of_blocks(
            self._model, num_blocks, block_size=self._config.cache.block_size, dtype=self._dtype
        )
        weights = stream_attention_weights(Checkpoint(self._path), self._model, dtype=self._dtype)
        decoder = Decoder(self._model, weights, self._ops(), cache)
        return Replica(self._model, decoder, num_blocks, self._config)

    @property
    def _blocks_each(self) -> int:
        return -(-(CONTEXT + NUM_WARM_UP + NUM_STEPS + 1) // self._config.cache.block_size)

    def _measure(self, replica: Replica, net: AttentionNet, *, ready: Callable[[], None]) -> float:
        """Decode; the layers count as often as the whole model has them."""
        found = []
        for ticket in _tickets():
            started = time.perf_counter()
            result = replica.execute(self._plan(ticket), net, index=0)
            layers_s = result.timings.attention_s + result.timings.wait_s
            step_s = time.perf_counter() - started
            found.append(step_s + (self._whole_over_part - 1) * layers_s)
            if ticket.step == 1:
                print("ready", flush=True)
                sys.stdin.readline()
                ready()
        net.close()
        # Of a machine that does other things too, the undisturbed steps count.
        return statistics.quantiles(found[NUM_WARM_UP:], n=4)[0]

    def _plan(self, ticket: StepTicket) -> StepPlan:
        """Advance every sequence by a token; the first step admits them with a context."""
        ids = range(NUM_ROWS)
        new = [
            NewSequence(
                seq_id=seq_id,
                tokens=pack_ints([seq_id] * (CONTEXT + 1)),
                num_prompt_tokens=CONTEXT + 1,
                num_computed=CONTEXT,
                blocks=pack_ints(
                    range(seq_id * self._blocks_each, (seq_id + 1) * self._blocks_each)
                ),
                sampling=SamplingParams(max_tokens=NUM_STEPS + NUM_WARM_UP, seed=seq_id),
            )
            for seq_id in ids
        ]
        return StepPlan(
            ticket=ticket,
            finished=b"",
            new=tuple(new) if ticket.step == 1 else (),
            micro_batches=(
                MicroBatch(
                    seq_ids=pack_ints(ids),
                    num_tokens=pack_ints([1] * NUM_ROWS),
                    sample=b"\x01" * NUM_ROWS,
                    block_counts=pack_ints([0] * NUM_ROWS),
                    block_ids=b"",
                ),
            ),
        )


def _tickets() -> Iterator[StepTicket]:
    for step in range(1, NUM_WARM_UP + NUM_STEPS + 1):
        yield StepTicket(
            step=step,
            previous=step - 1,
            generation=1,
            table_version=1,
            num_micro_batches=1,
            participants=(0,),
            row_buckets=(NUM_ROWS,),
        )


def main() -> int:
    """Measure the candidate that stdin names; print the seconds of a step."""
    follow_parent()
    candidate = msgspec.json.decode(sys.stdin.readline(), type=Candidate)
    with torch.inference_mode():
        print(Trial(candidate).run(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
