"""The quality benchmark's figures, and that it changes the products that it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quantization import PeerOps, compare, patched, perplexity
from kernels.dispatch import select_ops
from tests.checkpoints import make_checkpoint, oracle_model


def test_figures_of_distributions_that_can_be_counted() -> None:
    plain = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]]).log()
    coded = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.4, 0.6]]).log()
    tokens = torch.tensor([0, 1, 0])
    found = compare(plain, coded, tokens)
    kl = [0.0, 0.5 * torch.tensor(4 / 3).log().item(), 0.9 * 0.81093 + 0.1 * -1.79176]
    assert found["mean_kl"] == pytest.approx(sum(kl) / 3, rel=0.01)
    assert found["max_kl"] == pytest.approx(kl[2], rel=0.01)
    assert found["same_most_likely_token"] == pytest.approx(2 / 3, abs=1e-3)
    # Of the tokens after the first: probabilities 0.5 and 0.75.
    assert perplexity(coded, tokens) == pytest.approx((0.5 * 0.75) ** -0.5, rel=1e-4)


# Q4_0 knows only whole groups of 32.
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("mixtral", {"intermediate_size": 64}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 64}),
        ("llama_bias", {}),
    ],
)
@torch.inference_mode()
def test_every_mode_moves_the_logits_by_its_own_measure(
    tmp_path: Path, variant: str, sizes: dict[str, int]
) -> None:
    """More bits, nearer; four bits nearer than Q4_0; and the model is itself afterwards."""
    model = oracle_model(make_checkpoint(tmp_path, variant, **sizes))
    tokens = torch.arange(48)[None] % 200
    plain = model(tokens).logits
    names = [name for name, _ in model.named_modules()]
    moved = {}
    for mode in ("int8", "int4", "q4_0"):
        ops = PeerOps() if mode == "q4_0" else select_ops("cpu", torch.float32, mode)
        with patched(model, ops) as num_modules:
            moved[mode] = float((model(tokens).logits - plain).norm() / plain.norm())
        wanted = sum(name.endswith(("_proj", "lm_head", "mlp.experts")) for name in names)
        assert num_modules == wanted
    assert 0 < moved["int8"] < moved["int4"] / 3
    assert moved["int4"] < moved["q4_0"]
    assert moved["q4_0"] < 0.5
    assert torch.equal(model(tokens).logits, plain)
