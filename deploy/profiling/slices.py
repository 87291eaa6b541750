"""A few layers in a model's shapes with random weights: the model that is measured.

Owns the slice of the model and the settings of its nodes (deploy.rig). Knows no grid and no clock.
Called by solo.py, rally.py and resident.py.

A slice has so many layers that a step reads more than processor caches hold, as a whole model does:
else weights would be found in caches that they never are in when it serves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from deploy.placement.shapes import ModelShape
from deploy.rig.nodes import Rig
from models.description.config import ModelConfig
from models.description.facts import facts_of
from models.description.parts import LayerConfig
from topspin.cores import Layout
from topspin.plan.from_flags import resolve
from topspin.plan.precision import Format
from topspin.plan.settings import Dtype, TraceSection, Transport
from topspin.plan.spec import NodeConfig
from topspin.plan.speculation import OFF

BLOCK_SIZE: Final = 16
# Weights that one pass over a slice reads at least, of either side.
ATTENTION_BYTES: Final = 64 * 2**20
EXPERT_BYTES: Final = 96 * 2**20
# Tokens by which a sequence may grow while it is measured.
GROWTH: Final = 2 * BLOCK_SIZE - 1
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
    def num_blocks(self) -> int:
        """Return the blocks of the cache."""
        return -(-(self.num_keys + self.max_tokens) // BLOCK_SIZE) + 4 * self.max_rows


def slice_of(model: ModelConfig, shape: ModelShape) -> ModelConfig:
    """Return the model with MoE layers only (if it has any), as many as must be measured.

    They have no shared expert, which is measured as an MLP.
    """
    layer, moe = model.moe_layers[0] if model.moe_layers else 0, model.moe
    attention = shape.weight_bytes("attention", layer, "none")
    wanted = -(-ATTENTION_BYTES // attention)
    if moe is not None:
        experts = moe.num_experts * shape.weight_bytes("experts", layer, "none")
        # Experts weigh more: few layers of them exceed every cache, and many the memory.
        wanted = min(wanted, max(2, -(-4 * EXPERT_BYTES // experts)))
        wanted = max(wanted, -(-EXPERT_BYTES // experts))
        moe = replace(moe, shared_intermediate_size=None)
    count = max(1, min(wanted, model.num_layers))
    layers = (LayerConfig(is_moe=model.layers[layer].is_moe),) * count
    return replace(model, layers=layers, moe=moe)


def config_of(measured: Measured) -> NodeConfig:
    """Return the settings of the attention node."""
    is_device = measured.device != CPU_DEVICE
    longest = measured.num_keys + measured.max_tokens + 64
    return resolve(
        facts_of(measured.model)._replace(max_positions=longest),
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
        speculation=OFF,
        trace=TraceSection(enabled=False),
    ).for_node()


def rig_of(measured: Measured) -> Rig:
    """Return the nodes of a slice, with random weights."""
    return Rig(measured.model, config_of(measured))
