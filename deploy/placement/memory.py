"""The bytes that a node takes, part by part, and how many tokens its cache has room for.

Owns the sums; the sizes of weights are shapes.py's. Pure arithmetic; checked against the resident
memory of real nodes by benchmarks.cost_model. Called by the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deploy.placement.devices import DeviceProfile
from deploy.placement.shapes import Kernels, ModelShape, PrecisionOf


class NodeMemory(NamedTuple):
    """Bytes of a node's process, by use."""

    weights: float
    keys: float
    buffers: float
    process: float

    @property
    def total(self) -> float:
        """Return their sum."""
        return sum(self)


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


def kv_tokens(free_bytes: float, model: ModelShape, *, itemsize: int | None = None) -> int:
    """Return the tokens whose keys and values fit into so many bytes; 0 if none do."""
    return max(0, int(free_bytes // model.kv_bytes_per_token(itemsize)))


def kv_capacity(replicas: Sequence[int]) -> int:
    """Return the tokens that all sequences of an engine may have, given each replica's tokens.

    Sequences are spread evenly over the replicas, so the smallest one limits them all.
    """
    return len(replicas) * min(replicas)
