"""Structured output in HTTP requests: what the engine gets, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.text.tokenizer import Tokenizer
from server.gateway.generation.prompts import bad_word_tokens
from server.gateway.grammars.json_schemas import closed
from server.gateway.grammars.structured_outputs import GRAMMAR_FIELDS
from tests.checkpoints import write_tokenizer
from tests.server.gateway.calls import CHAT, CHAT_BODY, PLAIN, PLAIN_BODY, post
from tests.server.gateway.fakes import FakeEngine, gateway, ids, refusing, saying
from topspin.grammars import MAX_GRAMMAR_BYTES
from topspin.messages import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def sampling_of(path: str, **fields: Any) -> SamplingParams:
    fake = FakeEngine(saying("ok"))
    post(path, {**(CHAT_BODY if path == CHAT else PLAIN_BODY), **fields}, fake)
    return fake.added[0].sampling


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_schema_reaches_the_engine_in_each_form(path: str) -> None:
    forms: list[dict[str, Any]] = [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ]
    grammars = {sampling_of(path, **form).grammar for form in forms}
    (grammar,) = grammars
    (found,) = json.loads(grammar)["grammars"]
    assert {key: found["json_schema"][key] for key in SCHEMA} == SCHEMA
    assert found["json_schema"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("extra", "is_closed"),
    [
        ({}, True),
        ({"additionalProperties": True}, False),
        ({"required": ["b"]}, False),
        ({"minProperties": 2}, False),
        ({"anyOf": [{"properties": {"b": {"type": "integer"}}}]}, False),
    ],
)
def test_members_that_a_schema_does_not_name_are_written_only_if_it_needs_them(
    extra: dict[str, Any], is_closed: bool
) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, **extra}
    schema = {"properties": {"list": {"items": inner}}, "$defs": {"one": inner}}
    for part in (closed(inner), closed(schema)["$defs"]["one"]):
        assert (part.get("additionalProperties") is False) is is_closed
    assert closed(schema)["properties"]["list"]["items"] == closed(inner)
    assert closed(schema)["additionalProperties"] is False
    assert "additionalProperties" not in schema


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None}, "ignore_eos": True},
        {"bad_words": []},
    ],
)
def test_nothing_asked_is_no_constraint(fields: dict[str, Any]) -> None:
    sampling = sampling_of(PLAIN, **fields)
    assert (sampling.grammar, sampling.allowed_token_ids, sampling.bad_words) == ("", (), ())


def test_tokens_and_words() -> None:
    sampling = sampling_of(PLAIN, allowed_token_ids=[3, 70], bad_words=["the", " a", "x y"])
    assert sampling.allowed_token_ids == (3, 70)
    assert sampling.bad_words == tuple(tuple(ids(word)) for word in ("the", "a", "x y"))


def test_a_word_is_banned_after_a_space_too_if_that_only_changes_its_first_token(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)  # which has tokens for "the" and " the"
    tokenizer = Tokenizer.from_directory(tmp_path)
    words = bad_word_tokens([" the", "these", "a"], tokenizer)
    texts = [tokenizer.decode(word, skip_special_tokens=False) for word in words]
    assert texts == ["the", " the", "these", " these", "a"]


OUTPUTS = "structured_outputs"
NAMED = FORMAT["json_schema"]
REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_object", "json_schema": NAMED}},
        *("response_format.json_schema", "needs `type`"),
    ),
    (
        {"response_format": {**FORMAT, "json_schema": {"name": "n", "schema": []}}},
        *("response_format.json_schema.schema", "object"),
    ),
    ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "response_format"),
    ({"response_format": FORMAT, "min_tokens": 2}, "min_tokens", "response_format"),
    ({"response_format": FORMAT, OUTPUTS: {"regex": "a"}}, OUTPUTS, "both"),
    ({OUTPUTS: {"regex": "a", "choice": ["a"]}}, OUTPUTS, "`choice`"),
    ({OUTPUTS: {"grammar": 'root ::= "a'}}, "structured_outputs.grammar", "not end"),
    ({OUTPUTS: {"json": "INVALID"}}, "structured_outputs.json", "json` is not valid JSON"),
    (
        {OUTPUTS: {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}},
        *("structured_outputs.regex", str(MAX_GRAMMAR_BYTES)),
    ),
    (
        {OUTPUTS: {"json": {"description": "a" * MAX_GRAMMAR_BYTES}}},
        *("structured_outputs.json", str(MAX_GRAMMAR_BYTES)),
    ),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "vocabulary"),
    ({"bad_words": ["a", "  "]}, "bad_words[1]", "0 tokens"),
    ({"bad_words": ["x" * 65]}, "bad_words[0]", "65 tokens"),
]


async def test_what_cannot_be_followed_is_refused_by_name() -> None:
    fake = FakeEngine(saying("ok"))
    async with gateway(fake) as client:
        for fields, param, reason in REFUSALS:
            for path, body in ((CHAT, CHAT_BODY), (PLAIN, PLAIN_BODY)):
                response = await client.post(path, json={**body, **fields})
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert error["param"].startswith(param)
                assert reason in error["message"]
    assert fake.added == []


REFUSED_BY_NODES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {"required": 5}}}, "structured_outputs.json"),
]


async def test_what_nodes_refuse_is_refused_with_the_field() -> None:
    fake = FakeEngine(refusing("invalid_request_error", 400, "too deep", param="grammar"))
    fake.queues = False
    async with gateway(fake) as client:
        for fields, param in REFUSED_BY_NODES:
            for path, body in ((CHAT, CHAT_BODY), (PLAIN, PLAIN_BODY)):
                for stream in (False, True):
                    response = await client.post(path, json={**body, **fields, "stream": stream})
                    assert response.status_code == 400, response.text
                    error = response.json()["error"]
                    assert (error["param"], error["message"]) == (param, f"`{param}`: too deep")
    assert len(fake.added) == 4 * len(REFUSED_BY_NODES)


def test_bodies_that_may_have_a_grammar_can_be_told_by_their_fields() -> None:
    asked = json.dumps({**CHAT_BODY, "response_format": FORMAT}).encode()
    assert any(field in asked for field in GRAMMAR_FIELDS)
    for name in ("guided_regex", "guided_choice", "regex", "structural_tag", "ebnf"):
        assert f'"{name}"'.encode() in GRAMMAR_FIELDS
    assert not any(field in json.dumps(CHAT_BODY).encode() for field in GRAMMAR_FIELDS)
