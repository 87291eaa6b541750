"""The layer-by-layer forward pass against transformers, for every family and option."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.quantisation.forward import last_hidden, log_probabilities
from deploy.quantisation.layers import open_model
from tests.checkpoints import VARIANTS, make_checkpoint, oracle_model

BY_DEFAULT = (
    "llama_bias",
    "mixtral_sliding_window",
    "qwen2_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v2_lite",
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow)
        for name in VARIANTS
    ],
)
@torch.inference_mode()
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path / name, name)
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))

    model = open_model(path)
    found = log_probabilities(model, last_hidden(model, tokens))

    expected = oracle_model(path)(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
