"""POST /tokenize and /detokenize: the same tokens as a request's, and as the library's."""

from __future__ import annotations

from typing import Any

import pytest

from server.gateway.dialects.tokenization import MAX_BODY_BYTES
from tests.server.gateway.calls import CHAT, USER, answer_to
from tests.server.gateway.fakes import FakeEngine, backend, gateway, ids, saying
from topspin.messages import unpack_ints

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def test_text_becomes_the_librarys_tokens_and_back() -> None:
    text = "hello wörld <|eos|>\n"
    encoding = backend().encode(text)
    answer = answer_to(TOKENIZE, {"model": "tiny", "prompt": text, "return_token_strs": True})
    assert answer.json() == {
        "count": len(encoding.ids),
        "max_model_len": 100,
        "tokens": encoding.ids,
        "token_strs": encoding.tokens,
    }
    assert answer_to(DETOKENIZE, {"tokens": encoding.ids}).json() == {"prompt": text}


def test_tokens_are_told_while_the_engine_starts() -> None:
    answer = answer_to(TOKENIZE, {"prompt": "hello"}, ready=False)
    assert answer.json() == {
        "count": 1,
        "max_model_len": None,
        "tokens": ids("hello"),
        "token_strs": None,
    }
    assert answer_to(DETOKENIZE, {"tokens": []}, ready=False).json() == {"prompt": ""}


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
async def test_messages_become_the_tokens_of_a_chat(fields: dict[str, Any]) -> None:
    body = {"messages": [USER], **fields}
    fake = FakeEngine(saying("ok"))
    async with gateway(fake) as client:
        assert (await client.post(CHAT, json={"model": "tiny", **body})).status_code == 200
        told = (await client.post(TOKENIZE, json=body)).json()["tokens"]
    told, used = told, list(unpack_ints(fake.added[0].prompt))
    assert told == used


def test_a_prompt_longer_than_the_context_is_counted_in_a_thread() -> None:
    """Its body is nearly as large as one may be."""
    text = "hello" * (MAX_BODY_BYTES // 6)
    answer = answer_to(TOKENIZE, {"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"]) == MAX_BODY_BYTES // 6
    assert answer_to(DETOKENIZE, {"tokens": answer["tokens"]}).json() == {"prompt": text}
