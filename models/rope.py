"""Rotary frequencies for every rope type, equal to transformers'.

Owns the arithmetic from RopeConfig to inverse frequencies, and the rule for the sequence length
with which a position is rotated. Knows no tensors (numpy only) and no cache; attention nodes call
it and build cosines and sines from it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from models.description.rope_config import RopeConfig, yarn_scale

Float32Array = npt.NDArray[np.float32]


class RopeFrequencies(NamedTuple):
    """inv_freq: float32 [head_dim / 2], radians per position, 0 for pairs that are not rotated.
    attention_scaling, float32 [head_dim / 2], multiplies cosines and sines (YaRN's temperature; 1
    elsewhere)."""

    inv_freq: Float32Array
    attention_scaling: Float32Array


def is_length_dependent(rope: RopeConfig) -> bool:
    """Return whether inv_freq depends on the sequence length (dynamic NTK only)."""
    return rope.rope_type == "dynamic"


def rope_seq_len(position: int, *, prompt_len: int) -> int:
    """Return the sequence length that the token at `position` is rotated with.

    Dynamic NTK recomputes the frequencies for the longest position of a forward pass, and keys stay
    in the cache as they were rotated. In transformers a single request is one pass over the prompt,
    then one per token: so prompt tokens see the prompt's length and a generated token sees position
    + 1. The rule depends on nothing else, so it holds for any chunking of the prompt; a replay must
    pass the length of the *original* prompt.
    """
    return prompt_len if position < prompt_len else position + 1


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, seq_len: int) -> RopeFrequencies:
    """Return the rotary frequencies of the pairs of a head, whose numbers are in pair_order().

    `seq_len` (see rope_seq_len) has an effect only if is_length_dependent, and only beyond
    max_position_embeddings.
    """
    num_rotated = rope.rotary_dim or head_dim
    rotated, scaling = _rotated(rope, num_rotated, seq_len)
    rest = (0, (head_dim - num_rotated) // 2)
    scalings = np.full(num_rotated // 2, scaling, dtype=np.float32)
    return RopeFrequencies(np.pad(rotated, rest), np.pad(scalings, rest, constant_values=1.0))


def pair_order(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.int64] | None:
    """Return the order of a head's numbers in which those rotated together are head_dim / 2 apart.

    None: it is the checkpoint's. With it kernels need to know one kind of rotation only. A score
    is a sum over the numbers of a query and a key, in any order.
    """
    if rope.rotary_dim is None and not rope.is_interleaved:
        return None
    num_rotated = rope.rotary_dim or head_dim
    rotated, others = np.split(np.arange(head_dim), [num_rotated])
    halves = (rotated[::2], rotated[1::2]) if rope.is_interleaved else np.split(rotated, 2)
    first, second = halves
    rest = len(others) // 2
    return np.concatenate([first, others[:rest], second, others[rest:]])


def _rotated(rope: RopeConfig, head_dim: int, seq_len: int) -> tuple[Float32Array, float]:
    """Return the frequencies of a head that is rotated as a whole, and YaRN's temperature."""
    if rope.rope_type == "linear":
        return _plain(rope.theta, head_dim) / np.float32(rope.factor), 1.0
    if rope.rope_type == "dynamic":
        return _plain(_ntk_theta(rope, head_dim, seq_len), head_dim), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_scaling(rope)
    if rope.rope_type == "llama3":
        return _llama3(rope, head_dim), 1.0
    return _plain(rope.theta, head_dim), 1.0


def _wave_scales(theta: float, head_dim: int) -> Float32Array:
    """Return theta ** (2 i / head_dim), float32 [head_dim / 2].

    The exponent is rounded to float32, as in torch; the power is taken in float64 and rounded once,
    which agrees with torch's float32 power more often than numpy's does.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _plain(theta: float, head_dim: int) -> Float32Array:
    return np.float32(1.0) / _wave_scales(theta, head_dim)


def _ntk_theta(rope: RopeConfig, head_dim: int, seq_len: int) -> float:
    """Return the base of dynamic NTK scaling; its float32 steps are those of transformers.

    theta * (factor * n / n_max - (factor - 1)) ** (d / (d - 2)), n at least n_max.
    """
    longest = rope.max_position_embeddings
    if seq_len <= longest:
        return rope.theta
    stretch = np.float32(rope.factor * seq_len) / np.float32(longest)
    stretch = stretch - np.float32(rope.factor - 1)
    return float(np.float32(rope.theta) * stretch ** np.float32(head_dim / (head_dim - 2)))


def _yarn(rope: RopeConfig, head_dim: int) -> Float32Array:
    """Return YaRN's blend of interpolated and plain frequencies (arXiv 2309.00071, sec. 3.2)."""
    scales = _wave_scales(rope.theta, head_dim)
    plain = np.float32(1.0) / scales
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * scales)
    low = _rotations_to_dim(rope.beta_fast, rope, head_dim)
    high = _rotations_to_dim(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    idx = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((idx - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    keep = np.float32(1.0) - ramp
    inv_freq = interpolated * (np.float32(1.0) - keep) + plain * keep
    rounded: Float32Array = inv_freq.astype(np.float32)
    return rounded


def _rotations_to_dim(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """Return the (fractional) index of the frequency with `rotations` turns in training."""
    length = rope.original_max_position_embeddings
    return (head_dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))


def _yarn_attention_scaling(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim)
    return yarn_scale(rope.factor, 1.0)


def _llama3(rope: RopeConfig, head_dim: int) -> Float32Array:
    """Return Llama 3.1's frequencies: short waves kept, long ones divided, a ramp between."""
    plain = _plain(rope.theta, head_dim)
    length = rope.original_max_position_embeddings
    wavelength = np.float32(2 * math.pi) / plain
    is_long = wavelength > np.float32(length / rope.low_freq_factor)
    is_short = wavelength < np.float32(length / rope.high_freq_factor)
    factor = np.float32(rope.factor)
    span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    smooth = (np.float32(length) / wavelength - np.float32(rope.low_freq_factor)) / span
    blended = (np.float32(1.0) - smooth) * plain / factor + smooth * plain
    return np.where(is_long, plain / factor, np.where(is_short, plain, blended)).astype(np.float32)
