"""The memory that an engine's containers ask for: weights, caches and their processes.

Owns the sum; sizes of weights are deploy.placement's, so they are those of the planner. Pure.
Without the model's shape a node asks for none, as nobody knows.
"""

from __future__ import annotations

from typing import Final

from deploy.placement.memory import attention_weight_bytes, expert_weight_bytes
from deploy.placement.shapes import Kernels, ModelShape, PrecisionOf, precision_by
from deploy.services.engine import MemoryOf
from topspin.devices import NodeRole
from topspin.plan.spec import AttentionNode, EnginePlan, ExpertNode, NodeSpec, StageNode

GIB: Final = 2**30

SERVER_BYTES: Final = GIB
"""Of a scheduler or a gateway: tokenizer, templates, requests."""
PROCESS_BYTES: Final[dict[NodeRole, int]] = {
    "attention": 336 * 2**20,
    "stage": 336 * 2**20,
    "expert": 224 * 2**20,
}
"""Of a node on a CPU beside its data: libraries, compiled kernels, grammars' process, buffers of a
step of a small model; those of a large one are within the margin of its data. As measured in
containers (tests/system/containers/test_memory.py)."""
LOADING_BYTES: Final = 4 * GIB
"""Of a node on a GPU, on its host: weights pass through while they are read."""
MARGIN: Final = 1.05


def memory_of(plan: EnginePlan, shape: ModelShape | None) -> MemoryOf:
    """Return the bytes that each node's container asks for; None where that is not known."""
    precision_of = precision_by(plan.precision)

    def of(node: NodeSpec) -> int | None:
        if node.place.is_gpu:
            spill = plan.kv_cache.spill
            pinned = spill is not None and spill.is_in_host_memory and node.role == "attention"
            return LOADING_BYTES + (spill.size_bytes if spill and pinned else 0)
        data = None if shape is None else _data_bytes(plan, node, shape, precision_of)
        return None if data is None else round(data * MARGIN) + PROCESS_BYTES[node.role]

    return of


def _data_bytes(
    plan: EnginePlan, node: NodeSpec, shape: ModelShape, precision_of: PrecisionOf
) -> int | None:
    kernels: Kernels = "triton" if node.kernels == "triton" else "cpu"
    if isinstance(node, ExpertNode):
        return expert_weight_bytes(shape, precision_of, held=node.experts, kernels=kernels)
    if not isinstance(node, AttentionNode | StageNode):
        return None  # the draft model's shape is not known
    layers = range(shape.num_layers) if node.layers is None else range(*node.layers)
    weights = attention_weight_bytes(
        shape,
        precision_of,
        kernels=kernels,
        layers=layers,
        with_ends=isinstance(node, AttentionNode),
    )
    for layer in _local_layers(plan, shape, layers):
        weight_format = precision_of("experts", layer)
        each = shape.weight_bytes("experts", layer, weight_format, kernels=kernels)
        weights += shape.num_experts * each
    assert node.kv_cache_bytes is not None, "a node on a CPU has a size"
    if plan.speculation is not None and plan.speculation.method == "mtp" and node.role != "stage":
        weights += _head_bytes(shape, precision_of, kernels)
        weights += node.kv_cache_bytes // len(layers)  # its layer has as many tokens
    return weights + node.kv_cache_bytes


def _head_bytes(shape: ModelShape, precision_of: PrecisionOf, kernels: Kernels) -> int:
    """Return the bytes of a head of multi-token prediction: a layer as the last, and what joins it.

    All its experts are among them; a matrix [H, 2H] joins rows and embeddings, all of them normed.
    """
    last, own = shape.num_layers - 1, shape.num_layers
    found = attention_weight_bytes(
        shape,
        lambda part, layer: precision_of(part, own),
        kernels=kernels,
        layers=[last],
        with_ends=False,
    )
    experts = precision_of("experts", own)
    found += shape.num_experts * shape.weight_bytes("experts", last, experts, kernels=kernels)
    return found + (2 * shape.hidden_size + 3) * shape.hidden_size * shape.itemsize


def _local_layers(plan: EnginePlan, shape: ModelShape, layers: range) -> list[int]:
    local = () if plan.local_experts is None else plan.local_experts.layers
    return [layer for layer in shape.moe_layers if layer in local and layer in layers]
