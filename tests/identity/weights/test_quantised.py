"""Engines with quantised weights give transformers' tokens for the same matrices.

The oracle is transformers' fp32 model with the products of the quantised kernels
(quantization.patched). Everything else is fp32 on both sides, but a number between two
codes may be rounded either way, so only tokens with a clear margin count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.quality.quantization import mode_ops, patched
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_model
from tests.engine import Engine, engine_config
from topspin.plan.precision import Format, rules_of

NUM_TOKENS = 8
# In logits, whose standard deviation is about 3; rounding differences are below 0.05.
CLEAR_MARGIN = 0.3
PROMPT_LENS = (5, 41, 17, 1, 30, 8)


def clear_tokens(model: Any, prompt: list[int], margin: float = CLEAR_MARGIN) -> list[int]:
    """Continue a prompt greedily, up to the first token without a clear margin."""
    tokens: list[int] = []
    while len(tokens) < NUM_TOKENS:
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        if best - second < margin:
            break
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize(
    ("variant", "mode", "transport", "topology"),
    [
        ("qwen3_moe", "int4", "local", (1, 1)),
        pytest.param("qwen2_moe", "int8", "shm", (1, 2), marks=pytest.mark.slow),
        # Tied to the embeddings, which keep their precision, and not.
        pytest.param(
            "mixtral_sliding_window", "int4-head", "local", (1, 1), marks=pytest.mark.slow
        ),
        pytest.param("llama_bias", "int4", "local", (1, 1), marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens(
    tmp_path: Path,
    variant: str,
    mode: str,
    transport: Literal["local", "shm", "tcp"],
    topology: tuple[int, int],
) -> None:
    path = make_checkpoint(tmp_path, variant)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in PROMPT_LENS]
    model = oracle_model(path)
    ops, rules = mode_ops(mode)
    with torch.inference_mode(), patched(model, ops, rules):
        wanted = [clear_tokens(model, prompt) for prompt in prompts]
    assert sum(map(len, wanted)) > 2 * NUM_TOKENS
    config = engine_config(
        path, attention_nodes=topology[0], expert_nodes=topology[1], transport=transport
    )
    with Engine(msgspec.structs.replace(config, precision=rules)) as engine:
        found = engine.generate(prompts, max_tokens=NUM_TOKENS)
    assert [tokens[: len(want)] for tokens, want in zip(found, wanted, strict=True)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "mode"), [("qwen2_moe", "int4"), ("qwen3_moe", "int8")])
def test_greedy_tokens_on_a_device(tmp_path: Path, variant: str, mode: Format) -> None:
    """Interpreted kernels do not quantise rows, so products equal torch's except for the order."""
    path = make_checkpoint(tmp_path, variant)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in (5, 9, 1)]
    model = oracle_model(path)
    with torch.inference_mode(), patched(model, *mode_ops(f"gpu-{mode}")):
        wanted = [clear_tokens(model, prompt, 0.01)[:4] for prompt in prompts]
    assert sum(map(len, wanted)) > 8
    config = engine_config(path, kernels="triton", max_num_seqs=4)
    with Engine(msgspec.structs.replace(config, precision=rules_of(mode))) as engine:
        found = engine.generate(prompts, max_tokens=4)
    assert [tokens[: len(want)] for tokens, want in zip(found, wanted, strict=True)] == wanted
