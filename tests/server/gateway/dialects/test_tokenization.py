"""POST /tokenize and /detokenize: the same tokens as a request's, and as the library's."""

from __future__ import annotations

from server.gateway.dialects.tokenization import MAX_BODY_BYTES
from tests.server.gateway.calls import PROMPT, USER, answer_to
from tests.server.gateway.fakes import backend, ids

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


def test_fields_without_effect_are_taken() -> None:
    body = {"messages": [USER], "tools": [], "chat_template": None, "add_special_tokens": True}
    assert answer_to(TOKENIZE, body).json()["tokens"] == ids(PROMPT)


def test_a_prompt_longer_than_the_context_is_counted_in_a_thread() -> None:
    """Its body is nearly as large as one may be."""
    text = "hello" * (MAX_BODY_BYTES // 6)
    answer = answer_to(TOKENIZE, {"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"]) == MAX_BODY_BYTES // 6
    assert answer_to(DETOKENIZE, {"tokens": answer["tokens"]}).json() == {"prompt": text}
