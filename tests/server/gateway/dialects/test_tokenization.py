"""POST /tokenize and /detokenize: the same tokens as a request's, and as the library's."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from server.gateway.dialects.tokenization import MAX_BODY_BYTES
from tests.server.gateway.calls import CHAT, USER
from tests.server.gateway.fakes import FakeEngine, backend, gateway, ids, saying
from topspin.messages import unpack_ints

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def post(path: str, body: dict[str, Any], *, ready: bool = True, **options: Any) -> httpx.Response:
    async def test() -> httpx.Response:
        async with gateway(FakeEngine(), ready=ready, **options) as client:
            return await client.post(path, json=body)

    return asyncio.run(test())


def test_text_becomes_the_librarys_tokens_and_back() -> None:
    text = "hello wörld <|eos|>\n"
    encoding = backend().encode(text)
    answer = post(TOKENIZE, {"model": "tiny", "prompt": text, "return_token_strs": True})
    assert answer.json() == {
        "count": len(encoding.ids),
        "max_model_len": 100,
        "tokens": encoding.ids,
        "token_strs": encoding.tokens,
    }
    assert post(DETOKENIZE, {"tokens": encoding.ids}).json() == {"prompt": text}


def test_tokens_are_told_while_the_engine_starts() -> None:
    answer = post(TOKENIZE, {"prompt": "hello"}, ready=False)
    assert answer.json() == {
        "count": 1,
        "max_model_len": None,
        "tokens": ids("hello"),
        "token_strs": None,
    }
    assert post(DETOKENIZE, {"tokens": []}, ready=False).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"prefix": "P "}},
        {
            "messages": [USER, {"role": "assistant", "content": "so"}],
            "continue_final_message": True,
        },
        {"tools": [], "chat_template": None, "add_special_tokens": True},
    ],
)
def test_messages_become_the_tokens_of_a_chat(fields: dict[str, Any]) -> None:
    body = {"messages": [USER], **fields}

    async def test() -> tuple[list[int], list[int]]:
        fake = FakeEngine(saying("ok"))
        async with gateway(fake) as client:
            assert (await client.post(CHAT, json={"model": "tiny", **body})).status_code == 200
            told = (await client.post(TOKENIZE, json=body)).json()["tokens"]
        return told, list(unpack_ints(fake.added[0].prompt))

    told, used = asyncio.run(test())
    assert told == used


def test_a_prompt_longer_than_the_context_is_counted_in_a_thread() -> None:
    """Its body is nearly as large as one may be."""
    text = "hello" * (MAX_BODY_BYTES // 6)
    answer = post(TOKENIZE, {"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"]) == MAX_BODY_BYTES // 6
    assert post(DETOKENIZE, {"tokens": answer["tokens"]}).json() == {"prompt": text}
