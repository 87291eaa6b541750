"""The bytes that a decode step needs at least: the floor that a benchmark compares with.

Pure arithmetic over a model's shape, the formats of its weights, the contexts, and the number of
experts that the step's routing touched. Every needed weight is read once, for any batch; keys and
values are read up to each token's context (or window) and written for the new position.
Activations are left out: they fit in a cache. Called by benchmarks.gpu.engine and, for one request
on a CPU, by benchmarks.load.compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from benchmarks.kernels.roofline import BF16, weight_bytes
from models.description.config import ModelConfig
from models.description.parts import LayerConfig
from topspin.plan.precision import MXFP4_BITS, UNQUANTISED, Format, Part, Rules, format_of

BITS: Final[dict[Format, int]] = {"int8": 8, "int4": 4, "mxfp4": MXFP4_BITS}
"""The quantised formats of the CPU's kernels, and the bits of the integers that they multiply."""


class _Matrix(NamedTuple):
    part: Part
    num_out: int
    num_in: int


def expert_numbers(model: ModelConfig) -> int:
    """Return the number of weights of one routed expert."""
    return sum(each.num_out * each.num_in for each in _expert(model))


def decode_floor(
    model: ModelConfig,
    *,
    itemsize: int,
    touched: Sequence[int],
    contexts: Sequence[int],
    rules: Rules = (),
) -> dict[str, float]:
    """Return the bytes of one decode step, by kind.

    `itemsize` is the bytes of a number, for keys, values and weights that are not quantised;
    `touched` the number of different experts that the step's tokens chose, per MoE layer;
    `contexts` the positions that each sequence's new token sees, itself included. `rules` give the
    weights formats of the CPU, experts of all layers alike.
    """
    assert len(touched) == len(model.moe_layers)

    def size(matrix: _Matrix) -> int:
        fmt = format_of(rules, matrix.part)
        if fmt == UNQUANTISED:
            return matrix.num_out * matrix.num_in * itemsize
        return weight_bytes(matrix.num_out, matrix.num_in, BITS[fmt])

    seen = sum(
        min(context, layer.sliding_window or context)
        for layer in model.layers
        for context in contexts
    )
    written = len(contexts) * model.num_layers
    hidden = model.hidden_size
    num_bytes = {
        "attention": sum(
            sum(map(size, _matrices(model, layer))) + _other_numbers(model, layer) * itemsize
            for layer in model.layers
        ),
        "experts": sum(touched) * _expert_bytes(model, size) if touched else 0,
        "kv": model.cached_size * (seen + written) * itemsize,
        "lm_head": size(_Matrix("lm_head", model.vocab_size, hidden)) + hidden * itemsize,
        "embed": len(contexts) * hidden * itemsize,
    }
    return {what: float(count) for what, count in num_bytes.items()}


def step_weight_bytes(model: ModelConfig, rules: Rules = ()) -> int:
    """Return the bytes of all weights that a decode step of one request reads on a CPU.

    These are the experts chosen in each layer, and everything else but the embeddings; what is not
    quantised has 16 bits.
    """
    top_k = 0 if model.moe is None else model.moe.top_k
    touched = [top_k] * len(model.moe_layers)
    floor = decode_floor(model, itemsize=BF16, touched=touched, contexts=[], rules=rules)
    return int(sum(floor.values()))


def _expert(model: ModelConfig) -> list[_Matrix]:
    """Return the matrices of one routed expert."""
    assert model.moe is not None
    return list(_mlp("experts", model.hidden_size, model.moe.intermediate_size))


def _expert_bytes(model: ModelConfig, size: Callable[[_Matrix], int]) -> int:
    """Return the bytes of one routed expert: its matrices of a `size`, and biases in fp32."""
    assert model.moe is not None
    matrices = _expert(model)
    num_biases = sum(matrix.num_out for matrix in matrices) if model.moe.has_biases else 0
    return sum(map(size, matrices)) + 4 * num_biases


def _mlp(part: Part, hidden: int, width: int) -> Iterator[_Matrix]:
    yield _Matrix(part, 2 * width, hidden)
    yield _Matrix(part, hidden, width)


def _matrices(model: ModelConfig, layer: LayerConfig) -> Iterator[_Matrix]:
    """Yield the matrices of a layer that every token uses and that may be quantised."""
    hidden = model.hidden_size
    if model.latent is None:
        yield _Matrix("attention", model.q_size + 2 * model.kv_size, hidden)
        yield _Matrix("attention", hidden, model.q_size)
    else:
        for size in model.latent.projections(hidden, model.num_heads):
            yield _Matrix("attention", *size)
    if not layer.is_moe:
        yield from _mlp("mlp", hidden, model.intermediate_size)
        return
    assert model.moe is not None
    if model.moe.shared_intermediate_size is not None:
        yield from _mlp("mlp", hidden, model.moe.shared_intermediate_size)


def _other_numbers(model: ModelConfig, layer: LayerConfig) -> int:
    """Return the number of a layer's other weights: norms, biases, sinks, router, gate."""
    hidden = model.hidden_size
    numbers = 2 * hidden
    if model.latent is not None:
        numbers += model.latent.num_norms + model.latent.num_head_weights(model.num_heads)
        # Queries that are made at once have no bias.
        numbers += model.latent.cached_dim + (model.latent.q_rank or 0) if model.qkv_bias else 0
    else:
        numbers += model.q_size + 2 * model.kv_size if model.qkv_bias else 0
    numbers += hidden if model.o_bias else 0
    numbers += model.num_heads if model.has_sinks else 0
    if model.qk_norm == "head":
        numbers += 2 * model.head_dim
    elif model.qk_norm == "full":
        numbers += model.q_size + model.kv_size
    if not layer.is_moe:
        return numbers + (2 * model.intermediate_size + hidden if model.mlp_bias else 0)
    assert model.moe is not None
    router = model.moe.router
    numbers += model.moe.num_experts * (hidden + router.has_logit_bias + router.has_bias)
    return numbers + (hidden if model.moe.shared_is_gated else 0)
