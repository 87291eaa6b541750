"""Checkpoints with the oracle's answers, made once per test session."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint, oracle_continuations
from tests.engine import engine_config
from tests.mtp_heads import add_head

NUM_PROMPTS = 8
NUM_TOKENS = 14
# Below this top-1/top-2 logit margin another order of summation may choose another token.
MIN_MARGIN = 1e-3
PROMPT_LENS = (5, 41, 17, 1, 30, 8, 64, 12, 3, 23, 9, 50, 14, 2, 33, 19)


HEAD = "/mtp"
"""Behind a variant's name: the checkpoint carries a head of multi-token prediction."""


class Case(NamedTuple):
    """A checkpoint, prompts, and transformers' greedy fp32 continuations."""

    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


CaseOf = Callable[[str], Case]


def crowded_config(case: Case, *, spare: int = 8, most: int = NUM_TOKENS, **settings: Any) -> Any:
    """Return a plan with blocks for `spare` tokens more than the longest request has.

    It has `most` tokens of output. Others are preempted, and computed again.
    """
    model = load_model_config(case.path)
    number_bytes = {"float32": 4, "bfloat16": 2}[settings.get("dtype", "float32")]
    if settings.get("kv_cache_dtype", "auto") != "auto":
        number_bytes = 1
    num_tokens = max(map(len, case.prompts)) + most + spare
    size_bytes = num_tokens * number_bytes * model.num_layers * model.cached_size
    return engine_config(case.path, kv_cache_bytes=size_bytes, **settings)


@pytest.fixture(autouse=True)
def _frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let draft nodes report often: a test that looks at their counters waits for a report."""
    monkeypatch.setattr("draft_nodes.worker.COUNTS_INTERVAL_S", 0.05)


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    """Return a cached function that gives a variant's Case."""
    cases: dict[str, Case] = {}

    def get(variant: str) -> Case:
        if variant not in cases:
            directory = tmp_path_factory.mktemp(variant.replace("/", "-"))
            cases[variant] = _make_case(directory, variant)
        return cases[variant]

    return get


def make_variant(directory: Path, variant: str, **sizes: Any) -> Path:
    """Write a variant, with a head if its name says so."""
    path = make_checkpoint(directory, variant.removesuffix(HEAD), **sizes)
    return add_head(path) if variant.endswith(HEAD) else path


def _make_case(directory: Path, variant: str) -> Case:
    path = make_variant(directory, variant)
    config = load_model_config(path)
    longest = config.context_length - NUM_TOKENS
    rng = np.random.default_rng(11)
    prompts = [
        rng.integers(0, config.vocab_size, size=1 + (length - 1) % longest).tolist()
        for length in PROMPT_LENS
    ]
    found = oracle_continuations(path, prompts, NUM_TOKENS, least_margin=MIN_MARGIN)
    answers = zip(prompts, found, strict=True)
    clear = ((prompt, found.tokens) for prompt, found in answers if found.margin >= MIN_MARGIN)
    chosen = list(islice(clear, NUM_PROMPTS))
    assert len(chosen) == NUM_PROMPTS, f"{variant}: only {len(chosen)} prompts have clear tokens"
    return Case(path, [prompt for prompt, _ in chosen], [tokens for _, tokens in chosen])
