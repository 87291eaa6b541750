"""The cost of each part by itself, against transformers' logits of written checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.quantisation.grids import Rounding
from deploy.quantisation.sensitivity import find, parts_of
from deploy.quantisation.specification import parse_bits
from deploy.quantisation.writing import write_quantised
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from tests.deploy.quantisation.sources import divergence

LAYER = 1
SIZES = {
    "glm4_moe": {},
    "ernie4_5_moe": {"head_dim": 32},
    "deepseek_v3": {"v_head_dim": 16, "q_lora_rank": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_parts_divergence_is_that_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Heads are in another order in memory than in the checkpoint that is written."""
    source = make_checkpoint(tmp_path / "source", name, **SIZES[name])
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    rounding = Rounding(dtype=torch.float32)
    parts = [
        part for part, layers in parts_of(load_model_config(source)).items() if LAYER in layers
    ]
    assert "attention" in parts

    found = find(
        source,
        calibration=tokens,
        held_out=tokens,
        measured=[(LAYER, part) for part in parts],
        rounding=rounding,
        formats=("int4",),
    )

    for part in parts:
        coded = tmp_path / part
        coded.mkdir()
        write_quantised(source, coded, parse_bits(f"{part}[{LAYER}]=4"), rounding, tokens=tokens)
        expected = divergence(source, coded, tokens)
        assert found.measured[LAYER, part, "int4"].kl == pytest.approx(expected, rel=1e-3)
