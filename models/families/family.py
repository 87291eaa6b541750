"""The record of a model family, and readers of fields that several families share.

Owns the structure of a family's file: its names for transformers, the defaults of its config class,
the parts it is made of, and the names of its tensors. Knows no family: each is one module beside
this one. Source: the config classes and checkpoint layouts of HuggingFace transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from models.description.config_fields import ConfigFields
from models.description.parts import (
    USUAL_NAMES,
    ExpertNames,
    LatentConfig,
    LayerConfig,
    MoeConfig,
    QkNorm,
    RouterConfig,
)

SHARED_EXPERTS: Final = ExpertNames(shared="shared_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyParts:
    """The parts of one checkpoint, as its family reads them from config.json.

    A field that the family's code does not read has its value here. See ModelConfig.
    """

    layers: tuple[LayerConfig, ...]
    moe: MoeConfig | None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    clip_qkv: float | None = None
    has_sinks: bool = False
    rotary_factor: float | None = None
    """The share of a head's numbers that are rotated, unless the rotary options say another one;
    None: all are, always."""
    rope_is_interleaved: bool = False
    value_dim: int | None = None
    """The size of a value's head (`v_head_dim`); None: that of a key's."""
    latent: LatentConfig | None = None
    """How keys and values are made of latents; None: they are projections of their own."""
    num_mtp_layers: int = 0
    """Layers behind the decoder's, for multi-token prediction; one is read for drafts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One `model_type`.

    defaults: those of transformers' config class for options that are read, but for what means "as
    many as" or "none" (num_key_value_heads, flags). parts: reads a checkpoint's parts from its
    fields and number of layers. ignored: options that the family's code does not read, with the
    sentence that says so. tokenizer_class: transformers' class of a checkpoint whose files name
    none; takes_class: whether one that they name counts.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, object]
    parts: Callable[[ConfigFields, int], FamilyParts]
    ignored: Mapping[str, str] = field(default_factory=dict)
    tokenizer_class: str | None = None
    takes_class: bool = True


def read_experts(
    fields: ConfigFields,
    *,
    width: str = "moe_intermediate_size",
    renormalise: bool | None = None,
    rounded: bool = True,
    shared_intermediate_size: int | None = None,
    names: ExpertNames = USUAL_NAMES,
    may_lack: bool = True,
) -> MoeConfig | None:
    """Return the experts of a softmax router; None if there are 0 and a family `may_lack` them.

    `width` is the field of an expert's width. `renormalise` None: by `norm_topk_prob`. A shared
    expert is behind a sigmoid gate.
    """
    least = 0 if may_lack else 1
    num_experts = fields.aliased_int("num_local_experts", "num_experts", least=least)
    if num_experts == 0:
        return None
    if renormalise is None:
        renormalise = fields.flag("norm_topk_prob", default=False)
    router = RouterConfig(
        top_k=read_top_k(fields, num_experts), renormalise=renormalise, rounded=rounded
    )
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=fields.positive_int(width),
        router=router,
        shared_intermediate_size=shared_intermediate_size,
        shared_is_gated=shared_intermediate_size is not None,
        names=names,
    )


def serve_only(fields: ConfigFields, served: Mapping[str, object]) -> None:
    """Refuse options that are neither null nor absent, and not as `served`."""
    for option, value in served.items():
        if fields.raw.get(option) not in (None, value):
            raise fields.error(option, f"supported: {value}")


def read_top_k(fields: ConfigFields, num_experts: int) -> int:
    """Return `num_experts_per_tok`, which is at most `num_experts`."""
    top_k = fields.positive_int("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", f"must be at most num_experts = {num_experts}")
    return top_k


def check_groups(fields: ConfigFields, num_experts: int, router: RouterConfig) -> None:
    """Refuse groups that do not divide the experts, or hold too few for a token."""
    groups, kept = router.num_groups, router.top_groups
    if num_experts % groups:
        raise fields.error("n_group", f"must divide the {num_experts} experts")
    if kept > groups or kept * (num_experts // groups) < router.top_k:
        raise fields.error(
            "topk_group", f"of {groups} groups, must hold {router.top_k} experts for a token"
        )


def read_latent(fields: ConfigFields) -> LatentConfig:
    """Return the sizes of latents; the option `latent_norm_eps` is Topspin's own."""
    q_rank = fields.optional_int("q_lora_rank")
    if q_rank is not None and q_rank <= 0:
        raise fields.error("q_lora_rank", "must be positive or null")
    rope_dim = fields.positive_int("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "must be even")
    return LatentConfig(
        rank=fields.positive_int("kv_lora_rank"),
        q_rank=q_rank,
        nope_dim=fields.positive_int("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=fields.positive_int("v_head_dim"),
        norm_eps=fields.number("latent_norm_eps", default=fields.number("rms_norm_eps")),
    )


def latent_parts(
    fields: ConfigFields, sparse: Sequence[bool], moe: MoeConfig, *, rope_is_interleaved: bool
) -> FamilyParts:
    """Return the parts of a checkpoint with latents whose `sparse` layers have routed experts."""
    has_bias = fields.flag("attention_bias", default=False)
    return FamilyParts(
        layers=layers_of([None] * len(sparse), sparse),
        moe=moe,
        qkv_bias=has_bias,
        o_bias=has_bias,
        latent=read_latent(fields),
        rope_is_interleaved=rope_is_interleaved,
        num_mtp_layers=fields.optional_int("num_nextn_predict_layers") or 0,
    )


def read_bias_router(fields: ConfigFields, num_experts: int) -> RouterConfig:
    """Return the sigmoid router with a bias, chosen by groups, of DeepSeek-V3 and GLM-4.5."""
    router = RouterConfig(
        top_k=read_top_k(fields, num_experts),
        renormalise=fields.flag("norm_topk_prob", default=True),
        scores="sigmoid",
        has_bias=True,
        num_groups=fields.positive_int("n_group"),
        top_groups=fields.positive_int("topk_group"),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor"),
        fp32_logits=True,
    )
    check_groups(fields, num_experts, router)
    return router


def read_shared_experts(
    fields: ConfigFields, router: Callable[[ConfigFields, int], RouterConfig]
) -> MoeConfig:
    """Return experts beside `n_shared_experts` that every token takes, one MLP of their width."""
    num_experts = fields.aliased_int(
        "n_routed_experts", "num_local_experts", "num_experts", least=1
    )
    width = fields.positive_int("moe_intermediate_size")
    num_shared = fields.optional_int("n_shared_experts") or 0
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=width,
        router=router(fields, num_experts),
        shared_intermediate_size=width * num_shared if num_shared else None,
        names=SHARED_EXPERTS,
    )


def dense_first(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return per layer whether it has routed experts: all behind `first_k_dense_replace`."""
    num_dense = fields.optional_int("first_k_dense_replace") or 0
    return [idx >= num_dense for idx in range(num_layers)]


def sparse_layers(fields: ConfigFields, num_layers: int, moe: MoeConfig | None) -> list[bool]:
    """Return per layer whether it has routed experts: `decoder_sparse_step`, `mlp_only_layers`."""
    if moe is None:
        return [False] * num_layers
    step = fields.positive_int("decoder_sparse_step", default=1)
    dense = fields.int_list("mlp_only_layers")
    return [idx not in dense and (idx + 1) % step == 0 for idx in range(num_layers)]


def read_window(fields: ConfigFields) -> int | None:
    """Return `sliding_window`, None for attention to all positions."""
    window = fields.optional_int("sliding_window")
    if window is not None and window <= 0:
        raise fields.error("sliding_window", "must be positive or null")
    return window


def check_layer_types(fields: ConfigFields, num_layers: int, window: int | None) -> None:
    """Refuse `layer_types` of others than layers that all have this window."""
    expected = "full_attention" if window is None else "sliding_attention"
    declared = fields.raw.get("layer_types")
    if declared is not None and declared != [expected] * num_layers:
        model_type = fields.raw.get("model_type")
        raise fields.error("layer_types", f"{model_type} with this window has {expected}")


def layers_of(windows: Sequence[int | None], sparse: Sequence[bool]) -> tuple[LayerConfig, ...]:
    """Return the layers with these windows, of which the `sparse` ones have routed experts."""
    return tuple(
        LayerConfig(sliding_window=window, is_moe=is_moe)
        for window, is_moe in zip(windows, sparse, strict=True)
    )
