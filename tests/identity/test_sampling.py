"""Sampling through the whole engine: the same draws on any layout, and the right filters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, oracle_model
from tests.engine import Collected, Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf, crowded_config

VARIANT = "qwen3_moe"
SAMPLING = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 50,
    "min_p": 0.001,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
}


def run(engine: Engine, case: Case) -> list[list[int]]:
    ids = [
        engine.add(prompt, max_tokens=NUM_TOKENS, seed=100 + idx, choice=choice, **SAMPLING)
        for idx, prompt in enumerate(case.prompts)
        for choice in range(2)
    ]
    engine.collect()
    return [engine.requests[each].tokens for each in ids]


@pytest.fixture(scope="module")
def engine(case_of: CaseOf) -> Iterator[Engine]:
    """Return one attention and one expert node in one process."""
    with Engine(engine_config(case_of(VARIANT).path)) as engine:
        yield engine


@pytest.fixture(scope="module")
def drawn(engine: Engine, case_of: CaseOf) -> list[list[int]]:
    return run(engine, case_of(VARIANT))


def test_draws_differ_between_seeds_and_choices_and_from_greedy(
    case_of: CaseOf, drawn: list[list[int]]
) -> None:
    case = case_of(VARIANT)
    assert all(len(tokens) == NUM_TOKENS for tokens in drawn)
    assert len({tuple(tokens) for tokens in drawn}) == len(drawn)
    assert drawn[::2] != case.tokens


@pytest.mark.slow
def test_seeded_draws_are_the_same_on_another_layout(
    case_of: CaseOf, drawn: list[list[int]]
) -> None:
    """Others, with few likely tokens, are in test_matrix.py."""
    case = case_of(VARIANT)
    with Engine(engine_config(case.path, expert_nodes=3, transport="tcp")) as engine:
        assert run(engine, case) == drawn


@pytest.mark.slow
def test_a_preempted_request_draws_the_same(case_of: CaseOf, drawn: list[list[int]]) -> None:
    case = case_of(VARIANT)
    with Engine(crowded_config(case, transport="shm")) as engine:
        assert run(engine, case) == drawn
        assert engine.stats().num_preemptions > 0


def generate_one(engine: Engine, prompt: list[int], **sampling: object) -> Collected:
    request = engine.requests[engine.add(prompt, **sampling)]
    engine.collect()
    return request


def test_stop_tokens_end_a_request_but_not_before_min_tokens(
    engine: Engine, case_of: CaseOf
) -> None:
    case = case_of(VARIANT)
    prompt, tokens = case.prompts[0], case.tokens[0]
    stop = tokens[5]
    first = tokens.index(stop)
    ended = generate_one(engine, prompt, max_tokens=20, stop_token_ids=(stop,))
    assert ended.tokens == tokens[: first + 1]
    assert ended.finish_reason == "stop"
    eos = generate_one(engine, prompt, max_tokens=20, eos_token_ids=(stop,))
    assert eos.tokens == ended.tokens
    later = generate_one(engine, prompt, max_tokens=20, stop_token_ids=(stop,), min_tokens=12)
    assert stop not in later.tokens[:12]
    assert later.tokens[:first] == tokens[:first]
    assert len(later.tokens) >= 12


def test_max_tokens_ends_a_request_with_length(engine: Engine, case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    ended = generate_one(engine, case.prompts[1], max_tokens=1)
    assert ended.tokens == case.tokens[1][:1]
    assert ended.finish_reason == "length"


def test_logit_bias_forces_and_forbids(engine: Engine, case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    forced = generate_one(engine, case.prompts[0], max_tokens=4, logit_bias={77: 100.0})
    assert forced.tokens == [77] * 4
    first = case.tokens[0][0]
    forbidden = generate_one(engine, case.prompts[0], max_tokens=4, logit_bias={first: -100.0})
    assert forbidden.tokens[0] != first


def test_logprobs_equal_transformers(engine: Engine, case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    prompt = case.prompts[0]
    request = generate_one(engine, prompt, max_tokens=6, logprobs=5)
    context = torch.tensor([prompt + request.tokens])
    with torch.no_grad():
        expected = oracle_model(case.path)(context).logits[0].log_softmax(-1)
    assert len(request.logprobs) == 6
    for idx, (token, entry) in enumerate(zip(request.tokens, request.logprobs, strict=True)):
        row = expected[len(prompt) - 1 + idx]
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert entry.top_ids[0] == token
        best = row.topk(5)
        assert list(entry.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-3)


def test_an_impossible_request_ends_with_its_own_error_and_harms_no_other(case_of: CaseOf) -> None:
    """Refused at intake or failed by the sampler; in both cases batched with another request."""
    case = case_of(VARIANT)
    everything = tuple(range(VOCAB_SIZE))
    with Engine(engine_config(case.path, attention_nodes=2)) as engine:
        good = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in case.prompts[:4]]
        refused = engine.add(case.prompts[4], temperature=1.0, repetition_penalty=1e-38)
        stuck = [
            engine.add(case.prompts[5], temperature=heat, min_tokens=9, stop_token_ids=everything)
            for heat in (0.0, 1.0)
        ]
        engine.collect()
        assert [engine.requests[each].tokens for each in good] == case.tokens[:4]
        assert all(engine.requests[each].failed is None for each in good)
        failure = engine.requests[refused].failed
        assert failure is not None
        assert failure.status == 400
        assert "repetition_penalty" in failure.message
        for each in stuck:
            failure = engine.requests[each].failed
            assert failure is not None
            assert "leave no token to choose" in failure.message
        assert engine.state.state == "ready"
        assert engine.generate(case.prompts[:1], max_tokens=4) == [case.tokens[0][:4]]
