"""models.rope equals transformers' rotary modules for every rope type."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.description.config import ModelConfig, load_model_config
from models.description.rope_config import RopeConfig
from models.rope import inverse_frequencies, is_length_dependent, pair_order, rope_seq_len
from tests.checkpoints import make_checkpoint, oracle_model

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
_YARN_FULL = {
    **_YARN,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
    "truncate": False,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 150000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5},
    "yarn": {**_YARN, "original_max_position_embeddings": 64},
    "yarn_all_options": _YARN_FULL,
    "yarn_attention_factor": {**_YARN_FULL, "attention_factor": 1.5},
    "yarn_no_factor": {**_YARN, "factor": None, "original_max_position_embeddings": 64},
    "llama3": _LLAMA3,
}


def _make(tmp_path: Path, rope: dict[str, Any]) -> ModelConfig:
    make_checkpoint(
        tmp_path, "llama", head_dim=64, max_position_embeddings=256, rope_parameters=dict(rope)
    )
    return load_model_config(tmp_path)


def _assert_equal(ours: Any, theirs: torch.Tensor) -> None:
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.float().numpy(), rtol=2.5e-7, atol=0)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_of_passes_of_any_length_equal_those_of_transformers(
    tmp_path: Path, name: str
) -> None:
    config = _make(tmp_path, ROPES[name])
    unused = oracle_model(tmp_path).model.rotary_emb
    ours = inverse_frequencies(config.rope, config.head_dim, seq_len=17)
    _assert_equal(ours.inv_freq, unused.inv_freq)
    assert ours.attention_scaling == pytest.approx(unused.attention_scaling, rel=1e-7)
    for seq_len in (1, 256, 257, 300, 4096):
        rotary = copy.deepcopy(unused)  # it remembers the longest pass
        rotary(torch.zeros(1, seq_len, 64), torch.arange(seq_len)[None])
        ours = inverse_frequencies(config.rope, config.head_dim, seq_len=seq_len)
        _assert_equal(ours.inv_freq, rotary.inv_freq)


def test_only_dynamic_depends_on_the_length(tmp_path: Path) -> None:
    for name, rope in ROPES.items():
        config = _make(tmp_path / name, rope)
        short = inverse_frequencies(config.rope, 64, seq_len=1).inv_freq
        long = inverse_frequencies(config.rope, 64, seq_len=1000).inv_freq
        assert is_length_dependent(config.rope) == (name == "dynamic")
        assert is_length_dependent(config.rope) == bool(np.any(short != long))


def test_each_token_is_rotated_as_in_a_request_alone() -> None:
    assert [rope_seq_len(position, prompt_len=3) for position in range(6)] == [3, 3, 3, 4, 5, 6]


def test_decoding_past_the_trained_length_follows_rope_seq_len(tmp_path: Path) -> None:
    """Transformers decodes token by token; each step's frequencies equal those of our rule."""
    make_checkpoint(tmp_path, "llama_dynamic_ntk")
    config = load_model_config(tmp_path)
    rotary = oracle_model(tmp_path).model.rotary_emb
    prompt_len = config.max_position_embeddings + 3
    rotary(torch.zeros(1), torch.arange(prompt_len)[None])
    for position in range(prompt_len, prompt_len + 4):
        rotary(torch.zeros(1), torch.tensor([[position]]))
        seq_len = rope_seq_len(position, prompt_len=prompt_len)
        ours = inverse_frequencies(config.rope, config.head_dim, seq_len=seq_len)
        _assert_equal(ours.inv_freq, rotary.inv_freq)


@pytest.mark.parametrize("rotary_dim", [None, 12, 4])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_pairs_in_memory_rotate_as_complex_numbers(
    rotary_dim: int | None, is_interleaved: bool
) -> None:
    """Pair i of a head is a complex number that is turned by position times frequency i."""
    head_dim, position = 20, 7
    rope = RopeConfig(
        rope_type="default",
        theta=100.0,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        rotary_dim=rotary_dim,
        is_interleaved=is_interleaved,
    )
    num_pairs = (rotary_dim or head_dim) // 2
    head = np.random.default_rng(1).normal(size=head_dim)
    turns = np.exp(1j * position * 100.0 ** -(np.arange(num_pairs) / num_pairs))
    rotated = head[: 2 * num_pairs]
    wanted = head.copy()
    first, second = np.s_[0 : 2 * num_pairs : 2], np.s_[1 : 2 * num_pairs : 2]
    if not is_interleaved:
        first, second = np.s_[:num_pairs], np.s_[num_pairs : 2 * num_pairs]
    turned = (rotated[first] + 1j * rotated[second]) * turns
    wanted[first], wanted[second] = turned.real, turned.imag

    order = pair_order(rope, head_dim)
    order = np.arange(head_dim) if order is None else order
    x, y = np.split(head[order], 2)
    angles = position * inverse_frequencies(rope, head_dim, seq_len=1).inv_freq
    found = np.concatenate(
        (x * np.cos(angles) - y * np.sin(angles), y * np.cos(angles) + x * np.sin(angles))
    )
    np.testing.assert_allclose(found, wanted[order], rtol=1e-5, atol=1e-6)
