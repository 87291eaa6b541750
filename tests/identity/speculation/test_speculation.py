"""Speculative decoding through the whole engine: the tokens of plain decoding, in fewer steps.

Drafts are forced (`adaptive` off), and every test asserts that some were accepted. The second time
a prompt is asked, the drafter knows the answer of the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.engine import Collected, Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf, crowded_config
from tests.identity.test_sampling import SAMPLING
from topspin.messages import Stats
from topspin.plan.speculation import Speculation

VARIANT = "qwen3_moe"
slow = pytest.mark.slow
CHAINS = Speculation(method="suffix", num_speculative_tokens=5, adaptive=False)
TREES = Speculation(
    method="suffix",
    num_speculative_tokens=6,
    adaptive=False,
    branches=True,
    suffix_decoding_max_spec_factor=4.0,
    suffix_decoding_min_token_prob=0.0,
)
NGRAMS = Speculation(
    method="ngram",
    num_speculative_tokens=3,
    adaptive=False,
    prompt_lookup_min=1,
    prompt_lookup_max=2,
)
LAYOUTS = (
    ("local", (1, 1), 1, CHAINS),
    pytest.param("shm", (2, 2), 2, TREES, marks=slow),
)
# Tokens that occur again and again, so that something can be found in what was written.
FEW = dict.fromkeys(range(40, 44), 18.0)


def accepted(stats: Stats) -> int:
    return sum(stats.num_accepted_tokens)


def config_of(
    case: Case, transport: str, topology: tuple[int, int], m: int, **settings: Any
) -> Any:
    return engine_config(
        case.path,
        attention_nodes=topology[0],
        expert_nodes=topology[1],
        transport=transport,  # type: ignore[arg-type]
        micro_batches=m,
        **settings,
    )


def crowded_config_of(case: Case, **settings: Any) -> Any:
    """Prompts come in pieces, and there are blocks for little more than the longest request.

    Accepted drafts end answers early: with more blocks a quick machine preempts nobody.
    """
    return crowded_config(case, transport="shm", max_num_batched_tokens=17, **settings)


TIMEOUT_S = 60.0


def generate_until(engine: Engine, case: Case, wanted: Callable[[Stats], bool]) -> None:
    """Generate again and again, the same tokens each time, until the counters are as wanted.

    How often a draft comes in time, or a request is preempted, depends on the machine, and draft
    nodes report every second.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        found = engine.generate(case.prompts, max_tokens=NUM_TOKENS)
        assert found == case.tokens
        stats = engine.stats()
        if wanted(stats):
            return
        assert time.monotonic() < deadline_s, stats


def was_preempted(stats: Stats) -> bool:
    return stats.num_preemptions > 0 and accepted(stats) > 0


@pytest.mark.parametrize(("transport", "topology", "micro_batches", "speculation"), LAYOUTS)
def test_greedy_output_is_that_of_transformers_on_every_layout(
    case_of: CaseOf,
    transport: str,
    topology: tuple[int, int],
    micro_batches: int,
    speculation: Speculation,
) -> None:
    case = case_of(VARIANT)
    config = config_of(case, transport, topology, micro_batches, speculation=speculation)
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        first = engine.stats()
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        stats = engine.stats()
    # The second answers are foreseen but for their beginnings, on the nodes that gave the first.
    assert stats.num_draft_tokens >= accepted(stats) > len(case.prompts) * NUM_TOKENS // 4
    assert stats.num_accepted_tokens[0] <= stats.num_drafts
    if topology[0] == 1:
        assert stats.num_steps - first.num_steps < NUM_TOKENS


def ask(engine: Engine, case: Case, **sampling: Any) -> list[Collected]:
    ids = [
        engine.add(prompt, seed=100 + idx, choice=choice, **sampling)
        for idx, prompt in enumerate(case.prompts[::2])
        for choice in range(2)
    ]
    engine.collect()
    return [engine.requests[each] for each in ids]


SAMPLINGS: Sequence[dict[str, Any]] = (
    SAMPLING,
    {"temperature": 1.0, "logit_bias": FEW},
    # Each of the few tokens becomes less likely whenever it was chosen.
    {"logit_bias": FEW, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.7, "logit_bias": FEW, "repetition_penalty": 1.3, "top_k": 3},
    {"temperature": 1.0, "logit_bias": FEW, "stop_token_ids": (41,), "min_tokens": 7},
    {"temperature": 1.0, "logit_bias": FEW, "logprobs": 3, "max_tokens": 9},
)


OPTIONS = [{"max_tokens": NUM_TOKENS, **sampling} for sampling in SAMPLINGS]


@pytest.fixture(scope="module")
def plain(case_of: CaseOf) -> list[list[Collected]]:
    """The answers to all OPTIONS without drafts."""
    case = case_of(VARIANT)
    with Engine(config_of(case, "shm", (1, 2), 2)) as engine:
        found = [ask(engine, case, **sampling) for sampling in OPTIONS]
        assert engine.stats().num_drafts == 0
    reasons = {each.finish_reason for answers in found for each in answers}
    assert reasons == {"stop", "length"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", [CHAINS, TREES, NGRAMS], ids=["chains", "trees", "ngrams"])
def test_seeded_draws_are_those_of_plain_decoding(
    case_of: CaseOf, plain: list[list[Collected]], method: Speculation
) -> None:
    """Penalties, bias, stop tokens, min_tokens and logprobs, all requests in one batch."""
    case = case_of(VARIANT)
    # N-grams are found where few tokens are left; what verifies them is what verifies the others.
    some = slice(3, 5) if method is NGRAMS else slice(None)
    with Engine(config_of(case, "shm", (1, 2), 2, speculation=method)) as engine:
        for sampling, expected in zip(OPTIONS[some], plain[some], strict=True):
            before = engine.stats()
            for _ in range(2):
                found = ask(engine, case, **sampling)
                assert [each.tokens for each in found] == [each.tokens for each in expected]
                assert [each.finish_reason for each in found] == [
                    each.finish_reason for each in expected
                ]
                _check_logprobs(found, expected)
            after = engine.stats()
            assert accepted(after) > accepted(before), sampling


def _check_logprobs(found: Sequence[Collected], expected: Sequence[Collected]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine.logprobs) == len(theirs.logprobs)
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert a.top_ids == b.top_ids
            assert [a.logprob, *a.top_logprobs] == pytest.approx(
                [b.logprob, *b.top_logprobs], abs=1e-4
            )


@pytest.mark.slow
def test_a_deterministic_engine_gives_the_same_bits(case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    sampling = {"max_tokens": NUM_TOKENS, "logprobs": VOCAB_SIZE, "temperature": 0.8}
    with Engine(config_of(case, "local", (1, 1), 1, deterministic=True)) as engine:
        plain = ask(engine, case, **sampling)
    for speculation in (CHAINS, TREES):
        config = config_of(case, "shm", (1, 2), 2, deterministic=True, speculation=speculation)
        with Engine(config) as engine:
            for _ in range(2):
                found = ask(engine, case, **sampling)
                assert [each.tokens for each in found] == [each.tokens for each in plain]
                assert [each.logprobs for each in found] == [each.logprobs for each in plain]
            assert accepted(engine.stats()) > len(plain) * NUM_TOKENS // 4


@pytest.mark.slow
def test_preempted_requests_and_prompts_in_pieces(case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    with Engine(crowded_config_of(case, speculation=CHAINS)) as engine:
        generate_until(engine, case, was_preempted)


def test_a_tenant_learns_nothing_of_anothers_outputs(case_of: CaseOf) -> None:
    case = case_of(VARIANT)

    def gained(engine: Engine, salt: str) -> int:
        before = accepted(engine.stats())
        for prompt in case.prompts:
            request = engine.add(prompt, max_tokens=NUM_TOKENS, cache_salt=salt)
            engine.collect()
            assert engine.requests[request].tokens == case.tokens[case.prompts.index(prompt)]
        return accepted(engine.stats()) - before

    with Engine(engine_config(case.path, speculation=CHAINS)) as engine:
        alone = gained(engine, "a")
        assert gained(engine, "b") == alone
        assert gained(engine, "a") > alone + len(case.prompts) * NUM_TOKENS // 2


@pytest.mark.slow
def test_the_controller_changes_no_token(case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    adaptive = Speculation(method="suffix", num_speculative_tokens=5)
    with Engine(config_of(case, "shm", (1, 2), 2, speculation=adaptive)) as engine:
        for _ in range(3):
            assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        assert engine.stats().num_drafts > 0
