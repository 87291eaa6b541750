"""A draft model through the whole engine: the tokens of plain decoding, in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine import Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, CaseOf
from tests.identity.speculation.test_speculation import (
    SAMPLINGS,
    accepted,
    ask,
    config_of,
    crowded_config_of,
    generate_until,
    was_preempted,
)
from tests.identity.test_sampling import SAMPLING
from topspin.plan.speculation import Speculation

VARIANT = "qwen3_moe"
slow = pytest.mark.slow


def speculation_of(model: Any, **settings: Any) -> Speculation:
    fields = {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "adaptive": False,
        **settings,
    }
    return Speculation(model=str(model), **fields)


TREES = {"num_speculative_tokens": 6, "branches": True, "draft_width": 3}
LAYOUTS = (
    ("local", (1, 1), 1, {}),
    ("shm", (2, 2), 2, TREES),
    ("shm", (1, 3), 3, {**TREES, "draft_passes": 2}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "topology", "micro_batches", "settings"), LAYOUTS)
def test_a_perfect_draft_gives_transformers_tokens_in_few_steps(
    case_of: CaseOf,
    transport: str,
    topology: tuple[int, int],
    micro_batches: int,
    settings: dict[str, Any],
) -> None:
    case = case_of(VARIANT)
    speculation = speculation_of(case.path, **settings)
    config = config_of(case, transport, topology, micro_batches, speculation=speculation)
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        stats = engine.stats()
        # A step in which nothing was left to do may be under way; this request ends behind it.
        engine.generate(case.prompts[:1], max_tokens=1)
    num_tokens = len(case.prompts) * NUM_TOKENS
    if not settings:
        # Each step of a request gives the whole draft and the token behind it, but for the ends.
        drafted = stats.num_draft_tokens
        assert accepted(stats) >= 0.95 * drafted
        assert stats.num_drafts <= num_tokens / 5 + 2 * len(case.prompts)
    assert accepted(stats) > num_tokens // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("gpt_oss", TREES),
        ("llama", {}),
    ],
)
def test_another_checkpoint_changes_no_token(
    case_of: CaseOf, tmp_path: Any, variant: str, settings: dict[str, Any]
) -> None:
    """A draft of another family with other weights: most is refused, by chance not all."""
    case = case_of(variant)
    draft = make_checkpoint(tmp_path, "mixtral_sliding_window", seed=77)
    config = engine_config(case.path, speculation=speculation_of(draft, **settings))
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        stats = engine.stats()
    assert stats.num_draft_tokens > accepted(stats)
    assert stats.num_drafts > len(case.prompts) * NUM_TOKENS // 2


@pytest.mark.slow
def test_a_suffix_and_a_model_feed_one_tree(case_of: CaseOf, tmp_path: Any) -> None:
    """The model is mostly wrong; what was answered before is right, and is believed."""
    case = case_of(VARIANT)
    draft = make_checkpoint(tmp_path, "mixtral_sliding_window", seed=77)
    speculation = speculation_of(draft, method="suffix+draft_model")
    config = engine_config(case.path, draft_nodes=1, speculation=speculation)
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        first = engine.stats()
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        again = engine.stats()
    gained = accepted(again) - accepted(first)
    assert gained > len(case.prompts) * NUM_TOKENS // 2
    assert again.num_draft_tokens - first.num_draft_tokens > gained, "the model offers too"


@slow
def test_seeded_draws_are_those_of_plain_decoding(case_of: CaseOf) -> None:
    """Of chains and of trees."""
    case = case_of(VARIANT)
    options = [{"max_tokens": NUM_TOKENS, **each} for each in (SAMPLING, *SAMPLINGS[2:4])]
    with Engine(config_of(case, "shm", (1, 2), 2)) as engine:
        plain = [ask(engine, case, **sampling) for sampling in options]
    for settings in ({}, TREES):
        speculation = speculation_of(case.path, **settings)
        with Engine(config_of(case, "shm", (1, 2), 2, speculation=speculation)) as engine:
            for sampling, expected in zip(options, plain, strict=True):
                found = ask(engine, case, **sampling)
                assert [each.tokens for each in found] == [each.tokens for each in expected]
            assert accepted(engine.stats()) > 0


@slow
def test_few_blocks_preemptions_and_prompts_in_pieces(case_of: CaseOf) -> None:
    """The draft's cache has no room for all, and requests are begun again."""
    case = case_of(VARIANT)
    with Engine(crowded_config_of(case, speculation=speculation_of(case.path))) as engine:
        generate_until(engine, case, was_preempted)


@pytest.mark.slow
def test_self_int4_and_the_controller(tmp_path: Any, case_of: CaseOf) -> None:
    case = _with_rows_for_int4(tmp_path)
    speculation = speculation_of("self-int4", adaptive=True)
    with Engine(engine_config(case, speculation=None)) as engine:
        prompts = case_of(VARIANT).prompts
        plain = engine.generate(prompts, max_tokens=NUM_TOKENS)
    with Engine(engine_config(case, speculation=speculation)) as engine:
        assert engine.generate(prompts, max_tokens=NUM_TOKENS) == plain
        assert accepted(engine.stats()) > 0


def _with_rows_for_int4(path: Any) -> Any:
    return make_checkpoint(
        path, VARIANT, hidden_size=128, intermediate_size=128, moe_intermediate_size=128
    )
