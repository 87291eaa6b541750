"""Prompts in answers: prompt_logprobs, echo, and requests that generate nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from server.gateway.handler import INLINE_LOGPROBS
from tests.server.gateway.calls import (
    CHAT,
    CHAT_BODY,
    PLAIN,
    PLAIN_BODY,
    PROMPT,
    answer_to,
    chat_choice,
    events_of,
    post,
    prompt_score,
    scored,
    usage,
    without_head,
)
from tests.server.gateway.fakes import (
    MAX_REQUEST_TOKENS,
    FakeEngine,
    adding,
    gateway,
    ids,
    output,
    tokenizer,
)
from topspin.messages import AddRequest, RequestOutput


def text_of(token_id: int) -> str:
    return tokenizer().token_text(token_id)


def name_of(token_id: int) -> str:
    """Return how OpenAI writes a token in a completion: a part of a character by its bytes."""
    data = tokenizer().token_bytes(token_id)
    if data.decode(errors="ignore").encode() == data:
        return data.decode()
    return "bytes:" + repr(data)[2:-1]


def vllm_entry(token_id: int, position: int, num_top: int) -> dict[str, Any]:
    """Return the entry of one token as vLLM writes it."""
    score = prompt_score(token_id, position, num_top)
    found = {token_id: (score.logprob, score.rank)}
    for rank, idx in enumerate(score.top_ids):
        found[idx] = (score.top_logprobs[rank], rank + 1)
    return {
        str(idx): {"logprob": logprob, "rank": rank, "decoded_token": text_of(idx)}
        for idx, (logprob, rank) in found.items()
    }


def vllm_form(token_ids: list[int], num_top: int) -> list[Any]:
    entries = [vllm_entry(idx, at, num_top) for at, idx in enumerate(token_ids)]
    return [None, *entries[1:]]


@pytest.mark.parametrize("num_top", [0, 1, 2, 5])
def test_prompt_logprobs_have_vllms_form(num_top: int) -> None:
    body = {**PLAIN_BODY, "prompt": ["hello z\u00e9", "h"], "n": 2, "prompt_logprobs": num_top}
    answer = post(PLAIN, body, FakeEngine(scored("ab"))).json()
    expected = [vllm_form(ids(prompt), num_top) for prompt in ("hello z\u00e9", "h")]
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found == [expected[0], expected[0], expected[1], expected[1]]
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * 4
    unasked = post(PLAIN, PLAIN_BODY, FakeEngine(scored("a"))).json()["choices"][0]
    # vLLM's clients read the attributes, whether they asked or not.
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids"):
        assert unasked[name] is None
    chat = post(CHAT, {**CHAT_BODY, "prompt_logprobs": num_top}, FakeEngine(scored("ab"))).json()
    assert chat["prompt_logprobs"] == vllm_form(ids(PROMPT), num_top)
    assert chat["choices"][0]["message"]["content"] == "ab"


def echoed_logprobs(prompt: str, completion: str, num_top: int) -> dict[str, Any]:
    """Return `logprobs` of the prompt and of scored(completion), as OpenAI writes them."""
    tokens = [name_of(idx) for idx in ids(prompt) + ids(completion)]
    data = [tokenizer().token_bytes(idx) for idx in ids(prompt) + ids(completion)]
    scores = [prompt_score(idx, at, num_top) for at, idx in enumerate(ids(prompt))][1:]
    tops: list[Any] = [None]
    for token, score in zip(tokens[1:], scores, strict=False):
        best = zip(map(name_of, score.top_ids), score.top_logprobs, strict=True)
        tops.append(dict(best) | {token: score.logprob})
    generated = tokens[len(tops) :]
    tops += [dict([(token, -0.5), ("z", -9999.0)][: max(num_top, 1)]) for token in generated]
    return {
        "text_offset": [
            len(b"".join(data[:idx]).decode(errors="ignore")) for idx in range(len(data))
        ],
        "token_logprobs": [None, *(score.logprob for score in scores), *[-0.5] * len(generated)],
        "tokens": tokens,
        "top_logprobs": tops,
    }


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 9])
def test_echoed_logprobs_streamed_and_whole(num_top: int, max_tokens: int) -> None:
    """Parts of characters keep their values and their place."""
    prompts = ["hello wo", "hello wo", "\u65e5\u672c \U0001f600", "\u65e5\u672c \U0001f600"]
    said = "a\u00e9 \U0001f469b"
    completion = said if max_tokens else ""
    body = {"model": "tiny", "echo": True, "logprobs": num_top, "max_tokens": max_tokens, "n": 2}
    body["prompt"] = [ids(prompt) for prompt in prompts[::2]]
    whole = post(PLAIN, body, FakeEngine(scored(said))).json()
    choices = whole["choices"]
    assert [choice["logprobs"] for choice in choices] == [
        echoed_logprobs(prompt, completion, num_top) for prompt in prompts
    ]
    assert [choice["text"] for choice in choices] == [prompt + completion for prompt in prompts]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    num_prompt_tokens = sum(len(ids(prompt)) for prompt in prompts[::2])
    assert whole["usage"] == usage(num_prompt_tokens, 4 * len(ids(completion)))

    body |= {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(post(PLAIN, body, FakeEngine(scored(said))))
    assert events[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(choices):
        parts = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        assert parts[0]["text"].startswith(prompts[index])
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, expected in choice["logprobs"].items():
            shown = [part["logprobs"][name] for part in parts if part["logprobs"] is not None]
            assert [value for values in shown for value in values] == expected
        assert parts[-1]["finish_reason"] == "length"
    assert choices[2]["logprobs"]["tokens"][0] == "bytes:\\xe6"


def test_echo_alone_needs_no_scores() -> None:
    fake = FakeEngine(scored("ab"))
    body = {**PLAIN_BODY, "echo": True, "stream": True, "return_token_ids": True}
    choices = [event["choices"][0] for event in events_of(post(PLAIN, body, fake))]
    assert [choice["text"] for choice in choices] == ["hia", "b", ""]
    assert [choice.get("token_ids") for choice in choices] == [ids("a"), ids("b"), None]
    assert fake.added[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # A text comes back as it was given, tokens as their text.
        ({"prompt": "<|im_start|>a", "add_special_tokens": False}, "<|im_start|>a!"),
        ({"prompt": ids("<|im_start|>a")}, "<|im_start|>a!"),
        ({"prompt": "hello wo", "truncate_prompt_tokens": 2}, " wo!"),
        # A character that the prompt begins and the completion ends, and one that nothing ends.
        ({"prompt": ids("a\u00e9")[:-1]}, "a\ufffd!"),
        ({"prompt": ids("a\u00e9")[:-1], "max_tokens": 0}, "a\ufffd"),
        ({"prompt": "a", "max_tokens": 0}, "a"),
        # A stop string is searched for in the completion only.
        ({"prompt": "stop", "stop": "stop"}, "stop!"),
    ],
)
def test_the_echoed_text(fields: dict[str, Any], expected: str) -> None:
    body = {"model": "tiny", "echo": True, **fields}
    assert post(PLAIN, body, FakeEngine(scored("!"))).json()["choices"][0]["text"] == expected


def test_a_character_begun_by_the_echoed_prompt_is_ended_by_the_completion() -> None:
    def script(request: AddRequest) -> Iterator[RequestOutput]:
        yield output(request, ids("\u00e9!")[1:], finish_reason="length")

    body = {"model": "tiny", "prompt": ids("a\u00e9")[:-1]}
    for echo, text in ((True, "a\u00e9!"), (False, "\u00e9!")):
        answer = post(PLAIN, {**body, "echo": echo}, FakeEngine(script)).json()
        assert answer["choices"][0]["text"] == text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_may_generate_nothing(name: str) -> None:
    fake = FakeEngine(scored("a"))
    answer = post(CHAT, {**CHAT_BODY, name: 0, "prompt_logprobs": 0}, fake).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == usage(len(ids(PROMPT)), 0)
    assert len(answer["prompt_logprobs"]) == len(ids(PROMPT))
    assert fake.added[0].sampling.max_tokens == 0
    events = events_of(post(CHAT, {**CHAT_BODY, name: 0, "stream": True}, FakeEngine(scored("a"))))
    assert [without_head(event) for event in events] == [
        chat_choice(0, {"role": "assistant", "content": ""}),
        chat_choice(0, {}, "length"),
    ]


@pytest.mark.parametrize(
    "prompt", ["hi", ids("a\u00e9")[:-1], [1] * MAX_REQUEST_TOKENS, "z" * MAX_REQUEST_TOKENS]
)
def test_a_completion_may_be_empty(prompt: str | list[int]) -> None:
    """And then its prompt may fill the context."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 0, "logprobs": 1}
    answer = post(PLAIN, body, FakeEngine(scored("a"))).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert choice["logprobs"]["tokens"] == []
    assert answer["usage"] == usage(len(prompt), 0)
    body |= {"stream": True, "return_token_ids": True}
    events = events_of(post(PLAIN, body, FakeEngine(scored("a"))))
    assert [event["choices"][0]["text"] for event in events] == ["", ""]
    assert len(events[0]["choices"][0]["prompt_token_ids"]) == len(prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_other_choices_wait_for_the_scores_that_the_first_brings(stream: bool) -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        body = {**PLAIN_BODY, "echo": True, "logprobs": 0, "n": 2, "stream": stream}
        pending = asyncio.create_task(client.post(PLAIN, json=body))
        await fake.request_came.wait()
        first, second = fake.added
        entry = prompt_score(ids("i")[0], 1, 0)
        fake.emit(output(second, ids("x"), logprobs=(entry,)))
        fake.emit(output(second, ids("y"), index=1, logprobs=(entry,), finish_reason="length"))
        await fake.settle()
        assert not pending.done()
        fake.emit(output(first, [], prompt_logprobs=(entry,)))
        fake.emit(output(first, ids("a"), logprobs=(entry,), finish_reason="length"))
        response = await pending
        if not stream:
            texts = [choice["text"] for choice in response.json()["choices"]]
            assert texts == ["hia", "hixy"]
            return
        choices = [event["choices"][0] for event in events_of(response)]
        shown = [(choice["index"], choice["text"]) for choice in choices]
        assert shown == [(1, "hix"), (1, "y"), (1, ""), (0, "hia"), (0, "")]


@pytest.mark.parametrize("num_scores", [0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_too_few_or_too_many_scores_fail_the_request(num_scores: int, max_tokens: int) -> None:
    def script(request: AddRequest) -> Iterator[RequestOutput]:
        scores = (prompt_score(1, 1, 0),) * num_scores
        token_ids = ids("a")[:max_tokens]
        yield output(request, token_ids, prompt_logprobs=scores, finish_reason="length")

    body = {**PLAIN_BODY, "prompt_logprobs": 0, "max_tokens": max_tokens}
    response = answer_to(PLAIN, body, fake=FakeEngine(script))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "protocol_error")


def test_a_long_prompts_scores_are_encoded_in_a_thread_with_the_same_result() -> None:
    prompt = "hello wo" * 250
    assert len(ids(prompt)) * 3 > INLINE_LOGPROBS
    body = {**PLAIN_BODY, "prompt": prompt, "echo": True, "logprobs": 2}

    def answer(**fields: object) -> Any:
        fake = FakeEngine(scored("a"))
        return post(PLAIN, {**body, **fields}, fake, max_request_tokens=2000)

    # Both forms may be asked for, each with its own number.
    whole = answer(prompt_logprobs=1).json()["choices"][0]
    assert whole["prompt_logprobs"] == vllm_form(ids(prompt), 1)
    assert whole["logprobs"] == echoed_logprobs(prompt, "a", 2)
    streamed = events_of(answer(stream=True))[0]["choices"][0]
    assert streamed["logprobs"] == whole["logprobs"]


def test_offsets_do_not_count_what_the_text_does_not_show() -> None:
    bos = "<|im_start|>"
    for prompt, wanted in (("hi", [0, 0, 1, 2]), (f"{bos}hi", [0, 0, 12, 13, 14])):
        body = {**PLAIN_BODY, "echo": True, "logprobs": 0, "prompt": prompt}
        response = post(PLAIN, body, FakeEngine(scored("a<|im_end|>")), tokenizer=adding(bos))
        choice = response.json()["choices"][0]
        assert choice["text"] == f"{prompt}a"
        assert choice["logprobs"]["text_offset"] == [*wanted, len(choice["text"])]
