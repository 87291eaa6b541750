"""ModelConfig: a checkpoint's config.json, read and checked for serving.

Owns reading config.json (written by transformers 4 or 5) and refusing, with ConfigError, every
option that Topspin would not compute exactly as transformers does. Knows no tensors (and imports
no torch) and no server option; every role, the server and the planner call load_model_config.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from models.checkpoints.checkpoint_index import read_index
from models.description.config_fields import ConfigFields, read_json
from models.description.overrides import overridden
from models.description.parts import LatentConfig, LayerConfig, MoeConfig, QkNorm
from models.description.rope_config import RopeConfig, latent_temperature, parse_rope
from models.families import FAMILIES, UNSERVED
from models.families.family import Family
from models.quantised.config import read_quantisation
from models.quantised.scheme import Quantisation
from topspin.errors import CheckpointError, ConfigError

DtypeName = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[str, DtypeName] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
_STORED_DTYPES: dict[str, DtypeName] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


MAX_LAYERS: Final = 4096
"""Far above all models: a description has an object for each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything about a model that is not a weight.

    dtype is the checkpoint's (the server may run another). qk_norm: "head" normalises each head
    after the projection, "full" the whole projection. clip_qkv clamps q, k and v to [-clip, clip]
    after qk_norm and before RoPE. has_sinks: each query head has a learnt score that takes part in
    the softmax of every token, without a value. value_dim: the size of a value's head in the
    checkpoint, below head_dim; None: head_dim, as in memory always. latent: how keys and values are
    made of latents; there is then one key/value head, a token's latent and shared key, which are
    its value too, and head_dim is their size. intermediate_size is the width of a dense MLP layer.
    eos_token_ids end a generation, in no special order. quantisation: how the checkpoint stores its
    projections; None: as numbers. num_mtp_layers: layers behind the others, for multi-token
    prediction, which only of_mtp() has. notes: sentences for the log about what the checkpoint says
    and is not followed.
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
    has_sinks: bool = False
    value_dim: int | None = None
    latent: LatentConfig | None = None
    num_mtp_layers: int = 0
    quantisation: Quantisation | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def of_mtp(self) -> ModelConfig:
        """Return the model with its head of multi-token prediction as the last layer.

        Raises ConfigError if it has none, or several.
        """
        if self.num_mtp_layers != 1:
            raise ConfigError(
                f"the model has {self.num_mtp_layers} layers of multi-token prediction "
                "(num_nextn_predict_layers); drafts are made by one"
            )
        head = LayerConfig(sliding_window=None, is_moe=self.moe is not None)
        return replace(self, layers=(*self.layers, head), num_mtp_layers=0)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding windows of the layers."""
        return tuple(layer.sliding_window for layer in self.layers)

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
    def rotated_dim(self) -> int:
        """Numbers of a head that the rotary embedding is about, of which it may rotate a part."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attention_scale(self) -> float:
        """Factor of scores."""
        if self.latent is None:
            return 1 / math.sqrt(self.head_dim)
        return latent_temperature(self.rope) / math.sqrt(self.latent.head_dim)

    @property
    def cached_size(self) -> int:
        """Numbers of a token and layer in the cache, keys and values."""
        return self.kv_size if self.latent is not None else 2 * self.kv_size

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
    max_positions = fields.positive_int("max_position_embeddings")
    parts = family.parts(fields, fields.positive_int("num_hidden_layers", most=MAX_LAYERS))
    latent = parts.latent
    if latent is None:
        num_kv_heads = _num_kv_heads(fields, num_heads=num_heads)
        head_dim = _head_dim(fields, hidden_size=hidden_size, num_heads=num_heads)
    else:
        num_kv_heads, head_dim = 1, latent.cached_dim
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
        qkv_bias=parts.qkv_bias,
        o_bias=parts.o_bias,
        mlp_bias=parts.mlp_bias,
        qk_norm=parts.qk_norm,
        clip_qkv=parts.clip_qkv,
        rope=parse_rope(
            fields,
            default_theta=_number(family, "rope_theta"),
            max_position_embeddings=max_positions,
            head_dim=head_dim if latent is None else latent.rope_dim,
            rotary_factor=parts.rotary_factor,
            is_interleaved=parts.rope_is_interleaved,
        ),
        layers=parts.layers,
        intermediate_size=fields.positive_int("intermediate_size"),
        moe=parts.moe if any(layer.is_moe for layer in parts.layers) else None,
        eos_token_ids=ending_token_ids(path, fields, vocab_size=vocab_size, notes=notes),
        has_sinks=parts.has_sinks,
        value_dim=_value_dim(fields, parts.value_dim, head_dim=head_dim),
        latent=latent,
        num_mtp_layers=parts.num_mtp_layers,
        bos_token_id=fields.optional_int("bos_token_id"),
        quantisation=read_quantisation(path, fields, notes),
        notes=tuple(notes),
    )


def _family(fields: ConfigFields) -> Family:
    model_type = fields.raw.get("model_type")
    name = model_type if isinstance(model_type, str) else ""
    family = FAMILIES.get(name)
    if family is None:
        reason = f"{UNSERVED[name]}; " if name in UNSERVED else ""
        raise fields.error("model_type", f"{reason}supported: {', '.join(sorted(FAMILIES))}")
    architectures = fields.raw.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise fields.error("architectures", f"supported: [{family.architecture!r}]")
    return family


def _defaults(family: Family, raw: Mapping[str, object]) -> Mapping[str, object]:
    """Return the family's defaults; a count of experts has three names."""
    if not raw.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}:
        return family.defaults
    return {name: value for name, value in family.defaults.items() if name != "num_experts"}


def _number(family: Family, option: str) -> float:
    """Return the family's default of an option that may be null."""
    value = family.defaults[option]
    assert isinstance(value, float)
    return value


def _ignored(fields: ConfigFields, family: Family) -> list[str]:
    """Return a sentence for each option that is not followed, as transformers does not."""
    options = {"dual_chunk_attention_config": "attention is full and exact", **family.ignored}
    return [
        f"{fields.error(option, reason)}; the option is ignored"
        for option, reason in options.items()
        if fields.raw.get(option) is not None
    ]


def _refuse_unsupported(fields: ConfigFields) -> None:
    """Raise ConfigError for options that change the computation in an unsupported way."""
    if fields.raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", "supported: silu")
    if fields.raw.get("index_topk") is not None:
        raise fields.error("index_topk", "an indexer of positions is not served")
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


def _value_dim(fields: ConfigFields, value_dim: int | None, *, head_dim: int) -> int | None:
    """Return the size of a value's head; None: it is that of a key's."""
    if value_dim is not None and not 0 < value_dim <= head_dim:
        raise fields.error("v_head_dim", f"must be positive, and at most head_dim = {head_dim}")
    return None if value_dim == head_dim else value_dim


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
