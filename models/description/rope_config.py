"""The rotary embedding's options, from a config.json of either transformers style.

Owns RopeConfig and its validation. transformers 5 writes `rope_parameters` (with
rope_theta inside), transformers 4 `rope_theta` beside `rope_scaling`. Knows no
frequencies (models.rope computes them); models.description.config calls it. Imports no torch.
"""

from __future__ import annotations

import math
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
    elsewhere). rotary_dim: how many numbers of a head are rotated, the first ones; None: all.
    is_interleaved: neighbours are rotated together, otherwise numbers half of them apart.
    attention_factor None: yarn derives it from factor, or from mscale and
    mscale_all_dim where both are set. truncate: yarn rounds its correction range outwards.
    low_freq_factor, high_freq_factor: llama3.
    """

    rope_type: RopeType
    theta: float
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int
    rotary_dim: int | None = None
    is_interleaved: bool = False
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    truncate: bool = True


def yarn_scale(factor: float, weight: float) -> float:
    """Return YaRN's temperature of a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def latent_temperature(rope: RopeConfig) -> float:
    """Return by what scores of latents are multiplied: the square of mscale_all_dim's temperature.

    As in DeepSeek-V3's published code, for all rope types that stretch a context.
    """
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    return yarn_scale(rope.factor, rope.mscale_all_dim) ** 2


def parse_rope(
    fields: ConfigFields,
    *,
    default_theta: float,
    max_position_embeddings: int,
    head_dim: int,
    rotary_factor: float | None = None,
    is_interleaved: bool = False,
) -> RopeConfig:
    """Return the rotary options of config.json.

    `rotary_factor` is the family's share of a head that is rotated, if others than all are
    possible; `is_interleaved` as in RopeConfig. As in transformers 5, a non-empty `rope_scaling`
    wins over `rope_parameters`, and rope_theta inside either wins over rope_theta beside it;
    without both the family's default counts. Raises ConfigError for rope types and options that
    are not supported.
    """
    option = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    raw = fields.raw.get(option)
    raw = fields.default(option) if raw is None else raw or {}
    if not isinstance(raw, dict):
        raise fields.error(option, "must be an object or null")
    rope = ConfigFields(raw, source=f"{fields.source}: {option}")
    _refuse_unknown(rope)
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
        rotary_dim=_rotary_dim(rope, fields, head_dim=head_dim, factor=rotary_factor),
        is_interleaved=is_interleaved,
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


def _refuse_unknown(rope: ConfigFields) -> None:
    unknown = sorted(set(rope.raw) - _KNOWN_OPTIONS)
    if unknown:
        raise rope.error(unknown[0], f"supported: {', '.join(sorted(_KNOWN_OPTIONS))}")


def _rotary_dim(
    rope: ConfigFields, fields: ConfigFields, *, head_dim: int, factor: float | None
) -> int | None:
    """Return how many numbers of a head are rotated; None: all of them."""
    option = "partial_rotary_factor"
    if factor is None:
        for source in (rope, fields):
            if source.optional_number(option) not in (None, 1.0):
                raise source.error(option, "supported: 1.0")
        return None
    num_rotated = int(head_dim * rope.number(option, default=factor))
    if not 0 < num_rotated <= head_dim or num_rotated % 2:
        raise rope.error(option, f"must rotate an even number of a head's {head_dim}")
    return None if num_rotated == head_dim else num_rotated


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
