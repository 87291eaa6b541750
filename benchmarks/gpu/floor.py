"""The bytes that a decode step needs at least: the floor that a benchmark compares with.

Pure arithmetic over a model's shape, the contexts, and the number of experts that the step's
routing touched. Every needed weight is read once, for any batch; keys and
values are read up to each token's context (or window) and written for the new position.
Activations are left out: they fit in a cache. Called by benchmarks.gpu.engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.config import LayerConfig, ModelConfig


def expert_numbers(model: ModelConfig) -> int:
    """Return the number of weights of one routed expert."""
    assert model.moe is not None
    return 3 * model.hidden_size * model.moe.intermediate_size


def layer_numbers(model: ModelConfig, layer: LayerConfig) -> int:
    """Return the number of a layer's weights that every token uses: all but routed experts."""
    hidden = model.hidden_size
    qkv_size = model.q_size + 2 * model.kv_size
    numbers = 2 * hidden + qkv_size * hidden + hidden * model.q_size
    numbers += qkv_size if model.qkv_bias else 0
    numbers += hidden if model.o_bias else 0
    if model.qk_norm == "head":
        numbers += 2 * model.head_dim
    elif model.qk_norm == "full":
        numbers += model.q_size + model.kv_size
    if not layer.is_moe:
        numbers += 3 * hidden * model.intermediate_size
        return numbers + (2 * model.intermediate_size + hidden if model.mlp_bias else 0)
    assert model.moe is not None
    numbers += model.moe.num_experts * hidden
    shared_size = model.moe.shared_intermediate_size
    return numbers + (3 * hidden * shared_size + hidden if shared_size is not None else 0)


def decode_floor(
    model: ModelConfig, *, itemsize: int, touched: Sequence[int], contexts: Sequence[int]
) -> dict[str, float]:
    """Return the bytes of one decode step, by kind.

    `itemsize` is the bytes of a number, for weights, keys and values; `touched` the number of
    different experts that the step's tokens chose, per MoE layer; `contexts` the positions
    that each sequence's new token sees, itself included.
    """
    assert len(touched) == len(model.moe_layers)
    seen = sum(
        min(context, layer.sliding_window or context)
        for layer in model.layers
        for context in contexts
    )
    written = len(contexts) * model.num_layers
    numbers = {
        "attention": sum(layer_numbers(model, layer) for layer in model.layers),
        "experts": sum(touched) * expert_numbers(model) if touched else 0,
        "kv": 2 * model.kv_size * (seen + written),
        "lm_head": (model.vocab_size + 1) * model.hidden_size,
        "embed": len(contexts) * model.hidden_size,
    }
    return {what: float(count * itemsize) for what, count in numbers.items()}
