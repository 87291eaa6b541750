"""The two nodes of `topspin bench pingpong`: real kernels, random weights, one thread each.

Owns the model's shape, the expert process and the attention node, and the start of a step on both.
Knows no grid and no statistics (benchmarks.transport.pingpong).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from attention_nodes.step import kv_cache
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.model_runner import ModelRunner
from expert_nodes.experts import Experts
from expert_nodes.worker import run_ticket
from kernels.dispatch import select_ops
from m2n_comm.emulate import LinkEmulation
from m2n_comm.net import AttentionNet
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from models.checkpoints.weights import (
    AttentionWeights,
    ExpertLayerWeights,
    LayerWeights,
)
from models.description.config import LayerConfig, ModelConfig, MoeConfig, RopeConfig
from topspin.expert_table import uniform_table
from topspin.messages import (
    SAMPLE,
    ExpertPeer,
    MicroBatch,
    NewSequence,
    NodeTrace,
    SamplingParams,
    StepPlan,
    StepTicket,
    StepTimings,
    Trace,
    pack_ints,
)
from topspin.plan.from_flags import resolve
from topspin.plan.model_facts import ModelFacts
from topspin.plan.settings import TraceSection
from topspin.plan.spec import NodeConfig
from topspin.trace import Ring

MAX_M = 4
BLOCK_SIZE = 16
WARM_UP_STEPS = 3
DTYPE = torch.bfloat16


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


def model_config(shape: Shape) -> ModelConfig:
    """Return a Mixtral-like model of that shape with a small vocabulary."""
    return ModelConfig(
        family="mixtral",
        vocab_size=1024,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        dtype="bfloat16",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm="none",
        clip_qkv=None,
        rope=RopeConfig(
            rope_type="default",
            theta=10000.0,
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
        ),
        layers=(LayerConfig(is_moe=True),) * shape.num_layers,
        intermediate_size=shape.expert_size,
        moe=MoeConfig(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            intermediate_size=shape.expert_size,
            norm_topk_prob=True,
        ),
        eos_token_ids=(),
        bos_token_id=None,
    )


def node_config(shape: Shape) -> NodeConfig:
    """Return the settings that both nodes use."""
    num_rows = shape.rows * MAX_M
    facts = ModelFacts("bfloat16", 4096, shape.num_layers, (0,), shape.num_experts)
    return resolve(
        facts,
        path="unused",
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows,
        block_size=BLOCK_SIZE,
        transport="shm",
        wait="spin",
        window_rows=num_rows,
        layout="shared",
        trace=TraceSection(enabled=False),
    ).for_node()


def random_weight(*size: int) -> torch.Tensor:
    """Return a weight that keeps activations near unit size."""
    scale: float = size[-1] ** -0.5
    return (torch.randn(*size) * scale).to(DTYPE)


def make_runner(shape: Shape) -> ModelRunner:
    """Return an attention node with random weights."""
    model = model_config(shape)
    ones = torch.ones(shape.hidden_size, dtype=DTYPE)
    layers = [
        LayerWeights(
            input_norm=ones,
            qkv=random_weight(model.q_size + 2 * model.kv_size, shape.hidden_size),
            qkv_bias=None,
            o=random_weight(shape.hidden_size, model.q_size),
            o_bias=None,
            q_norm=None,
            k_norm=None,
            post_norm=ones,
            router=random_weight(shape.num_experts, shape.hidden_size),
            shared=None,
            dense=None,
        )
        for _ in range(shape.num_layers)
    ]
    embed = random_weight(model.vocab_size, shape.hidden_size)
    weights = AttentionWeights(embed=embed, lm_head=embed, final_norm=ones, layers=layers)
    num_blocks = shape.rows * MAX_M * blocks_of(shape)
    cache = kv_cache.allocate(
        kv_cache.layer_specs(model, DTYPE),
        block_size=BLOCK_SIZE,
        size_bytes=num_blocks * 2 * shape.num_layers * BLOCK_SIZE * model.kv_size * 2,
        max_len=4096,
    )
    decoder = Decoder(model, weights, select_ops("cpu", DTYPE), cache)
    return ModelRunner(model, decoder, cache.num_blocks, node_config(shape))


def make_experts(shape: Shape) -> Experts:
    """Return an expert node that holds all experts, with random weights."""
    layers: Iterator[ExpertLayerWeights] = (
        ExpertLayerWeights(
            gate_up=random_weight(shape.num_experts, 2 * shape.expert_size, shape.hidden_size),
            down=random_weight(shape.num_experts, shape.hidden_size, shape.expert_size),
        )
        for _ in range(shape.num_layers)
    )
    experts = Experts(
        model_config(shape),
        layers,
        select_ops("cpu", DTYPE),
        held=[list(range(shape.num_experts))] * shape.num_layers,
    )
    experts.warm_up()
    return experts


def blocks_of(shape: Shape) -> int:
    """Return the blocks of a sequence, with room to grow during a measurement."""
    return -(-shape.context // BLOCK_SIZE) + 8


@torch.inference_mode()
def serve(pipe: Connection, shape: Shape, core: int) -> None:
    """Run the expert process: one net per link, until it receives None."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    experts = make_experts(shape)
    net_shape = experts.net_shape(node_config(shape))
    table = uniform_table(num_layers=shape.num_layers, num_experts=shape.num_experts, num_nodes=1)
    while pipe.recv():
        listener = listen_expert("shm")
        pipe.send(listener.address)
        net = listener.accept(
            Identity(role="expert", index=0, incarnation=2, shape=net_shape),
            (1,),
            table,
            Waits(timeout_s=60.0, policy="spin"),
        )
        ring = Ring()
        while (order := pipe.recv()) is not None:
            experts.trace = ring if order.traced else None
            run_ticket(net, experts, order.ticket)
        net.close()
        pipe.send(ring.dump())


class Order(NamedTuple):
    """The expert process's next task."""

    ticket: StepTicket
    traced: bool


class Node:
    """The attention node in this process, and the pipe for the expert's tickets."""

    def __init__(self, shape: Shape, pipe: Connection) -> None:
        torch.manual_seed(2)
        self.shape = shape
        self.runner = make_runner(shape)
        self._ring = Ring()
        self._pipe = pipe
        self._net: AttentionNet | None = None
        self._generation = 0
        self._step = 0

    def open(self, latency_us: float) -> None:
        """Connect over a link of that latency."""
        self._pipe.send(True)
        shape = self.shape
        self._net = connect_attention(
            Identity(
                role="attention",
                index=0,
                incarnation=1,
                shape=self.runner.net_shape(node_config(shape)),
            ),
            [ExpertPeer(address=self._pipe.recv(), incarnation=2)],
            uniform_table(num_layers=shape.num_layers, num_experts=shape.num_experts, num_nodes=1),
            Waits(timeout_s=60.0, policy="spin"),
            link=LinkEmulation(latency_us=latency_us),
        )

    def close(self) -> Trace:
        """Disconnect; returns the trace of both nodes, this one's since the start."""
        self._pipe.send(None)
        assert self._net is not None
        self._net.close()
        records = {"attention": self._ring.dump(), "expert": self._pipe.recv()}
        return Trace(
            query_id=0,
            nodes=tuple(
                NodeTrace(role=role, index=0, offset_ns=0, error_ns=0, records=data)
                for role, data in records.items()
            ),
        )

    def begin(self, num_rows: int) -> None:
        """Drop all sequences; the next step adds `num_rows` new ones."""
        self._generation += 1
        context, blocks = self.shape.context, blocks_of(self.shape)
        self._new = tuple(
            NewSequence(
                seq_id=row,
                tokens=pack_ints([(row * 7 + idx) % 1000 for idx in range(context)]),
                num_prompt_tokens=context,
                num_computed=context - 1,
                blocks=pack_ints(range(row * blocks, (row + 1) * blocks)),
                max_length=context + 1000,
                sampling=SamplingParams(max_tokens=1000, seed=row, temperature=0.0),
            )
            for row in range(num_rows)
        )
        self._num_rows = num_rows

    def step(self, m: int, *, traced: bool = False) -> StepTimings:
        """Advance every sequence by a token in `m` equal micro-batches."""
        assert self._net is not None
        self._step += 1
        rows = [list(range(self._num_rows))[mb::m] for mb in range(m)]
        ticket = StepTicket(
            step=self._step,
            previous=self._step - 1,
            generation=self._generation,
            table_version=1,
            num_micro_batches=m,
            participants=(0,),
            row_buckets=tuple(len(each) for each in rows),
        )
        self.runner.trace = self._ring if traced else None
        self._pipe.send(Order(ticket, traced))
        plan = StepPlan(
            ticket=ticket,
            finished=b"",
            new=self._new,
            micro_batches=tuple(_slices(each) for each in rows),
        )
        self._new = ()
        return self.runner.execute(plan, self._net, index=0).timings

    def measure(self, m: int, num_rows: int, num_steps: int) -> list[StepTimings]:
        """Return the timings of `num_steps` steps after a few to warm up."""
        self.begin(num_rows)
        return [self.step(m) for _ in range(WARM_UP_STEPS + num_steps)][WARM_UP_STEPS:]


def _slices(rows: list[int]) -> MicroBatch:
    return MicroBatch(
        seq_ids=pack_ints(rows),
        num_tokens=pack_ints([1] * len(rows)),
        wanted=bytes([SAMPLE] * len(rows)),
        block_counts=pack_ints([0] * len(rows)),
        block_ids=b"",
    )
