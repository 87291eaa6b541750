"""The rotary embedding's options, from a config.json of either transformers style.

Owns RopeConfig and its validation. transformers 5 writes `rope_parameters` (with
rope_theta inside), transformers 4 `rope_theta` beside `rope_scaling`. Knows no
frequencies (models.rope computes them); models.description.config calls it. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.description.config_fields import ConfigFields
from topspin.errors import ConfigError

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3")

# Options of any rope type; like transformers, Topspin ignores those of other types.
_KNOWN_OPTIONS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "low_freq_factor",
        "high_freq_factor",
        "truncate",
        "partial_rotary_factor",
        # Written by authors of early YaRN checkpoints; no implementation reads it.
        "finetuned",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """One rotary embedding. Each rope type reads some fields; the others keep their defaults.

    factor: linear, dynamic, yarn, llama3. max_position_embeddings: dynamic.
    original_max_position_embeddings: yarn, llama3 (equal to max_position_embeddings
    elsewhere). attention_factor None: yarn derives it from factor, or from mscale and
    mscale_all_dim where both are set. truncate: yarn rounds its correction range outwards.
    low_freq_factor, high_freq_factor: llama3.
    """

    rope_type: RopeType
    theta: float
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True


def parse_rope(
    fields: ConfigFields, *, default_theta: float, max_position_embeddings: int
) -> RopeConfig:
    """Return the rotary options of config.json.

    As in transformers 5, a non-empty `rope_scaling` wins over `rope_parameters`, and
    rope_theta inside either wins over rope_theta beside it. Raises ConfigError for rope
    types and options that are not supported.
    """
    option = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    raw = fields.raw.get(option) or {}
    if not isinstance(raw, dict):
        raise fields.error(option, "must be an object or null")
    rope = ConfigFields(raw, source=f"{fields.source}: {option}")
    _refuse_unsupported(rope, fields)
    rope_type = _rope_type(rope)
    theta = fields.number("rope_theta", default=default_theta)
    theta = rope.number("rope_theta", default=theta)
    if theta <= 1:
        raise ConfigError(f"{fields.source}: rope_theta = {theta}: must be above 1")
    original = max_position_embeddings
    if rope_type in ("yarn", "llama3"):
        original = rope.positive_int(
            "original_max_position_embeddings", default=max_position_embeddings
        )
        original = fields.positive_int("original_max_position_embeddings", default=original)
    config = RopeConfig(
        rope_type=rope_type,
        theta=theta,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=original,
        factor=_factor(rope, rope_type, ratio=max_position_embeddings / original),
        attention_factor=rope.optional_number("attention_factor"),
        # transformers takes the default for 0 as well as for null.
        beta_fast=rope.number("beta_fast", default=32.0) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0) or 1.0,
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        low_freq_factor=rope.number("low_freq_factor", default=1.0),
        high_freq_factor=rope.number("high_freq_factor", default=4.0),
        truncate=rope.flag("truncate", default=True),
    )
    if rope_type == "llama3":
        _check_llama3(rope, config)
    return config


def _rope_type(rope: ConfigFields) -> RopeType:
    option = "rope_type" if rope.raw.get("rope_type") is not None else "type"
    value = rope.raw.get(option, "default")
    if value not in ROPE_TYPES:
        raise rope.error(option, f"supported: {', '.join(ROPE_TYPES)}")
    return value


def _refuse_unsupported(rope: ConfigFields, fields: ConfigFields) -> None:
    unknown = sorted(set(rope.raw) - _KNOWN_OPTIONS)
    if unknown:
        raise rope.error(unknown[0], f"supported: {', '.join(sorted(_KNOWN_OPTIONS))}")
    for source in (rope, fields):
        if source.optional_number("partial_rotary_factor") not in (None, 1.0):
            raise source.error("partial_rotary_factor", "supported: 1.0")


def _factor(rope: ConfigFields, rope_type: RopeType, *, ratio: float) -> float:
    """Return the scaling factor; a yarn `factor: null` means the ratio of the two lengths."""
    if rope_type == "default":
        return 1.0
    if rope_type == "yarn" and "factor" in rope.raw and rope.raw["factor"] is None:
        return ratio
    factor = rope.number("factor")
    if factor <= 0:
        raise rope.error("factor", "must be positive")
    return factor


def _check_llama3(rope: ConfigFields, config: RopeConfig) -> None:
    for option in ("low_freq_factor", "high_freq_factor"):
        if rope.number(option) <= 0:
            raise rope.error(option, "must be positive")
    if config.high_freq_factor <= config.low_freq_factor:
        raise rope.error(
            "high_freq_factor", f"must be above low_freq_factor = {config.low_freq_factor}"
        )
