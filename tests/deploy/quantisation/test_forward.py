"""The layer-by-layer forward pass against transformers, for every family and option."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.quantisation.forward import (
    LayerInputs,
    embedded,
    last_hidden,
    layer_output,
    log_probabilities,
)
from deploy.quantisation.layers import matrices, open_model
from tests.checkpoints import VARIANTS, make_checkpoint, oracle_model

BY_DEFAULT = ("llama_bias", "qwen2_moe", "deepseek_v2_lite")


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


@torch.inference_mode()
def test_inputs_are_those_of_transformers_modules(tmp_path: Path) -> None:
    """Of all but stacked experts: of latents' projections, dense MLPs and shared experts."""
    path = make_checkpoint(tmp_path, "deepseek_v3")
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    oracle, seen = oracle_model(path), {}
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.update({name: inputs[0].flatten(0, -2)})
            )
    oracle(tokens)

    model, compared = open_model(path), set()
    hidden = embedded(model, tokens)
    for layer in model.layers:
        inputs = LayerInputs()
        hidden = layer_output(layer, model.config, hidden, inputs)
        for matrix in matrices(layer, model.config):
            for name in {each.name for each in matrix.modules} & seen.keys():
                expected = seen[name].T @ seen[name]
                torch.testing.assert_close(
                    inputs.hessian(matrix.source), expected, atol=1e-2, rtol=1e-4
                )
                compared.add(name)

    assert seen.keys() - compared == {"lm_head"} | {
        f"model.layers.{idx}.self_attn.kv_b_proj" for idx in range(3)
    }
