"""Keys and values in fp8: the tokens of transformers with a cache that rounds them likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks.quality.transformers_names import CACHE
from tests.checkpoints import make_checkpoint, oracle_generate, oracle_model
from tests.engine import Engine, engine_config
from tests.identity.conftest import Case, crowded_config
from tests.structs import changed
from topspin.devices import KernelName
from topspin.plan.kv_cache import KvLayerRule
from topspin.plan.speculation import Speculation

PROMPTS = [[7, 3, 9, 200, 4], list(range(40, 110)), [5], [9, 8, 7, 6, 5, 4, 3, 2] * 3]
NUM_TOKENS = 24
slow = pytest.mark.slow
SUFFIXES = Speculation(method="suffix", adaptive=False, num_speculative_tokens=5)
TREES = Speculation(
    method="draft_model",
    model="self-int4",
    adaptive=False,
    branches=True,
    num_speculative_tokens=6,
    draft_width=3,
    draft_passes=3,
)


def in_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


class RoundingCache(DynamicCache):
    """Gives attention the keys and values in fp8, those of its own step too, in some layers."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__()
        self._in_fp8 = layers

    def update(self, key: Any, value: Any, layer_idx: int, *rest: Any, **more: Any) -> Any:
        if layer_idx in self._in_fp8:
            key, value = in_fp8(key), in_fp8(value)
        return super().update(key, value, layer_idx, *rest, **more)


Rounded = Callable[..., tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Rounded:
    """Return a cached function that gives a variant's checkpoint and its tokens in fp8."""

    @functools.cache
    def checkpoint(variant: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(variant), variant)

    @functools.cache
    def get(variant: str, *layers: int) -> tuple[Path, list[list[int]]]:
        return checkpoint(variant), expected(checkpoint(variant), layers or (0, 1))

    return get


def expected(path: Path, layers: tuple[int, ...]) -> list[list[int]]:
    """Return what transformers generates with rounded keys and values, which matters."""
    model = oracle_model(path)
    found = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            **{CACHE: RoundingCache(layers)},
        )
        found.append(out[0, len(prompt) :].tolist())
    assert found != oracle_generate(path, PROMPTS, NUM_TOKENS).tokens
    return found


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("qwen3_moe", {}),
        pytest.param(
            "qwen3_moe",
            {"deterministic": True, "transport": "shm", "attention_nodes": 2},
            marks=slow,
        ),
        pytest.param("mixtral_sliding_window", {"kv_cache_dtype": "fp8_e4m3"}, marks=slow),
        pytest.param("qwen3_moe", {"speculation": TREES}, marks=slow),
        pytest.param("mixtral", {"speculation": SUFFIXES}, marks=slow),
    ],
)
def test_tokens_are_those_of_transformers_with_rounded_keys(
    rounded: Rounded, variant: str, settings: dict[str, Any]
) -> None:
    path, wanted = rounded(variant)
    with Engine(engine_config(path, **{"kv_cache_dtype": "fp8", **settings})) as engine:
        assert engine.generate(PROMPTS, max_tokens=NUM_TOKENS) == wanted
        # Their prompts are in the cache now.
        assert engine.generate(PROMPTS, max_tokens=NUM_TOKENS) == wanted
        stats = engine.stats()
    assert stats.prefix_cache_hits > 0
    if "speculation" in settings:
        assert sum(stats.num_accepted_tokens) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_single_layers_are_kept_in_fp8(rounded: Rounded, kernels: KernelName) -> None:
    path, wanted = rounded("qwen3_moe", 0)
    assert wanted != rounded("qwen3_moe")[1]
    rule = KvLayerRule(layers=(0,), dtype="fp8")
    config = changed(engine_config(path, kernels=kernels), {"kv_cache.layers": (rule,)})
    with Engine(config) as engine:
        assert engine.generate(PROMPTS, max_tokens=NUM_TOKENS) == wanted


@pytest.mark.slow
def test_preempted_sequences_go_on(rounded: Rounded) -> None:
    path, wanted = rounded("qwen3_moe")
    case = Case(path, PROMPTS, wanted)
    config = crowded_config(case, most=NUM_TOKENS, kv_cache_dtype="fp8", prefix_caching=False)
    with Engine(config) as engine:
        assert engine.generate(PROMPTS, max_tokens=NUM_TOKENS) == wanted
        assert engine.stats().num_preemptions > 0
