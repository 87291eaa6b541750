"""The two sides of an engine with random weights: a few layers in a model's shapes.

Owns the slice of the model that is measured and its weights; all code that computes is the nodes'
own. Knows no grid and no clock. Called by solo.py and rally.py.

A slice has so many layers that a step reads more than processor caches hold, as a whole model does:
else weights would be found in caches that they never are in when it serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention_nodes.step import kv_cache
from attention_nodes.step.absent_experts import AbsentExperts
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.model_runner import ModelRunner
from deploy.placement.shapes import ModelShape
from expert_nodes.experts import Experts
from kernels.dispatch import Ops, select_ops
from kernels.runtime import open_runtime
from models.checkpoints.weights import (
    AttentionWeights,
    DenseMlpWeights,
    ExpertLayerWeights,
    ExpertStream,
    LayerWeights,
)
from models.description.config import LayerConfig, ModelConfig
from topspin.cores import Layout
from topspin.devices import NodeRole
from topspin.expert_table import ExpertTable, uniform_table
from topspin.plan.from_flags import resolve
from topspin.plan.model_facts import ModelFacts
from topspin.plan.precision import Format, Rules, formats, rules_of
from topspin.plan.settings import Dtype, TraceSection, Transport
from topspin.plan.spec import NodeConfig

BLOCK_SIZE: Final = 16
# Weights that one pass over a slice reads at least, of either side.
ATTENTION_BYTES: Final = 64 * 2**20
EXPERT_BYTES: Final = 96 * 2**20
CPU_DEVICE: Final = "cpu"


class Measured(NamedTuple):
    """What is measured: a model on a device, in one format.

    `max_rows` and `max_tokens` limit a step, `num_keys` the cache. `transport` and `layout` matter
    to a rally only.
    """

    model: ModelConfig
    dtype: Dtype
    weight_format: Format
    device: str = CPU_DEVICE
    kernels: str = "cpu"
    max_rows: int = 256
    max_tokens: int = 512
    num_keys: int = 16384
    transport: Transport = "shm"
    layout: Layout = "shared"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of what is not quantised."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def slice_of(model: ModelConfig, shape: ModelShape) -> ModelConfig:
    """Return the model with MoE layers only (if it has any), as many as must be measured."""
    layer = model.moe_layers[0] if model.moe_layers else 0
    attention = shape.weight_bytes("attention", layer, "none")
    wanted = -(-ATTENTION_BYTES // attention)
    if model.moe is not None:
        experts = model.moe.num_experts * shape.weight_bytes("experts", layer, "none")
        # Experts weigh more: few layers of them exceed every cache, and many the memory.
        wanted = min(wanted, max(2, -(-4 * EXPERT_BYTES // experts)))
        wanted = max(wanted, -(-EXPERT_BYTES // experts))
    count = max(1, min(wanted, model.num_layers))
    return replace(model, layers=(LayerConfig(is_moe=model.layers[layer].is_moe),) * count)


def config_of(measured: Measured, *, num_threads: int | None = None) -> NodeConfig:
    """Return the settings of the attention node."""
    model = measured.model
    is_device = measured.device != CPU_DEVICE
    longest = measured.num_keys + measured.max_tokens + 64
    moe = model.moe
    facts = ModelFacts(
        measured.dtype,
        longest,
        model.num_layers,
        model.moe_layers,
        moe.num_experts if moe else 0,
    )
    return resolve(
        facts,
        cores=(0, 1),
        path="unused",
        dtype=measured.dtype,
        quantization=measured.weight_format,
        max_num_seqs=measured.max_rows,
        max_num_batched_tokens=max(measured.max_tokens, measured.max_rows),
        block_size=BLOCK_SIZE,
        transport="local" if is_device else measured.transport,
        kernels=measured.kernels,
        attention_device=measured.device,
        expert_device=measured.device,
        layout=measured.layout,
        num_threads=num_threads,
        trace=TraceSection(enabled=False),
    ).for_node()


class Weights:
    """Random weights of one layer, of which all layers get copies."""

    def __init__(self, measured: Measured, device: torch.device) -> None:
        self._dtype, self._device = measured.torch_dtype, device
        self._model = measured.model
        self._random = torch.Generator().manual_seed(1)

    def matrix(self, *size: int) -> Tensor:
        """Return a weight that keeps activations near unit size."""
        scale: float = size[-1] ** -0.5
        found = torch.randn(*size, generator=self._random) * scale
        return found.to(self._dtype).to(self._device)

    def attention(self) -> AttentionWeights:
        """Return those of an attention node."""
        model = self._model
        hidden = model.hidden_size
        ones = torch.ones(hidden, dtype=self._dtype, device=self._device)
        norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if model.qk_norm != "none":
            sizes = (
                (model.head_dim, model.head_dim)
                if model.qk_norm == "head"
                else (model.q_size, model.kv_size)
            )
            norms = (self._ones(sizes[0]), self._ones(sizes[1]))
        is_moe = model.layers[0].is_moe
        layer = LayerWeights(
            input_norm=ones,
            qkv=self.matrix(model.q_size + 2 * model.kv_size, hidden),
            qkv_bias=self._ones(model.q_size + 2 * model.kv_size) if model.qkv_bias else None,
            o=self.matrix(hidden, model.q_size),
            o_bias=self._ones(hidden) if model.o_bias else None,
            q_norm=norms[0],
            k_norm=norms[1],
            post_norm=ones,
            router=self.matrix(model.moe.num_experts, hidden) if is_moe and model.moe else None,
            shared=None,
            dense=None if is_moe else self.mlp(model.intermediate_size),
        )
        embed = self.matrix(model.vocab_size, hidden)
        return AttentionWeights(
            embed=embed,
            lm_head=embed if model.tie_word_embeddings else self.matrix(model.vocab_size, hidden),
            final_norm=ones,
            layers=(_copy(layer) for _ in range(model.num_layers)),
        )

    def mlp(self, width: int) -> DenseMlpWeights:
        """Return those of an MLP that every row takes."""
        hidden = self._model.hidden_size
        return DenseMlpWeights(
            gate_up=self.matrix(2 * width, hidden),
            down=self.matrix(hidden, width),
            gate_up_bias=None,
            down_bias=None,
        )

    def experts(self) -> Iterator[ExpertStream]:
        """Yield each layer's routed experts."""
        moe = self._model.moe
        assert moe is not None
        one = ExpertLayerWeights(
            gate_up=self.matrix(
                moe.num_experts, 2 * moe.intermediate_size, self._model.hidden_size
            ),
            down=self.matrix(moe.num_experts, self._model.hidden_size, moe.intermediate_size),
        )
        for _ in self._model.moe_layers:
            yield ExpertStream(
                gate_up=(each.clone() for each in one.gate_up),
                down=(each.clone() for each in one.down),
            )

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)


def _copy(layer: LayerWeights) -> LayerWeights:
    """Return a layer with matrices of its own: a format without packing keeps them as they are."""
    dense = layer.dense
    return replace(
        layer,
        qkv=_own(layer.qkv),
        o=_own(layer.o),
        router=None if layer.router is None else layer.router.clone(),
        dense=(
            None
            if dense is None
            else replace(dense, gate_up=_own(dense.gate_up), down=_own(dense.down))
        ),
    )


def _own(matrix: object) -> Tensor:
    assert isinstance(matrix, Tensor), "random weights are not coded"
    return matrix.clone()


def make_ops(measured: Measured, role: NodeRole) -> Ops:
    """Return the ops of the format."""
    asked = formats(rules_of(measured.weight_format), role)
    return select_ops(measured.kernels, measured.torch_dtype, asked, measured.device)


def make_decoder(
    measured: Measured, precision: Rules, cache: kv_cache.KvCache | None = None
) -> Decoder:
    """Return the attention half of every layer; `cache` None: of one block."""
    runtime = open_runtime(measured.device, measured.kernels)
    if cache is None:
        specs = kv_cache.layer_specs(measured.model, measured.torch_dtype)
        cache = kv_cache.of_blocks(specs, 1, block_size=BLOCK_SIZE, runtime=runtime)
    return Decoder(
        measured.model,
        Weights(measured, runtime.device).attention(),
        make_ops(measured, "attention"),
        cache,
        precision=precision,
    )


def make_runner(measured: Measured, config: NodeConfig) -> tuple[ModelRunner, Decoder]:
    """Return an attention node, and its layers."""
    runtime = open_runtime(measured.device, measured.kernels)
    cache = kv_cache.of_blocks(
        kv_cache.layer_specs(measured.model, measured.torch_dtype),
        -(-(measured.num_keys + measured.max_tokens) // BLOCK_SIZE) + 4 * measured.max_rows,
        block_size=BLOCK_SIZE,
        runtime=runtime,
    )
    # Pages that were never written are one page, which stays in the caches.
    for keys in (*cache.keys, *cache.values):
        keys.fill_(0.01)
    decoder = make_decoder(measured, config.precision, cache)
    runner = ModelRunner(measured.model, decoder, cache.num_blocks, config, runtime)
    return runner, decoder


def make_experts(measured: Measured, config: NodeConfig) -> Experts:
    """Return an expert node that holds all experts."""
    runtime = open_runtime(measured.device, measured.kernels)
    return Experts(
        measured.model,
        Weights(measured, runtime.device).experts(),
        make_ops(measured, "expert"),
        held=table_of(measured.model).experts_of(0),
        runtime=runtime,
        precision=config.precision,
    )


def table_of(model: ModelConfig) -> ExpertTable:
    """Return the table of one expert node."""
    assert model.moe is not None
    return uniform_table(
        num_layers=len(model.moe_layers), num_experts=model.moe.num_experts, num_nodes=1
    )


class NoExperts(AbsentExperts):
    """The net of a node that is measured alone: answers are whatever the buffer holds.

    Nothing is done for them, so that a recorded step has attention's work only.
    """

    is_graph_safe = True

    def combine(self, micro_batch: int, layer: int, out: Tensor) -> Tensor:
        return out
