"""Greedy output in fp32 equals transformers' token for token, for every family.

The engine is whole (scheduler, control channel, transports), its processes are threads; see
tests/engine.py. Layouts and other features are in test_matrix.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_nodes import latent
from tests.checkpoints import VARIANTS, make_checkpoint, oracle_generate
from tests.engine import Engine, engine_config
from tests.identity.conftest import MIN_MARGIN, NUM_TOKENS, CaseOf, crowded_config
from tests.pairwise import few


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family(case_of: CaseOf, variant: str) -> None:
    case = case_of(variant)
    with Engine(engine_config(case.path, micro_batches=2)) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "kv_cache_dtype"),
    [("deepseek_v2_lite", "auto"), ("deepseek_v3_halves", "fp8"), ("glm4_moe_lite", "auto")],
)
def test_long_prompts_make_keys_and_values_of_latents(
    case_of: CaseOf, monkeypatch: pytest.MonkeyPatch, variant: str, kv_cache_dtype: str
) -> None:
    """In pieces, beside short prompts and others' decoding; prompts of 7 tokens are long here."""
    case, made = case_of(variant), []
    config = engine_config(
        case.path,
        micro_batches=2,
        max_num_batched_tokens=24,
        kv_cache_dtype=kv_cache_dtype,
        recordings=False,  # steps with prompts that are long by themselves are never recorded
    )
    with Engine(config) as engine:
        expected = engine.clear_tokens(case.prompts, max_tokens=NUM_TOKENS, margin=MIN_MARGIN)
    monkeypatch.setattr("kernels.long_prompts.MIN_LONG_ROWS", 7)
    expand = latent._expanded

    def counted(*arguments: Any, **settings: Any) -> None:
        made.append(len(arguments[2]))
        expand(*arguments, **settings)

    monkeypatch.setattr(latent, "_expanded", counted)
    with Engine(config) as engine:
        found = engine.generate(case.prompts, max_tokens=NUM_TOKENS)
    assert min(made) >= 7
    if kv_cache_dtype == "auto":
        assert found == case.tokens
    for tokens, want in zip(found, expected, strict=True):
        assert tokens[: len(want)] == want


@pytest.mark.slow
def test_heads_have_their_sinks_with_deterministic_kernels(case_of: CaseOf) -> None:
    case = case_of("gpt_oss")
    with Engine(engine_config(case.path, deterministic=True)) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.parametrize("settings", [{}, {"attention_nodes": 2}, {"expert_nodes": 3}])
def test_layouts_over_nixl(case_of: CaseOf, settings: dict[str, Any]) -> None:
    case = case_of("qwen3_moe")
    with Engine(engine_config(case.path, transport="nixl", micro_batches=2, **settings)) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens


@pytest.mark.parametrize(
    ("variant", "spare", "limits"),
    # Behind windows a sequence holds less than all its tokens, if steps are short.
    [
        ("mixtral", 8, {}),
        pytest.param(
            "gpt_oss",
            -20,
            {"max_num_batched_tokens": 16, "max_num_seqs": 16},
            marks=pytest.mark.slow,
        ),
        pytest.param("deepseek_v3", 8, {}, marks=pytest.mark.slow),
    ],
)
def test_preemption_does_not_change_tokens(
    case_of: CaseOf, variant: str, spare: int, limits: dict[str, Any]
) -> None:
    case = case_of(variant)
    layout = {"attention_nodes": 2, "expert_nodes": 2, "micro_batches": 3}
    with Engine(crowded_config(case, spare=spare, **layout, **limits)) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "variant", few(["olmoe", "gpt_oss", "mixtral_sliding_window", "deepseek_v2"], "olmoe")
)
def test_prefix_cache_hits_do_not_change_tokens(case_of: CaseOf, variant: str) -> None:
    case = case_of(variant)
    config = engine_config(case.path, attention_nodes=2, expert_nodes=2, transport="tcp")
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        cold = engine.stats()
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        assert engine.stats().prefix_cache_hits > cold.prefix_cache_hits
        prompt, tokens = max(zip(case.prompts, case.tokens, strict=True), key=lambda p: len(p[0]))

        def num_cached(salt: str = "") -> int:
            asked = engine.requests[engine.add(prompt, max_tokens=NUM_TOKENS, cache_salt=salt)]
            engine.collect()
            assert asked.tokens == tokens
            return asked.num_cached_tokens

        # The first may go to a node that has not cached it; then all have.
        assert max(num_cached(), num_cached()) >= len(prompt) - 5
        # Another tenant has no cached prefix.
        assert num_cached("other") == 0


def test_dynamic_ntk_shares_no_prefix(tmp_path: Path) -> None:
    """Beyond its trained length such a model rotates a prompt's keys by the prompt's own length."""
    path = make_checkpoint(tmp_path, "llama_dynamic_ntk", max_position_embeddings=32)
    rng = np.random.default_rng(2)
    prefix = rng.integers(0, 250, size=40).tolist()
    prompts = [prefix, [*prefix[:36], 9, 7], prefix[:33]]
    oracle = oracle_generate(path, prompts, 12)
    assert min(oracle.margins) >= MIN_MARGIN, oracle.margins
    with Engine(engine_config(path)) as engine:
        tokens = [engine.generate([prompt], max_tokens=12)[0] for prompt in prompts]
        assert tokens == oracle.tokens
        assert engine.stats().prefix_cache_hits == 0
