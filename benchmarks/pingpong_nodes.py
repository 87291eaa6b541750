"""The two nodes of `topspin bench pingpong`: real kernels, random weights, one thread each.

Owns the model's shape, the fork that is the expert node, and the start of a step on both
(deploy.rig). Knows no grid and no statistics (benchmarks.transport.pingpong).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from deploy.rig.forks import fork
from deploy.rig.nets import ProcessPair
from deploy.rig.nodes import Rig, model_of
from expert_nodes.worker import run_ticket
from m2n_comm.emulate import LinkEmulation
from m2n_comm.net import AttentionNet
from models.description.config import ModelConfig
from models.description.facts import facts_of
from topspin.messages import NodeTrace, StepTicket, StepTimings, Trace
from topspin.plan.from_flags import resolve
from topspin.plan.settings import TraceSection
from topspin.plan.spec import NodeConfig
from topspin.plan.speculation import OFF
from topspin.trace import Ring

MAX_M = 4
BLOCK_SIZE = 16
WARM_UP_STEPS = 3
# Tokens by which a sequence may grow while it is measured.
GROWTH = 128


class Shape(NamedTuple):
    """The model and the load, chosen for similar times of both sides."""

    num_layers: int = 8
    hidden_size: int = 1024
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 64
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 384
    rows: int = 64
    context: int = 128

    @property
    def num_blocks(self) -> int:
        """Return the blocks of the largest batch."""
        return self.rows * MAX_M * -(-(self.context + GROWTH) // BLOCK_SIZE)


def make_model(shape: Shape) -> ModelConfig:
    """Return a Mixtral-like model of that shape with a small vocabulary."""
    return model_of(
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": True,
            "vocab_size": 1024,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "num_hidden_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "num_local_experts": shape.num_experts,
            "num_experts_per_tok": shape.top_k,
            "intermediate_size": shape.expert_size,
        }
    )


def node_config(model: ModelConfig, num_rows: int) -> NodeConfig:
    """Return the settings that both nodes use."""
    return resolve(
        facts_of(model),
        path="unused",
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows,
        block_size=BLOCK_SIZE,
        transport="shm",
        wait="spin",
        window_rows=num_rows,
        layout="shared",
        speculation=OFF,
        trace=TraceSection(enabled=False),
    ).for_node()


class Order(NamedTuple):
    """The expert node's next task."""

    ticket: StepTicket
    traced: bool


class Node:
    """The attention node in this process, and a fork that serves its tickets for each link.

    Construct it in a process that has started no threads.
    """

    def __init__(self, shape: Shape, *, expert_core: int) -> None:
        self.shape, self._expert_core = shape, expert_core
        model = make_model(shape)
        self._rig = Rig(model, node_config(model, shape.rows * MAX_M))
        self.runner = self._rig.runner(self._rig.decoder(shape.num_blocks))
        self._experts = self._rig.experts()
        self._experts.warm_up()
        self._batch = self._rig.batch(range(shape.num_blocks))
        self._ring = Ring()
        self._pipe: Connection | None = None
        self._net: AttentionNet | None = None
        self._served: Callable[[], bytes] = bytes

    def open(self, latency_us: float) -> None:
        """Connect over a link of that latency."""
        pair = ProcessPair(self._rig)
        self._pipe, theirs = multiprocessing.Pipe()
        self._served = fork(lambda: self._serve(pair, theirs), bytes)
        self._net = pair.connect(self.runner, link=LinkEmulation(latency_us=latency_us))
        pair.close()

    @torch.inference_mode()
    def _serve(self, pair: ProcessPair, orders: Connection) -> bytes:
        """Be the expert node until an order is None; return its flight recorder."""
        os.sched_setaffinity(0, {self._expert_core})
        ring = Ring()
        with closing(pair.accept(self._experts)) as net:
            while (order := orders.recv()) is not None:
                self._experts.trace = ring if order.traced else None
                run_ticket(net, self._experts, order.ticket)
        return ring.dump()

    def close(self) -> Trace:
        """Disconnect; returns the trace of both nodes, this one's since the start."""
        assert self._net is not None
        assert self._pipe is not None
        self._pipe.send(None)
        self._net.close()
        records = {"attention": self._ring.dump(), "expert": self._served()}
        return Trace(
            query_id=0,
            nodes=tuple(
                NodeTrace(role=role, index=0, offset_ns=0, error_ns=0, records=data)
                for role, data in records.items()
            ),
        )

    def begin(self, num_rows: int) -> None:
        """Drop all sequences; the next step adds `num_rows` new ones."""
        self._batch.begin(num_rows, self.shape.context - 1, growth=GROWTH)

    def step(self, m: int, *, traced: bool = False) -> StepTimings:
        """Advance every sequence by a token in `m` equal micro-batches."""
        assert self._net is not None
        assert self._pipe is not None
        plan = self._batch.decode(m)
        self.runner.trace = self._ring if traced else None
        self._pipe.send(Order(plan.ticket, traced))
        return self.runner.execute(plan, self._net, index=0).timings

    def measure(self, m: int, num_rows: int, num_steps: int) -> list[StepTimings]:
        """Return the timings of `num_steps` steps after a few to warm up."""
        self.begin(num_rows)
        return [self.step(m) for _ in range(WARM_UP_STEPS + num_steps)][WARM_UP_STEPS:]
