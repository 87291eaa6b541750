"""The quality benchmark's figures, and that it changes the stated products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality.quantization import (
    GPU_MODES,
    Fp8Cache,
    compare,
    gpu_ops,
    mode_ops,
    patched,
    perplexity,
)
from benchmarks.quality.transformers_names import CACHE
from kernels.dispatch import select_ops
from tests.checkpoints import make_checkpoint, oracle_model
from tests.pairwise import few
from topspin.plan.precision import Format


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


# Q4_0 has only whole groups of 32.
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        pytest.param("qwen2_moe", {"shared_expert_intermediate_size": 64}, marks=pytest.mark.slow),
        ("llama_bias", {}),
        pytest.param("gpt_oss", {"head_dim": 32}, marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v2_lite", {"v_head_dim": 16, "kv_lora_rank": 40}, marks=pytest.mark.slow
        ),
    ],
)
@torch.inference_mode()
def test_every_mode_moves_the_logits_by_its_own_measure(
    tmp_path: Path, variant: str, sizes: dict[str, int]
) -> None:
    """More bits are closer; four bits are closer than Q4_0; the model is restored afterwards."""
    model = oracle_model(make_checkpoint(tmp_path, variant, **sizes))
    tokens = torch.arange(48)[None] % 200
    plain = model(tokens).logits
    names = [name for name, _ in model.named_modules()]
    moved = {}
    for mode in ("int8", "int4", "mxfp4", "int4-head", *GPU_MODES, "q4_0"):
        with patched(model, *mode_ops(mode)) as num_modules:
            moved[mode] = float((model(tokens).logits - plain).norm() / plain.norm())
        ends = ("_proj", "with_mqa", "lm_head", "mlp.experts")
        wanted = sum(name.endswith(ends) and not name.endswith("kv_b_proj") for name in names)
        assert num_modules == wanted
    assert 0 < moved["int8"] < moved["int4"] / 3
    assert moved["int4"] < moved["int4-head"]
    assert moved["int4"] < moved["q4_0"]
    assert moved["int4"] < moved["mxfp4"] < 1
    assert 0 < moved["gpu-int8"] < moved["gpu-fp8"] < moved["gpu-int4"] < 0.5
    assert moved["q4_0"] < 0.5
    assert torch.equal(model(tokens).logits, plain)


@pytest.mark.parametrize("quantization", few(["fp8", "int8", "int4"], "int4"))
@torch.inference_mode()
def test_a_gpus_products_are_those_of_its_kernels(quantization: Format) -> None:
    """For whole groups and partial ones, of matrices and of the rows that fp8 experts round."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator().manual_seed(4)
    shapes = (3, 136), (40,), (40, 136), (2, 80, 136), (2, 136, 40)
    made = [torch.randn(shape, generator=rng).to(device) for shape in shapes]
    hidden, bias, projection, gate_up, down = made
    slots = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32, device=device)
    weights = torch.rand(3, 2, generator=rng).to(device)
    found = []
    kernels = select_ops("triton", torch.float32, [quantization], device)
    for ops in gpu_ops(quantization), kernels:
        experts = ops.pack_experts(list(gate_up), list(down), formats=[quantization] * 2)
        found.append(
            (
                ops.linear(hidden, ops.pack_linear(projection, quantization), bias),
                ops.linear(hidden, ops.pack_linear(projection, "int8")),
                ops.grouped_mlp(hidden, slots, weights, experts)[0],
            )
        )
    for ours, theirs in zip(*found, strict=True):
        # A unit near the middle of two fp8 codes may be rounded either way.
        assert (ours - theirs).norm() < 2e-3 * theirs.norm()


@torch.inference_mode()
def test_keys_and_values_in_fp8_are_attended_to(tmp_path: Path) -> None:
    model = oracle_model(make_checkpoint(tmp_path, "mixtral"))
    tokens, cache = torch.arange(48)[None] % 200, Fp8Cache()
    plain = model(tokens).logits
    moved = model(tokens, **{CACHE: cache}).logits
    layers: Any = cache.layers
    for layer in layers:
        for kept in (layer.keys, layer.values):
            assert torch.equal(kept.to(torch.float8_e4m3fn).float(), kept)
    assert 0 < (moved - plain).norm() < 0.2 * plain.norm()
