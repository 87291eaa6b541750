"""The exact engine requests that the bodies of both endpoints cause."""

from __future__ import annotations

from typing import Any

import pytest

from server.gateway.bodies.sampling_defaults import SamplingDefaults
from tests.server.gateway.calls import (
    CHAT,
    CHAT_BODY,
    PLAIN,
    PLAIN_BODY,
    PROMPT,
    USER,
    post,
    prompt_of,
    scored,
)
from tests.server.gateway.fakes import EOS_ID, FakeEngine, adding, gateway, ids, saying
from topspin.messages import SamplingParams, unpack_ints
from topspin.plan.retrieval import policy_of


def test_every_parameter_reaches_the_engine() -> None:
    same: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "logprobs": 4,
        "prompt_logprobs": 5,
    }
    body = {
        **PLAIN_BODY,
        **same,
        "seed": -1,
        "logit_bias": {"5": 2, "6": -100},
        "stop_token_ids": [8, 9],
        "cache_salt": "tenant",
        "n": 1,
    }
    fake = FakeEngine(scored("a"))
    post(PLAIN, body, fake)
    request = fake.added[0]
    assert request.cache_salt == "tenant"
    assert request.sampling == SamplingParams(
        **same,
        seed=2**64 - 1,
        choice=0,
        logit_bias={5: 2.0, 6: -100.0},
        stop_token_ids=(8, 9),
        eos_token_ids=(EOS_ID,),
    )


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"logprobs": 3}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 2}, 3),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, 2),
        ({"prompt_logprobs": 0}, 0),
    ],
)
def test_prompts_are_scored_once_and_only_if_asked(
    fields: dict[str, Any], asked: int | None
) -> None:
    fake = FakeEngine(scored("a"))
    post(PLAIN, {**PLAIN_BODY, "prompt": ["hi", "ho"], "n": 2, **fields}, fake)
    found = [request.sampling.prompt_logprobs for request in fake.added]
    assert found == [asked, None, asked, None]


@pytest.mark.parametrize(
    ("asked", "tokens"), [(None, None), ({}, None), ({"tokens": 70}, 70), ({"enabled": False}, 0)]
)
def test_a_request_chooses_how_many_keys_its_tokens_attend_to(
    asked: dict[str, object] | None, tokens: int | None
) -> None:
    fake = FakeEngine(saying("a"))
    post(PLAIN, {**PLAIN_BODY, "kv_retrieval": asked}, fake, retrieval=policy_of(512))
    assert fake.added[0].sampling.kv_retrieval_tokens == tokens


async def test_defaults_follow_openai() -> None:
    fake = FakeEngine(saying("a"))
    bounded = {"max_completion_tokens": 5, "ignore_eos": True, "top_k": -1}
    async with gateway(fake) as client:
        await client.post(PLAIN, json=PLAIN_BODY)
        await client.post(PLAIN, json={**PLAIN_BODY, "prompt": [1] * 90})
        await client.post(CHAT, json=CHAT_BODY)
        await client.post(CHAT, json={**CHAT_BODY, **bounded})
    first, long, chat, last = [request.sampling for request in fake.added]
    assert first == SamplingParams(max_tokens=16, seed=first.seed, eos_token_ids=(EOS_ID,))
    assert long.max_tokens == 10, "the default shrinks to what fits"
    assert chat.max_tokens == 100 - len(ids(PROMPT))
    assert (last.max_tokens, last.eos_token_ids, last.top_k) == (5, (), 0)
    seeds = {request.sampling.seed for request in fake.added}
    assert len(seeds) == 4, "each unseeded request draws its own"
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_the_models_defaults_apply_unless_a_request_sets_its_own() -> None:
    defaults = SamplingDefaults(
        temperature=0.2, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, max_tokens=30
    )
    own = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    bodies = [
        (CHAT, CHAT_BODY),
        (CHAT, {**CHAT_BODY, **own, "max_tokens": 50}),
        (PLAIN, PLAIN_BODY),
        (PLAIN, {**PLAIN_BODY, "prompt": [1] * 95}),
    ]
    fake = FakeEngine(saying("a"))
    async with gateway(fake, defaults=defaults) as client:
        for path, body in bodies:
            assert (await client.post(path, json=body)).status_code == 200
    chat, explicit, plain, long = [request.sampling for request in fake.added]
    model = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    neutral = {**own, "top_k": 0}
    for sampling, values in ((chat, model), (explicit, neutral), (plain, model)):
        assert {name: getattr(sampling, name) for name in values} == values
    assert [s.max_tokens for s in (chat, explicit, plain, long)] == [30, 50, 16, 5]


async def test_special_tokens_are_added_as_asked() -> None:
    fake = FakeEngine(saying("a"))
    async with gateway(fake, tokenizer=adding("<|eos|>")) as client:
        for path, body in ((PLAIN, PLAIN_BODY), (CHAT, CHAT_BODY)):
            for given in (None, True, False):
                await client.post(path, json={**body, "add_special_tokens": given})
    is_added = [unpack_ints(request.prompt)[0] == EOS_ID for request in fake.added]
    assert is_added == [True, True, False, False, True, False]


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "user: hi\nassistant: "),
        ({"add_generation_prompt": False}, "user: hi\n"),
        ({"chat_template_kwargs": {"prefix": "P "}}, "P user: hi\nassistant: "),
        ({"messages": [{"role": "developer", "content": "x"}]}, "system: x\nassistant: "),
        ({"messages": [{"role": "user", "content": PARTS}]}, "user: a\nb\nassistant: "),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "so a"}],
                "continue_final_message": True,
            },
            "user: hi\nassistant: so a",
        ),
    ],
)
async def test_messages_become_the_prompt(fields: dict[str, Any], prompt: str) -> None:
    """And /tokenize tells its tokens."""
    fake, body = FakeEngine(saying("a")), {**CHAT_BODY, **fields}
    async with gateway(fake) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
        told = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert prompt_of(fake.added[0]) == prompt
    assert list(unpack_ints(fake.added[0].prompt)) == told


@pytest.mark.parametrize("prompt", ["hello", ids("hello"), ["hello"], [ids("hello")]])
def test_a_prompt_comes_in_four_forms(prompt: object) -> None:
    fake = FakeEngine(saying("a"))
    post(PLAIN, {**PLAIN_BODY, "prompt": prompt}, fake)
    assert [prompt_of(request) for request in fake.added] == ["hello"]


async def test_a_prompt_is_truncated_to_its_last_tokens() -> None:
    """Even a prompt that would not fit otherwise."""
    fake = FakeEngine(saying("a"))
    long = {"role": "user", "content": "hello " * 500}
    requests: list[tuple[str, dict[str, Any], int]] = [
        (PLAIN, {"prompt": "hi there"}, 3),
        (PLAIN, {"prompt": [[1, 2, 3], [4]]}, 2),
        (CHAT, {"messages": [long]}, 11),
    ]
    async with gateway(fake) as client:
        for path, body, num_tokens in requests:
            await client.post(path, json={**body, "truncate_prompt_tokens": num_tokens})
    prompts = [list(unpack_ints(request.prompt)) for request in fake.added]
    assert prompts == [ids("hi there")[-3:], [2, 3], [4], ids("\nassistant: ")[-11:]]


@pytest.mark.parametrize("form", ["text", "ids"])
def test_a_large_body_is_read_in_a_thread_with_the_same_result(form: str) -> None:
    fake, text = FakeEngine(saying("a")), "hello " * 20_000
    prompt = ids(text) if form == "ids" else text
    post(PLAIN, {**PLAIN_BODY, "prompt": prompt}, fake, max_request_tokens=100_000)
    assert prompt_of(fake.added[0]) == text
