"""Drafts by a checkpoint's own head through whole engines: transformers' tokens, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_generate
from tests.engine import Engine, engine_config
from tests.identity.conftest import MIN_MARGIN, NUM_TOKENS, PROMPT_LENS, Case
from tests.identity.speculation.test_speculation import (
    accepted,
    crowded_config_of,
    generate_until,
    was_preempted,
)
from tests.mtp_heads import add_head, drafted_by, final_rows_of, head_oracle, make_predictable
from topspin.plan.speculation import Speculation

VARIANTS = ("deepseek_v3", "glm4_moe")
CHAINS = Speculation(method="mtp", num_speculative_tokens=3, adaptive=False)
TREES = Speculation(method="mtp", num_speculative_tokens=6, adaptive=False, branches=True)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"transport": "local", "speculation": CHAINS},
    {"transport": "shm", "attention_nodes": 2, "micro_batches": 2, "speculation": TREES},
)
MadeCase = Callable[[str], Case]


@pytest.fixture(scope="module")
def head_case(tmp_path_factory: pytest.TempPathFactory) -> MadeCase:
    """Return what gives a checkpoint of a variant whose head predicts most tokens."""
    made: dict[str, Case] = {}

    def get(variant: str) -> Case:
        if variant not in made:
            made[variant] = _make_case(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return get


def _make_case(directory: Path, variant: str) -> Case:
    path = make_predictable(add_head(make_checkpoint(directory, variant)))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, size=size).tolist() for size in PROMPT_LENS]
    result = oracle_generate(path, prompts, NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(result.margins) if margin >= MIN_MARGIN][:8]
    assert len(clear) == 8, result.margins
    return Case(path, [prompts[idx] for idx in clear], [result.tokens[idx] for idx in clear])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("settings", LAYOUTS, ids=["chains", "trees"])
def test_greedy_output_is_that_of_transformers(
    head_case: MadeCase, variant: str, settings: dict[str, Any]
) -> None:
    case = head_case(variant)
    with Engine(engine_config(case.path, **settings)) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        stats = engine.stats()
        # Cached prefixes: the head begins behind them.
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        again = engine.stats()
    # How many rows a step has, and so how far drafts are trimmed, is a matter of time.
    for num_drafted, num_accepted in (
        (stats.num_draft_tokens, accepted(stats)),
        (again.num_draft_tokens - stats.num_draft_tokens, accepted(again) - accepted(stats)),
    ):
        most = len(case.prompts) * NUM_TOKENS
        assert num_drafted >= num_accepted > most // 5, (num_drafted, num_accepted)


@pytest.mark.slow
def test_as_many_drafts_are_accepted_as_of_transformers_head(head_case: MadeCase) -> None:
    """So each of its rows joins a token with the model's own row of the token before it."""
    case = head_case("glm4_moe")
    model, head = head_oracle(case.path)
    num_drafted = num_accepted = 0
    cases = list(zip(case.prompts, case.tokens, strict=True))[:3]
    for prompt, answer in cases:
        rows, known = final_rows_of(model, prompt + answer), 1
        while (at_most := min(3, NUM_TOKENS - 1 - known)) > 0:
            text = prompt + answer[:known]
            drafts = drafted_by(head, rows[: len(text) - 1], text, at_most)
            matches = [a == b for a, b in zip(drafts, answer[known:], strict=False)]
            length = (*matches, False).index(False)
            num_drafted, num_accepted, known = (
                num_drafted + at_most,
                num_accepted + length,
                known + length + 1,
            )
    with Engine(engine_config(case.path, transport="local", speculation=CHAINS)) as engine:
        # One after the other: a step of many rows is trimmed to a shape that is recorded.
        for prompt, answer in cases:
            assert engine.generate([prompt], max_tokens=NUM_TOKENS) == [answer]
        stats = engine.stats()
    assert (stats.num_draft_tokens, accepted(stats)) == (num_drafted, num_accepted)
    assert num_accepted < num_drafted


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_that_are_preempted_go_on(head_case: MadeCase, variant: str) -> None:
    case = head_case(variant)
    with Engine(crowded_config_of(case, speculation=CHAINS)) as engine:
        generate_until(engine, case, was_preempted)


@pytest.mark.slow
def test_a_head_that_knows_nothing_changes_nothing(tmp_path: Path, head_case: MadeCase) -> None:
    path = add_head(make_checkpoint(tmp_path, "glm4_moe", num_hidden_layers=2))
    prompts = head_case("glm4_moe").prompts
    result = oracle_generate(path, prompts, NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(result.margins) if margin >= MIN_MARGIN]
    with Engine(engine_config(path, transport="local", speculation=CHAINS)) as engine:
        found = engine.generate(prompts, max_tokens=NUM_TOKENS)
        stats = engine.stats()
    assert len(clear) >= 4
    assert [found[idx] for idx in clear] == [result.tokens[idx] for idx in clear]
    assert accepted(stats) < stats.num_draft_tokens // 4
