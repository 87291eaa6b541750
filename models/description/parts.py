"""The parts of a model: kinds of attention, routers and experts, per layer.

Owns their structure. A family (models.families) says which of them a checkpoint is made of,
models.description.config puts them together, and nodes compute them. Knows no family and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from topspin.expert_activation import SWIGLU, ExpertActivation

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Keys and values of all heads as projections of one vector a token, its latent (MLA).

    The cache has the `rank` numbers of the latent and, behind them, `rope_dim` rotated numbers of a
    key that all heads share. A head's key is `nope_dim` numbers made of the latent and the shared
    ones; its value is `value_dim` numbers made of the latent. q_rank: that of the factors of the
    queries' projection; None: it is one matrix. norm_eps: of the norms of both latents. Source:
    DeepSeek-V2 (arXiv 2405.04434, section 2.1).
    """

    rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float

    @property
    def head_dim(self) -> int:
        """Numbers of a head's key, and of its query."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Numbers of a token in the cache."""
        return self.rank + self.rope_dim

    @property
    def num_norms(self) -> int:
        """Weights of the norms of a layer's latents."""
        return self.rank + (self.q_rank or 0)

    def input_rows(self, num_heads: int) -> int:
        """Return the outputs of the projection of hidden states, `qkv` of a layer's weights."""
        queries = num_heads * self.head_dim if self.q_rank is None else self.q_rank
        return queries + self.cached_dim

    def projections(self, hidden_size: int, num_heads: int) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of a layer's matrices that may be quantised, `o` last."""
        inputs = (self.input_rows(num_heads), hidden_size)
        out = (hidden_size, num_heads * self.value_dim)
        if self.q_rank is None:
            return inputs, out
        return inputs, (num_heads * self.head_dim, self.q_rank), out

    @property
    def expands(self) -> bool:
        """Whether long prompts on CPUs attend to keys and values made of latents."""
        return self.value_dim <= self.head_dim

    def num_expanding_weights(self, num_heads: int) -> int:
        """Return the numbers of the matrices that make them, a value as wide as a key."""
        return 2 * num_heads * self.head_dim * self.rank if self.expands else 0

    def num_head_weights(self, num_heads: int) -> int:
        """Return the numbers of the matrices per head between latents and keys and values."""
        return num_heads * self.rank * (self.nope_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """The choice of `top_k` experts for a token from the router's logits [T, E].

    Fields as in `kernels.contracts.RoutingRule`. has_bias: a bias of the scores, fp32 whatever the
    model's dtype, counts for the choice only. has_logit_bias: the logits have a bias, in the
    model's dtype. fp32_logits: logits are not rounded to the model's dtype. rounded: weights are,
    before they are used.
    """

    top_k: int
    renormalise: bool
    scores: Literal["softmax", "sigmoid", "logits"] = "softmax"
    has_bias: bool = False
    has_logit_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: Literal[1, 2] = 2
    epsilon: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    fp32_logits: bool = False
    rounded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """The names of a layer's experts in checkpoints.

    blocks: names of the MoE block inside a layer, as published first. gate, up, down: the three
    projections of one routed expert. router, bias, shared: inside the block, its router, the bias
    of the router's scores and the shared expert. is_interleaved: where a layer's experts are in one
    tensor, rows of gate and up are in turn. is_transposed: such a tensor of numbers is
    [E, inputs, outputs].
    """

    blocks: tuple[str, ...] = ("mlp",)
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    is_interleaved: bool = False
    is_transposed: bool = False


USUAL_NAMES: Final = ExpertNames()


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """The routed experts, equal in every MoE layer.

    intermediate_size is the width F of one routed expert. shared_intermediate_size is the
    width of the shared expert that every token also takes, or None. shared_is_gated: it is scaled
    by a sigmoid gate. activation: that of the routed experts; has_biases: they have biases.
    """

    num_experts: int
    intermediate_size: int
    router: RouterConfig
    shared_intermediate_size: int | None = None
    shared_is_gated: bool = False
    activation: ExpertActivation = SWIGLU
    has_biases: bool = False
    names: ExpertNames = USUAL_NAMES

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self.router.top_k


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One decoder layer.

    sliding_window W: a query at position p sees keys p - W + 1 .. p; None sees all.
    """

    sliding_window: int | None = None
    is_moe: bool = False
