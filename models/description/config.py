"""ModelConfig: a checkpoint's config.json, read and checked for serving.

Owns reading config.json (written by transformers 4 or 5) and refusing, with ConfigError, every
option that Topspin would not compute exactly as transformers does. Knows no tensors (and imports
no torch) and no server option; every role, the server and the planner call load_model_config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from models.checkpoints.checkpoint_index import read_index
from models.description.config_fields import ConfigFields, read_json
from models.description.families import FAMILIES, Family, QkNorm
from models.description.overrides import overridden
from models.description.rope_config import RopeConfig, parse_rope
from models.quantised.config import parse_quantisation
from models.quantised.scheme import Quantisation
from topspin.errors import CheckpointError, ConfigError

__all__ = ["LayerConfig", "ModelConfig", "MoeConfig", "RopeConfig", "load_model_config"]

DtypeName = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[str, DtypeName] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
_WINDOWED = ("mixtral", "qwen2_moe", "qwen3_moe")
_STORED_DTYPES: dict[str, DtypeName] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


MAX_LAYERS: Final = 4096
"""Far above all models: a description has an object for each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """The routed experts, equal in every MoE layer.

    intermediate_size is the width F of one routed expert. shared_intermediate_size is the
    width of the shared expert that every token also takes, scaled by a sigmoid gate
    (Qwen2-MoE), or None. norm_topk_prob: the chosen softmax weights are divided by their sum.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_intermediate_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One decoder layer.

    sliding_window W: a query at position p sees keys p - W + 1 .. p; None sees all.
    """

    sliding_window: int | None = None
    is_moe: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything about a model that is not a weight.

    dtype is the checkpoint's (the server may run another). qk_norm: "head" normalises each head
    after the projection (Qwen3), "full" the whole projection (OLMoE). clip_qkv clamps q, k and v to
    [-clip, clip] after qk_norm and before RoPE. intermediate_size is the width of a dense MLP
    layer. eos_token_ids end a generation, in no special order. quantisation: how the checkpoint
    stores its projections; None: as numbers. notes: sentences for the log about what the
    checkpoint says and is not followed.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: DtypeName
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm
    clip_qkv: float | None
    rope: RopeConfig
    layers: tuple[LayerConfig, ...]
    intermediate_size: int
    moe: MoeConfig | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantisation: Quantisation | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, ascending."""
        return tuple(idx for idx, layer in enumerate(self.layers) if layer.is_moe)

    @property
    def context_length(self) -> int:
        """Longest supported sequence: with dynamic NTK, factor times its positions."""
        if self.rope.rope_type == "dynamic":
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @property
    def q_size(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads (or all value heads) together."""
        return self.num_kv_heads * self.head_dim


def load_model_config(path: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """Read `path`/config.json, and what other files say of it, of a checkpoint directory.

    `overrides` replace fields of config.json: those of the plan (`model.hf_overrides`), for the
    served model. Raises ConfigError if Topspin cannot serve the model exactly; the error names the
    option, its value and the supported values.
    """
    path = Path(path)
    raw, source = read_json(path / "config.json"), str(path / "config.json")
    if overrides:
        raw, source = overridden(raw, overrides), f"{source} with --hf-overrides"
    family = _family(ConfigFields(raw, source=source))
    fields = ConfigFields(raw, source=source, defaults=_defaults(family, raw))
    notes = _ignored(fields, family)
    _refuse_unsupported(fields)
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = _num_kv_heads(fields, num_heads=num_heads)
    head_dim = _head_dim(fields, hidden_size=hidden_size, num_heads=num_heads)
    if family.qk_norm == "full" and head_dim * num_heads != hidden_size:
        raise fields.error("head_dim", f"{family.model_type} needs hidden_size / heads")
    num_layers = fields.positive_int("num_hidden_layers", most=MAX_LAYERS)
    max_positions = fields.positive_int("max_position_embeddings")
    moe = _moe(fields, family)
    windows = _sliding_windows(fields, family, num_layers=num_layers)
    sparse = _moe_flags(fields, family, num_layers=num_layers, moe=moe)
    bias = _biases(fields, family)
    vocab_size = fields.positive_int("vocab_size")
    # It reads tokenizers and templates, whose libraries machines that run kernels only lack.
    from models.text.endings import ending_token_ids

    return ModelConfig(
        family=family.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=_number(family, "rms_norm_eps")),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position_embeddings=max_positions,
        dtype=_dtype(fields, path),
        qkv_bias=bias.qkv,
        o_bias=bias.o,
        mlp_bias=bias.mlp,
        qk_norm=family.qk_norm,
        clip_qkv=_clip_qkv(fields, family),
        rope=parse_rope(
            fields,
            default_theta=_number(family, "rope_theta"),
            max_position_embeddings=max_positions,
        ),
        layers=tuple(
            LayerConfig(sliding_window=window, is_moe=is_moe)
            for window, is_moe in zip(windows, sparse, strict=True)
        ),
        intermediate_size=fields.positive_int("intermediate_size"),
        moe=moe if any(sparse) else None,
        eos_token_ids=ending_token_ids(path, fields, vocab_size=vocab_size, notes=notes),
        bos_token_id=fields.optional_int("bos_token_id"),
        quantisation=parse_quantisation(fields, notes),
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Biases:
    qkv: bool
    o: bool
    mlp: bool


def _family(fields: ConfigFields) -> Family:
    model_type = fields.raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise fields.error("model_type", f"supported: {', '.join(sorted(FAMILIES))}")
    architectures = fields.raw.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise fields.error("architectures", f"supported: [{family.architecture!r}]")
    return family


def _defaults(family: Family, raw: Mapping[str, object]) -> Mapping[str, object]:
    """Return the family's defaults; a count of experts has two names."""
    if not raw.keys() & {"num_experts", "num_local_experts"}:
        return family.defaults
    return {name: value for name, value in family.defaults.items() if name != "num_experts"}


def _number(family: Family, option: str) -> float:
    """Return the family's default of an option that may be null."""
    value = family.defaults[option]
    assert isinstance(value, float)
    return value


def _ignored(fields: ConfigFields, family: Family) -> list[str]:
    """Return a sentence for each option that is not followed, as transformers does not."""
    options = {"dual_chunk_attention_config": "attention is full and exact"}
    if family.model_type not in _WINDOWED:
        options["sliding_window"] = f"{family.model_type} attends to all positions"
    return [
        f"{fields.error(option, reason)}; the option is ignored"
        for option, reason in options.items()
        if fields.raw.get(option) is not None
    ]


def _refuse_unsupported(fields: ConfigFields) -> None:
    """Raise ConfigError for options that change the computation in an unsupported way."""
    if fields.raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", "supported: silu")
    if fields.raw.get("per_layer_config"):
        raise fields.error("per_layer_config", "supported: layers of equal shape")


def _num_kv_heads(fields: ConfigFields, *, num_heads: int) -> int:
    num_kv_heads = fields.optional_int("num_key_value_heads")
    if num_kv_heads is None:
        return num_heads
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"must divide num_attention_heads = {num_heads} evenly"
        )
    return num_kv_heads


def _head_dim(fields: ConfigFields, *, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.optional_int("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"must be a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    if head_dim < 4 or head_dim % 2:
        raise ConfigError(f"{fields.source}: head_dim = {head_dim}: must be even, 4 or more")
    return head_dim


def _moe(fields: ConfigFields, family: Family) -> MoeConfig | None:
    """Read the expert options by each family's names and defaults (see transformers)."""
    if not family.moe_blocks:
        return None
    num_experts = fields.aliased_int("num_local_experts", "num_experts")
    if num_experts == 0 and family.model_type != "mixtral":
        return None
    top_k = fields.positive_int("num_experts_per_tok")
    if not 1 <= top_k <= num_experts:
        raise fields.error("num_experts_per_tok", f"must be at most num_experts = {num_experts}")
    is_mixtral = family.model_type == "mixtral"
    is_qwen = family.model_type in ("qwen2_moe", "qwen3_moe")
    is_shared = family.model_type == "qwen2_moe"
    width = "moe_intermediate_size" if is_qwen else "intermediate_size"
    shared = fields.positive_int("shared_expert_intermediate_size") if is_shared else None
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.positive_int(width),
        norm_topk_prob=is_mixtral or fields.flag("norm_topk_prob", default=False),
        shared_intermediate_size=shared,
    )


def _moe_flags(
    fields: ConfigFields, family: Family, *, num_layers: int, moe: MoeConfig | None
) -> list[bool]:
    """Return per layer whether it has routed experts (Qwen: some layers are dense MLPs)."""
    if moe is None:
        return [False] * num_layers
    if family.model_type not in ("qwen2_moe", "qwen3_moe"):
        return [True] * num_layers
    step = fields.positive_int("decoder_sparse_step", default=1)
    dense = fields.int_list("mlp_only_layers")
    return [idx not in dense and (idx + 1) % step == 0 for idx in range(num_layers)]


def _sliding_windows(fields: ConfigFields, family: Family, *, num_layers: int) -> list[int | None]:
    """Return per layer the attention window, by the family's rule."""
    is_windowed = family.model_type in _WINDOWED
    window = fields.optional_int("sliding_window") if is_windowed else None
    if family.model_type in ("qwen2_moe", "qwen3_moe") and not fields.flag(
        "use_sliding_window", default=False
    ):
        window = None
    if window is not None and window <= 0:
        raise fields.error("sliding_window", "must be positive or null")
    if family.model_type == "qwen2_moe":
        return _qwen2_windows(fields, window=window, num_layers=num_layers)
    expected = "full_attention" if window is None else "sliding_attention"
    declared = fields.raw.get("layer_types")
    if declared is not None and declared != [expected] * num_layers:
        raise fields.error("layer_types", f"{family.model_type} with this window has {expected}")
    return [window] * num_layers


def _qwen2_windows(
    fields: ConfigFields, *, window: int | None, num_layers: int
) -> list[int | None]:
    """Qwen2-MoE: `layer_types` if given, else every other one of the first max_window_layers."""
    declared = fields.raw.get("layer_types")
    if declared is None:
        max_layers = fields.optional_int("max_window_layers")
        limit = 28 if max_layers is None else max_layers
        return [window if idx % 2 == 0 and idx < limit else None for idx in range(num_layers)]
    if not isinstance(declared, list) or len(declared) != num_layers:
        raise fields.error("layer_types", f"must list the {num_layers} layers")
    kinds = {"full_attention": None, "sliding_attention": window}
    for kind in declared:
        if not isinstance(kind, str) or kind not in kinds:
            raise fields.error("layer_types", f"supported: {', '.join(kinds)}")
        if kind == "sliding_attention" and window is None:
            raise fields.error("layer_types", "sliding_attention needs use_sliding_window")
    return [kinds[kind] for kind in declared]


def _biases(fields: ConfigFields, family: Family) -> _Biases:
    """Return which projections have a bias; only options that the family's code reads count."""
    if family.model_type == "mixtral":
        return _Biases(qkv=False, o=False, mlp=False)
    if family.model_type == "qwen2_moe":
        return _Biases(qkv=fields.flag("qkv_bias", default=True), o=False, mlp=False)
    attention_bias = fields.flag("attention_bias", default=False)
    mlp_bias = family.model_type == "llama" and fields.flag("mlp_bias", default=False)
    return _Biases(qkv=attention_bias, o=attention_bias, mlp=mlp_bias)


def _clip_qkv(fields: ConfigFields, family: Family) -> float | None:
    if family.model_type != "olmoe" or fields.raw.get("clip_qkv") is None:
        return None
    clip = fields.number("clip_qkv")
    if clip <= 0:
        raise fields.error("clip_qkv", "must be positive or null")
    return clip


def _dtype(fields: ConfigFields, path: Path) -> DtypeName:
    """Return the checkpoint's dtype; that of most of its numbers, if config.json names none."""
    option = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    value = fields.raw.get(option)
    if value is None:
        return _stored_dtype(path)
    dtype = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if dtype is None:
        raise fields.error(option, f"supported: {', '.join(_DTYPES)}")
    return dtype


def _stored_dtype(path: Path) -> DtypeName:
    """Return the dtype of most bytes of the tensors; float32, torch's default, if there is none."""
    sizes: Counter[DtypeName] = Counter()
    try:
        tensors = read_index(path).tensors
    except CheckpointError:
        return "float32"  # whoever reads the weights says what is wrong
    for entry in tensors.values():
        if entry.dtype in _STORED_DTYPES:
            sizes[_STORED_DTYPES[entry.dtype]] += entry.size_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")
