"""A checkpoint whose heads have sinks, and transformers' model of it with gpt-oss' attention.

Mixtral's, since its layers have windows too; no other family's code is needed for sinks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral

from models.description.config_fields import ConfigFields
from models.families import FAMILIES, mixtral
from models.families.family import FamilyParts
from tests.checkpoints import make_checkpoint


def make_with_sinks(path: Path, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> Path:
    """Write the checkpoint to `path`, and let the family, and transformers', have sinks."""
    make_checkpoint(path, "mixtral_sliding_window", **overrides)
    tensors = load_file(path / "model.safetensors")
    found = 2 * torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    tensors |= {f"model.layers.{idx}.self_attn.sinks": own for idx, own in enumerate(found)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    def parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
        return replace(mixtral.FAMILY.parts(fields, num_layers), has_sinks=True)

    def attend(module: Any, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        module.sinks = found[module.layer_idx]
        result: tuple[Tensor, Tensor] = modeling_gpt_oss.eager_attention_forward(
            module, *tensors, **options
        )
        return result

    monkeypatch.setitem(FAMILIES, "mixtral", replace(mixtral.FAMILY, parts=parts))
    monkeypatch.setattr(modeling_mixtral, "eager_attention_forward", attend)
    return path
