"""The bytes of a node's weights and of its process.

Owns the sums; the sizes of weights are shapes.py's. Pure arithmetic; checked against the resident
memory of real nodes by benchmarks.engine.cost_model. Called by the planner.
"""

from __future__ import annotations

from collections.abc import Iterable

from deploy.placement.devices import DeviceProfile
from deploy.placement.shapes import Kernels, ModelShape, PrecisionOf


def attention_weight_bytes(
    model: ModelShape,
    precision_of: PrecisionOf,
    *,
    kernels: Kernels,
    layers: Iterable[int] | None = None,
    with_ends: bool = True,
) -> int:
    """Return the packed bytes of an attention node's weights, in `layers` (None: all).

    `with_ends`: the embeddings and the LM head too. Routed experts kept local come on top.
    """
    total = 0
    for layer in range(model.num_layers) if layers is None else layers:
        for part in ("attention", "mlp"):
            weight_format = precision_of(part, layer)
            total += model.weight_bytes(part, layer, weight_format, kernels=kernels)
        total += model.other_bytes(layer)
        total += model.expanding_bytes if kernels == "cpu" else 0
    if with_ends:
        total += model.embedding_bytes()
        total += model.head_bytes(precision_of("lm_head", None), kernels=kernels)
    return total


def expert_weight_bytes(
    model: ModelShape, precision_of: PrecisionOf, *, held: int, kernels: Kernels
) -> int:
    """Return the packed bytes of an expert node that holds `held` experts of each MoE layer."""
    return sum(
        held * model.weight_bytes("experts", layer, precision_of("experts", layer), kernels=kernels)
        for layer in model.moe_layers
    )


def process_bytes(device: DeviceProfile, role: str, *, nodes_on_host: int = 1) -> float:
    """Return the bytes of a node's process beside its data; libraries' pages are shared."""
    own = device.process.attention if role == "attention" else device.process.expert
    return own + device.process.shared / max(1, nodes_on_host)
