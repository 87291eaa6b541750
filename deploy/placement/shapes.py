"""A model's matrices and what they weigh, as the kernels really pack them.

Owns the shapes of each layer's weights, their bytes by format and kind of kernels, and the bytes
of keys and values. Knows no tensors, no device and no time; the sizes are checked against packed
weights by tests. Called by the cost model (cost.py, memory.py) and the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from models.description.config import ModelConfig
from models.description.parts import LatentConfig
from topspin.plan.precision import UNQUANTISED, Format, Part, Rules, format_of

Kernels = Literal["cpu", "triton"]
PrecisionOf = Callable[[Part, int | None], Format]
"""The format of a part in a decoder layer (None: of the LM head)."""

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
# kernels.cpu.simd.integers: blocks of 16 outputs, groups of 32 inputs with a scale and a step each
# (mxfp4: one byte).
_CPU_OUTPUTS: Final = 16
_CPU_INPUTS: Final = 32
_CPU_SCALE_BYTES: Final = 64
# kernels.triton.grouped_mlp.weights.
_GPU_INPUTS: Final = 128
_QK_NORMS: Final = ("none", "head", "full")


class MatrixShape(NamedTuple):
    """A weight [num_out, num_in]. `halves` is 2 for a gate above an up projection."""

    num_out: int
    num_in: int
    halves: int = 1

    @property
    def numbers(self) -> int:
        """Return how many numbers it has."""
        return self.num_out * self.num_in


def matrix_bytes(
    matrix: MatrixShape,
    weight_format: Format,
    *,
    itemsize: int,
    kernels: Kernels,
    in_units: bool = False,
) -> int:
    """Return the bytes of a packed matrix with its scales; "none" has `itemsize` per number.

    `in_units`: the layout of a routed expert's gate_up on a CPU, whose halves are padded apart.
    """
    num_out, num_in, halves = matrix
    if weight_format == UNQUANTISED:
        return matrix.numbers * itemsize
    bits = 8 if weight_format in ("int8", "fp8") else 4
    if kernels == "cpu":
        assert weight_format != "fp8", "the CPU's kernels have no fp8"
        if in_units:
            num_out = halves * _whole(num_out // halves, _CPU_INPUTS)
        groups = -(-num_in // _CPU_INPUTS)
        scales = _CPU_OUTPUTS if weight_format == "mxfp4" else _CPU_SCALE_BYTES
        group = scales + _CPU_OUTPUTS * _CPU_INPUTS * bits // 8
        return -(-num_out // _CPU_OUTPUTS) * groups * group
    groups = -(-num_in // _GPU_INPUTS)
    if weight_format == "fp8":
        blocks = halves * -(-num_out // halves // _GPU_INPUTS) * groups
        return matrix.numbers + 4 * blocks
    return num_out * groups * (_GPU_INPUTS * bits // 8 + 4)


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def precision_by(rules: Rules) -> PrecisionOf:
    """Return the formats that a plan's rules give (all experts of a layer: that of expert 0)."""

    def found(part: Part, layer: int | None) -> Format:
        return format_of(rules, part, layer, 0 if part == "experts" else None)

    return found


class LayerKind(NamedTuple):
    """What makes the attention of one layer differ from another's."""

    sliding_window: int | None
    is_moe: bool


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a model that determine bytes and times.

    Sizes as in models.description.config.ModelConfig. `expert_width` and `shared_width` are the
    widths of a routed and of the shared expert, 0: there is none; `num_router_biases` the fp32
    numbers beside a router, of its scores; `has_sinks` says whether each query head has one too;
    `itemsize` the bytes of a number that is not quantised.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int
    shared_is_gated: bool
    num_router_biases: int
    is_tied: bool
    qk_norm: Literal["none", "head", "full"]
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    layers: tuple[LayerKind, ...]
    has_sinks: bool = False
    has_logit_bias: bool = False
    has_expert_biases: bool = False
    latent: LatentConfig | None = None
    itemsize: int = 2

    @classmethod
    def from_config(cls, config: ModelConfig, *, dtype: str = "bfloat16") -> ModelShape:
        """Return the shape of a model that is served in `dtype`."""
        moe = config.moe
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            num_experts=moe.num_experts if moe else 0,
            top_k=moe.top_k if moe else 0,
            expert_width=moe.intermediate_size if moe else 0,
            shared_width=(moe.shared_intermediate_size or 0) if moe else 0,
            shared_is_gated=moe is not None and moe.shared_is_gated,
            num_router_biases=moe.num_experts if moe and moe.router.has_bias else 0,
            is_tied=config.tie_word_embeddings,
            qk_norm=config.qk_norm,
            has_qkv_bias=config.qkv_bias,
            has_o_bias=config.o_bias,
            has_mlp_bias=config.mlp_bias,
            layers=tuple(LayerKind(each.sliding_window, each.is_moe) for each in config.layers),
            has_sinks=config.has_sinks,
            has_logit_bias=moe is not None and moe.router.has_logit_bias,
            has_expert_biases=moe is not None and moe.has_biases,
            latent=config.latent,
            itemsize=DTYPE_BYTES[dtype],
        )

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return the layers with routed experts, ascending."""
        return tuple(idx for idx, layer in enumerate(self.layers) if layer.is_moe)

    @property
    def q_size(self) -> int:
        """Return the columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the columns of all key heads."""
        return self.num_kv_heads * self.head_dim

    def mlp_width(self, layer: int) -> int:
        """Return the width of a layer's dense MLP or shared expert; 0: it has neither."""
        return self.shared_width if self.layers[layer].is_moe else self.intermediate_size

    def seen_keys(self, layer: int, context: float) -> float:
        """Return how many of `context` keys a query of this layer attends to."""
        window = self.layers[layer].sliding_window
        return context if window is None else min(context, float(window))

    def matrices(self, part: Part, layer: int | None = None) -> tuple[MatrixShape, ...]:
        """Return a part's matrices that may be quantised; of part "experts" one expert's.

        `layer` is None for the LM head. Empty where the layer does not have the part.
        """
        hidden = self.hidden_size
        if part == "lm_head":
            return (MatrixShape(self.vocab_size, hidden),)
        assert layer is not None
        if part == "attention" and self.latent is not None:
            sizes = self.latent.projections(hidden, self.num_heads)
            return tuple(MatrixShape(*size) for size in sizes)
        if part == "attention":
            return (
                MatrixShape(self.q_size + 2 * self.kv_size, hidden),
                MatrixShape(hidden, self.q_size),
            )
        if part == "experts":
            width = self.expert_width if self.layers[layer].is_moe else 0
        else:
            width = self.mlp_width(layer)
        return (MatrixShape(2 * width, hidden, 2), MatrixShape(hidden, width)) if width else ()

    def weight_bytes(
        self, part: Part, layer: int | None, weight_format: Format, *, kernels: Kernels = "cpu"
    ) -> int:
        """Return the packed bytes of a part in a layer; of part "experts" those of ONE expert."""
        # Kernels keep biases in fp32.
        matrices = self.matrices(part, layer)
        has_biases = part == "experts" and self.has_expert_biases
        biases = 4 * sum(matrix.num_out for matrix in matrices) if has_biases else 0
        return biases + sum(
            matrix_bytes(
                matrix,
                weight_format,
                itemsize=self.itemsize,
                kernels=kernels,
                in_units=part == "experts" and matrix.halves == 2,
            )
            for matrix in matrices
        )

    def numbers(self, part: Part, layer: int | None = None) -> int:
        """Return how many weights a part has: multiplications per row."""
        found = sum(matrix.numbers for matrix in self.matrices(part, layer))
        return found + (self.num_head_weights if part == "attention" else 0)

    @property
    def num_head_weights(self) -> int:
        """Return the numbers of matrices per head, which are in the model's dtype."""
        return 0 if self.latent is None else self.latent.num_head_weights(self.num_heads)

    @property
    def expanding_bytes(self) -> int:
        """Return a layer's bytes that CPUs have besides, for long prompts only."""
        if self.latent is None:
            return 0
        return self.latent.num_expanding_weights(self.num_heads) * self.itemsize

    def other_bytes(self, layer: int) -> int:
        """Return a layer's bytes that no format changes.

        Norms, biases, sinks, router, gate, and matrices per head.
        """
        in_fp32 = self.num_heads if self.has_sinks else 0
        hidden, found = self.hidden_size, 2 * self.hidden_size
        found += self.matrices("attention", layer)[0].num_out if self.has_qkv_bias else 0
        found += self.num_head_weights
        found += self.latent.num_norms if self.latent is not None else 0
        found += hidden if self.has_o_bias else 0
        if self.qk_norm == "head":
            found += 2 * self.head_dim
        elif self.qk_norm == "full":
            found += self.q_size + self.kv_size
        if self.layers[layer].is_moe:
            found += self.num_experts * hidden + (hidden if self.shared_is_gated else 0)
            found += self.num_experts if self.has_logit_bias else 0
            in_fp32 += self.num_router_biases
        elif self.has_mlp_bias:
            found += 2 * self.intermediate_size + hidden
        return found * self.itemsize + 4 * in_fp32

    def embedding_bytes(self) -> int:
        """Return the bytes of the embeddings and the final norm."""
        return (self.vocab_size + 1) * self.hidden_size * self.itemsize

    def head_bytes(self, weight_format: Format, *, kernels: Kernels = "cpu") -> int:
        """Return the bytes of the LM head beside the embeddings.

        One that is tied to them takes none only where it is used as it is: a CPU packs bf16.
        """
        is_plain = weight_format == UNQUANTISED and (kernels == "triton" or self.itemsize == 4)
        if self.is_tied and is_plain:
            return 0
        return self.weight_bytes("lm_head", None, weight_format, kernels=kernels)

    def kv_bytes_per_token(self, itemsize: int | None = None) -> int:
        """Return the bytes of a token's keys and values in all layers (`itemsize` 1: fp8)."""
        return self.num_layers * self.kv_layer_bytes(itemsize)

    def kept_bytes_per_token(
        self,
        length: float,
        itemsize: int | None = None,
        *,
        layers: Iterable[int] | None = None,
        step_tokens: int = 0,
    ) -> float:
        """Return the bytes that a sequence of `length` tokens keeps, per token, in `layers`.

        None: in all. Layers with a window keep that much, and the tokens of the two steps of
        `step_tokens` that are under way.
        """
        each = self.kv_layer_bytes(itemsize)
        return sum(
            each * (min(length, self.seen_keys(layer, length) + 2 * step_tokens) / length)
            for layer in (range(self.num_layers) if layers is None else layers)
        )

    def kv_layer_bytes(self, itemsize: int | None = None) -> int:
        """Return the bytes of a token's keys and values in one layer."""
        numbers = self.kv_size if self.latent is not None else 2 * self.kv_size
        return numbers * (self.itemsize if itemsize is None else itemsize)

    def attention_key(self) -> tuple[int, ...]:
        """Return what identifies a table of attention halves of this shape."""
        latent = self.latent
        own = () if latent is None else (latent.q_rank or 0, latent.nope_dim, latent.value_dim)
        return (
            *own,
            *(self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim),
            *(_QK_NORMS.index(self.qk_norm), self.num_experts, self.top_k, self.itemsize),
        )

    def mlp_key(self, layer: int) -> tuple[int, ...]:
        """Return what identifies a table of a layer's dense MLP or shared expert."""
        return (self.hidden_size, self.mlp_width(layer), self.itemsize)

    def experts_key(self) -> tuple[int, ...]:
        """Return what identifies a table of routed experts of this shape."""
        return (
            *(self.hidden_size, self.expert_width, self.num_experts),
            *(self.top_k, self.itemsize),
        )

    def head_key(self) -> tuple[int, ...]:
        """Return what identifies a table of the LM head and sampling."""
        return (self.hidden_size, self.vocab_size, self.itemsize)
