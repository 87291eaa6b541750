"""The cost of rounding to bf16 for each family, beside what it costs transformers.

The measure is the mean KL divergence of the next token's distribution from transformers' in fp32,
over the positions of random texts; the model computes whole, as draft models do. Run with `-rA` to
see the figures.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draft_nodes.model import DraftModel, Settings
from spec_decode.forest import PassRows
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_model

# One of each family, but where parts differ.
FAMILIES = (
    "llama",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "ernie4_5_moe",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "glm4_moe_lite",
)
LENGTH, NUM_TEXTS = 100, 6


def texts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB_SIZE, size=LENGTH).tolist() for _ in range(NUM_TEXTS)]


def of_topspin(path: Path) -> Tensor:
    """Return log-probabilities f32[texts * LENGTH, V] in bf16."""
    model = DraftModel.load(path, Settings(dtype=torch.bfloat16, num_slots=LENGTH + 16))
    found = []
    for seq_id, tokens in enumerate(texts()):
        model.open(seq_id, num_prompt=LENGTH)
        assert model.reserve(seq_id, LENGTH)
        rows = PassRows(seq_id, tuple(tokens), tuple(range(-1, LENGTH - 1)), LENGTH)
        found.append(model.log_probs([rows]).clone())
        model.drop(seq_id)
    return torch.cat(found)


def of_transformers(path: Path, dtype: torch.dtype) -> Tensor:
    model = oracle_model(path).to(dtype)
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor(texts())).logits
    return logits.float().log_softmax(-1).flatten(0, 1)


def mean_kl(true: Tensor, found: Tensor) -> float:
    return float((true.exp() * (true - found)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("variant", FAMILIES)
def test_bf16_is_as_near_to_fp32_as_in_transformers(tmp_path: Path, variant: str) -> None:
    path = make_checkpoint(tmp_path, variant)
    true = of_transformers(path, torch.float32)
    own = mean_kl(true, of_topspin(path))
    theirs = mean_kl(true, of_transformers(path, torch.bfloat16))
    print(f"{variant}: mean KL {own:.2e} nats, transformers' {theirs:.2e}: {own / theirs:.2f}x")
    assert own < 1.3 * theirs
