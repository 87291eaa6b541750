"""Every form of every family: reading gives the library's numbers, and transformers' logits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from models.checkpoint import Checkpoint
from models.config import load_model_config
from models.expert_reader import ExpertReader
from models.unused_tensors import unused_tensors
from models.weights import load_attention_weights, load_expert_weights
from tests.checkpoints import oracle_model
from tests.models.plain_model import plain_logits
from tests.models.quantised.forms import FAMILIES, FORMS, make_quantised

FAST = (
    ("qwen3_moe", "ct-int4-zeros"),
    ("mixtral", "awq"),
    ("llama_bias", "gptq-8-v2"),
    ("qwen2_moe", "fp8-blocks"),
)
MATRIX = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(FAMILIES, FORMS)
]


@pytest.mark.parametrize(("family", "form"), MATRIX)
def test_the_numbers_are_the_librarys(tmp_path: Path, family: str, form: str) -> None:
    make_quantised(tmp_path, family, FORMS[form])
    config = load_model_config(tmp_path / "coded")
    moe = config.moe
    every = [range(0 if moe is None else moe.num_experts)] * len(config.moe_layers)
    found = []
    for name in ("plain", "coded"):
        checkpoint = Checkpoint(tmp_path / name)
        own = load_model_config(tmp_path / name)
        attention = load_attention_weights(checkpoint, own, dtype=torch.float32)
        assert not unused_tensors(checkpoint.names, own, read=checkpoint.tensors_read)
        experts = load_expert_weights(checkpoint, own, dtype=torch.float32, experts=every)
        assert not unused_tensors(checkpoint.names, own, read=checkpoint.tensors_read)
        found.append((attention, experts))
    (plain, plain_experts), (coded, coded_experts) = found
    for ours, wanted in zip(coded.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.qkv, wanted.qkv, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.o, wanted.o, rtol=1e-6, atol=1e-7)
    for own, want in zip(coded_experts.layers, plain_experts.layers, strict=True):
        torch.testing.assert_close(own.gate_up, want.gate_up, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(own.down, want.down, rtol=1e-6, atol=1e-7)
    tokens = [(7 * idx * idx + 3) % 250 for idx in range(24)]
    with torch.no_grad():
        ours = plain_logits(config, coded, coded_experts, tokens)
        theirs = oracle_model(tmp_path / "plain")(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)
    if moe is None:
        return
    reader = ExpertReader(Checkpoint(tmp_path / "coded"), config, dtype=torch.float32)
    work = reader.read(0, 3)
    while True:
        try:
            next(work)
        except StopIteration as stop:
            alone = stop.value
            break
    assert torch.equal(alone.gate_up, coded_experts.layers[0].gate_up[3])
    assert torch.equal(alone.down, coded_experts.layers[0].down[3])
