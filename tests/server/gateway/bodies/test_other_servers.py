"""Requests of other servers' clients: other names of fields, fields without effect, misspelt ones.

Each row is a request that was refused once, or answered otherwise than its sender meant.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.gateway.bodies.fields import BodyReader
from server.gateway.bodies.generation import OTHER_NAMES
from server.gateway.dialects.chat.batch import BatchBody
from server.gateway.generation.threads import PreparationThreads
from tests.server.gateway.calls import (
    CHAT,
    CHAT_BODY,
    PLAIN,
    PLAIN_BODY,
    USER,
    answer_to,
    events_of,
    post,
    prompt_of,
    scored,
)
from tests.server.gateway.dialects.test_chat_tools import allows
from tests.server.gateway.fakes import (
    FakeEngine,
    backend,
    gateway,
    ids,
    output,
    saying,
    template_of,
)
from topspin.messages import AddRequest, RequestOutput, SamplingParams, TokenLogprobs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGS = {
    "structures": [{"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: CHAT_BODY,
    PLAIN: PLAIN_BODY,
    RESPONSES: {"model": "tiny", "input": "hi"},
    MESSAGES: {"model": "tiny", "messages": [USER], "max_tokens": 5},
}


def sampled(path: str = CHAT, **fields: Any) -> SamplingParams:
    """Return what the engine is asked for by a request with these fields."""
    fake = FakeEngine(saying("ok"))
    post(path, {**BODIES[path], **fields}, fake, max_request_tokens=1000)
    return fake.added[0].sampling


def error_of(path: str, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the error by which a request is refused."""
    response = answer_to(path, {**BODIES[path], **fields}, **options)
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_other_names_of_fields_mean_the_same(path: str) -> None:
    rows: dict[str, tuple[Any, dict[str, Any]]] = {
        "random_seed": (7, {"seed": 7}),
        "n_predict": (3, {"max_tokens": 3}),
        "guided_choice": (["yes", "no"], {"structured_outputs": {"choice": ["yes", "no"]}}),
        "guided_regex": ("a+", {"structured_outputs": {"regex": "a+"}}),
        "regex": ("a+", {"structured_outputs": {"regex": "a+"}}),
        "guided_grammar": ('root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        "grammar": ('root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        "ebnf": ('root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        "guided_json": (SCHEMA, {"structured_outputs": {"json": SCHEMA}}),
        "json_schema": (SCHEMA, {"structured_outputs": {"json": SCHEMA}}),
        "structural_tag": (TAGS, {"structured_outputs": {"structural_tag": TAGS}}),
    }
    assert rows.keys() == OTHER_NAMES.keys()
    for name, (value, same) in rows.items():
        fixed = {} if "seed" in same else {"seed": 1}
        assert sampled(path, **{name: value}, **fixed) == sampled(path, **same, **fixed), name
        refused = error_of(path, {name: value, **same})
        assert refused["param"] == name


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [(CHAT, {"max_tokens": -1}, 980), (PLAIN, {"max_tokens": -1}, 998)],
)
def test_minus_one_token_is_all_that_fit(path: str, fields: dict[str, Any], most: int) -> None:
    assert sampled(path, **fields).max_tokens == most


def test_a_seed_may_be_written_as_a_float() -> None:
    assert sampled(seed=3.0).seed == 3
    assert error_of(CHAT, {"seed": 1.5})["param"] == "seed"


HYBRID = template_of(
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "assistant: {{ '<think>\n' if enable_thinking else '<think></think>' }}"
)
OFF, ON = "<think></think>", "<think>\n"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"enable_thinking": False}, OFF),
        ({"enable_thinking": True}, ON),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled"}}, ON),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {"effort": "none"}}, OFF),
        ({"reasoning": {"effort": "high", "exclude": True}}, ON),
        ({"reasoning": {}, "enable_thinking": True}, ON),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, OFF),
    ],
)
def test_reasoning_is_switched_in_every_servers_words(fields: dict[str, Any], end: str) -> None:
    fake = FakeEngine(saying("hm</think>so"))
    response = post(CHAT, {**CHAT_BODY, **fields}, fake, template=HYBRID, max_request_tokens=1000)
    assert prompt_of(fake.added[0]).endswith(end)
    message = response.json()["choices"][0]["message"]
    assert ("reasoning" in message) == (end == ON and "exclude" not in str(fields))


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("provider", {"order": ["a"]}),
        ("keep_alive", "5m"),
        ("ttl", 60),
        ("nvext", {"greed": 1}),
        ("min_keep", 1),
        ("xtc_threshold", 0.1),
        ("dry_base", 1.75),
        ("usage", {"include": True}),
    ],
)
def test_what_others_document_is_ignored_and_named(path: str, name: str, value: object) -> None:
    response = answer_to(path, {**BODIES[path], name: value})
    assert response.status_code == 200, response.text
    assert response.headers["x-topspin-ignored"] == name


def test_messages_come_back_as_other_servers_wrote_them() -> None:
    names = ("id", "partial", "reasoning_details", "thinking_blocks")
    message = {**USER, **dict.fromkeys(names, "x")}
    response = answer_to(CHAT, {**CHAT_BODY, "messages": [message]})
    named = {f"messages.{name}" for name in names}
    assert set(response.headers["x-topspin-ignored"].split(", ")) == named


@pytest.mark.parametrize(
    ("path", "fields", "param", "meant"),
    [
        (CHAT, {"temprature": 1}, "temprature", "temperature"),
        (PLAIN, {"max_token": 1}, "max_token", "max_tokens"),
        (RESPONSES, {"max_output_token": 1}, "max_output_token", "max_output_tokens"),
        (CHAT, {"kv_retreival": {}}, "kv_retreival", "kv_retrieval"),
        (CHAT, {"stream_options": {"include_usages": True}}, None, "include_usage"),
        (CHAT, {"messages": [{**USER, "tool_call": []}]}, "messages[0].tool_call", "tool_calls"),
    ],
)
def test_a_misspelt_field_is_refused_with_what_was_meant(
    path: str, fields: dict[str, Any], param: str | None, meant: str
) -> None:
    error = error_of(path, fields)
    assert f"did you mean `{meant}`?" in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"zip": 1, "stream_options": {"zap": 1}, "stream": True}, "zip, stream_options.zap"),
        (
            CHAT,
            {"messages": [{**USER, "zip": {}}, {**USER, "zap": 1}]},
            "messages.zip, messages.zap",
        ),
        (PLAIN, {"zip": [1], "a b": 1, "\u00e9": 1}, "zip, and 2 more"),
        (RESPONSES, {"input": [{**USER, "zip": 1}], "text": {"zap": 1}}, "text.zap, input.zip"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "zip": 1}]}]},
            "messages.content.zip",
        ),
    ],
)
def test_the_operator_may_have_unknown_fields_ignored(
    path: str, fields: dict[str, Any], named: str
) -> None:
    assert answer_to(path, {**BODIES[path], **fields}).status_code == 400
    response = answer_to(path, {**BODIES[path], **fields}, ignores_unknown=True)
    assert response.status_code == 200, response.text
    assert response.headers["x-topspin-ignored"] == named
    # What is wrong in a field that is known stays so.
    assert answer_to(path, {**BODIES[path], "zip": 1, "top_p": 2}, ignores_unknown=True).is_error


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {"prompt": "hi", "zip": 1}, "zip"),
        ("/tokenize", {"messages": [{**USER, "zip": 1}], "zap": 1}, "zap, messages.zip"),
        ("/detokenize", {"tokens": [1], "zip": 1}, "zip"),
        ("/v1/messages/count_tokens", {"messages": [USER], "zip": 1}, "zip"),
        ("/v1/responses/input_tokens", {"input": "hi", "zip": 1}, "zip"),
    ],
)
def test_so_they_are_where_nothing_is_generated(
    path: str, body: dict[str, Any], named: str
) -> None:
    assert answer_to(path, body).status_code == 400
    response = answer_to(path, body, ignores_unknown=True)
    assert response.status_code == 200, response.text
    assert response.headers["x-topspin-ignored"] == named


def test_many_unknown_fields_are_counted() -> None:
    body = {**CHAT_BODY, **{f"field_{idx}": idx for idx in range(100)}}
    named = answer_to(CHAT, body, ignores_unknown=True).headers["x-topspin-ignored"].split(", ")
    assert (len(named), named[-1]) == (65, "and 36 more")


def test_tokens_are_named_by_their_ids() -> None:
    asked = {"return_tokens_as_token_ids": True}
    chat = post(CHAT, {**CHAT_BODY, "logprobs": True, "top_logprobs": 1, **asked}, fake_of("he"))
    [entry] = chat.json()["choices"][0]["logprobs"]["content"]
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{ids('he')[0]}"
    plain = post(PLAIN, {**PLAIN_BODY, "logprobs": 1, **asked}, fake_of("he"))
    assert plain.json()["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ids('he')[0]}"]


def fake_of(text: str) -> FakeEngine:
    return FakeEngine(scored(text))


@pytest.mark.parametrize(("side", "kept"), [(None, "de"), ("left", "de"), ("right", "ab")])
def test_a_prompt_is_cut_on_either_side(side: str | None, kept: str) -> None:
    fake = FakeEngine(saying("ok"))
    asked = {"prompt": "abcde", "truncate_prompt_tokens": 2, "truncation_side": side}
    post(PLAIN, {**PLAIN_BODY, **asked}, fake)
    assert prompt_of(fake.added[0]) == kept


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_last_message(stream: bool) -> None:
    messages = [USER, {"role": "assistant", "content": "So "}]
    asked = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    body = {**CHAT_BODY, "messages": messages, "stream": stream, **asked}
    response = post(CHAT, body, FakeEngine(saying("ok")))
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events_of(response)]
        assert "".join(delta.get("content", "") for delta in deltas) == "So ok"
    else:
        assert response.json()["choices"][0]["message"]["content"] == "So ok"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_logprobs": -1}, "prompt_logprobs"), ({"logprobs": 4}, "logprobs")],
)
def test_the_operator_bounds_log_probabilities(fields: dict[str, Any], param: str) -> None:
    error = error_of(PLAIN, fields, max_logprobs=3)
    assert error["param"] == param
    assert "at most 3" in error["message"]
    assert "--max-logprobs" in error["message"]
    assert post(PLAIN, {**PLAIN_BODY, "logprobs": 3}, fake_of("h"), max_logprobs=3)


def test_an_operator_may_have_the_whole_vocabulary_shown_beside_a_prompts_tokens() -> None:
    fake = fake_of("h")
    answer = post(
        PLAIN, {**PLAIN_BODY, "prompt": "he", "prompt_logprobs": -1}, fake, max_logprobs=-1
    )
    vocabulary = backend().get_vocab_size()
    assert fake.added[0].sampling.prompt_logprobs == vocabulary
    assert len(answer.json()["choices"][0]["prompt_logprobs"]) == len(ids("he"))
    assert error_of(PLAIN, {"logprobs": -1}, max_logprobs=-1)["param"] == "logprobs"
    long = {"prompt": "h" * 99, "prompt_logprobs": -1, "n": 64}
    assert "log-probabilities of prompts" in error_of(PLAIN, long, max_logprobs=-1)["message"]


def test_log_probabilities_of_tokens_that_are_named() -> None:
    """They are asked of the engine, and shown whatever number of the likeliest is."""
    wanted = [*ids("z"), *ids("h")]
    asked = {"logprobs": 0, "logprob_token_ids": wanted}
    fake = fake_of("h")
    answer = post(PLAIN, {**PLAIN_BODY, **asked}, fake).json()
    sampling = fake.added[0].sampling
    assert (sampling.logprobs, sampling.logprob_token_ids) == (0, tuple(wanted))
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"h": -0.5, "z": -9999.0}]
    chat = post(CHAT, {**CHAT_BODY, **asked, "logprobs": True}, fake_of("h")).json()
    [entry] = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in entry["top_logprobs"]] == ["h", "z"]


def test_the_chosen_token_is_beside_those_that_are_named() -> None:
    def script(request: AddRequest) -> Iterator[RequestOutput]:
        entry = TokenLogprobs(-0.5, request.sampling.logprob_token_ids, (-2.0,))
        yield output(request, ids("h"), logprobs=(entry,), finish_reason="length")

    asked = {"logprobs": True, "logprob_token_ids": ids("z")}
    chat = post(CHAT, {**CHAT_BODY, **asked}, FakeEngine(script)).json()
    [entry] = chat["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in entry["top_logprobs"]] == [
        ("h", -0.5),
        ("z", -2.0),
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logprob_token_ids": [1]}, "needs `logprobs`"),
        ({"logprob_token_ids": [10**6], "logprobs": 1}, "outside the vocabulary"),
        ({"logprob_token_ids": [1] * 129, "logprobs": 1}, "128"),
    ],
)
def test_tokens_that_cannot_be_named_so(fields: dict[str, Any], said: str) -> None:
    error = error_of(PLAIN, fields)
    assert error["param"] == "logprob_token_ids"
    assert said in error["message"]


async def test_a_long_batch_is_prepared_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its conversations are many where its bytes are few, and its fields are read once."""
    runs, reads = [], []

    async def run(self: PreparationThreads, work: Callable[[], Any]) -> Any:
        runs.append(work)
        return work()

    def read(self: BodyReader, data: Any, kind: Any, **more: Any) -> Any:
        reads.append(kind)
        return plain(self, data, kind, **more)

    plain = BodyReader.read
    monkeypatch.setattr(PreparationThreads, "run", run)
    monkeypatch.setattr(BodyReader, "read", read)
    async with gateway(FakeEngine(saying("ok"))) as client:
        for count in (1, 256):
            body = {"messages": [[USER]] * count, "max_tokens": 1}
            assert (await client.post(f"{CHAT}/batch", json=body)).status_code == 200
    assert len(runs) == 1
    assert reads == [BatchBody, BatchBody]


async def test_a_batch_of_chats_has_a_choice_each() -> None:
    fake = FakeEngine(saying("ok"))
    one, two = [USER], [{"role": "user", "content": "hello"}]
    path, body = f"{CHAT}/batch", {"messages": [one, two], "seed": 5, "max_tokens": 3}
    async with gateway(fake) as client:
        answer = (await client.post(path, json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert [prompt_of(each) for each in fake.added] == [
            "user: hi\nassistant: ",
            "user: hello\nassistant: ",
        ]
        assert {each.sampling.seed for each in fake.added} == {5}
        prompt_tokens = sum(len(ids(prompt_of(each))) for each in fake.added)
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
        for fields, param in (
            ({"stream": True}, "stream"),
            ({"n": 2}, "n"),
            ({"messages": [one, [{"role": "user"}]]}, "messages[1][0].content"),
            ({"messages": []}, "messages"),
        ):
            refused = await client.post(path, json={**body, **fields})
            assert refused.status_code == 400, fields
            assert refused.json()["error"]["param"] == param


async def test_the_small_routes() -> None:
    fake = FakeEngine()
    async with gateway(fake, root_path="/llm") as client:
        for method in ("GET", "POST"):
            assert (await client.request(method, "/ping")).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0}
        waiting = asyncio.create_task(client.post(PLAIN, json=PLAIN_BODY))
        await fake.request_came.wait()
        assert (await client.get("/load")).json() == {"server_load": 1}
        waiting.cancel()
        info = (await client.get("/tokenizer_info")).json()
        assert info["tokenizer_class"]
        assert "add_generation_prompt" in info["chat_template"]
        # As a proxy passes it on that does not take its prefix away.
        assert (await client.get("/llm/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await client.get("/llmv1/models")).status_code == 404


THINKS = template_of(
    "{% for message in messages %}{{ message.content }}{% endfor %}<think>"
    "{% set marks = ['</think>'] %}"
)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_reasoning_has_a_budget_of_tokens(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its marks are tokens; here those of the tokenizer stand for them."""
    begin, end = "<|im_start|>", "<|im_end|>"
    monkeypatch.setattr("server.gateway.dialects.chat.tools.BEGIN", begin)
    monkeypatch.setattr("server.gateway.dialects.chat.tools.END", end)
    fake = FakeEngine(saying("ok", finish_reason="stop"))
    body = {**BODIES[path], "thinking": {"type": "enabled", "budget_tokens": 3}}
    post(path, body, fake, template=THINKS, max_request_tokens=1000)
    grammar = fake.added[0].sampling.grammar
    assert allows(grammar, f"abc{end}so it is")
    assert allows(grammar, f"{end}so")
    assert not allows(grammar, f"abcd{end}so")
    assert not allows(grammar, f"abc{end}so{begin}abc{end}")


def test_a_budget_is_ignored_or_refused_by_name() -> None:
    response = answer_to(CHAT, {**CHAT_BODY, "thinking_token_budget": 3})
    assert response.headers["x-topspin-ignored"] == "thinking_token_budget"
    assert sampled(thinking_token_budget=-1).grammar == ""
    refused = answer_to(CHAT, {**CHAT_BODY, "thinking_token_budget": 3}, template=THINKS)
    assert refused.json()["error"]["param"] == "thinking_token_budget"
    assert "several tokens" in refused.json()["error"]["message"]
    # Anthropic's clients send one to any model.
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 3}}
    for template in (None, THINKS):
        given: dict[str, Any] = {} if template is None else {"template": template}
        response = answer_to(MESSAGES, {**BODIES[MESSAGES], **thinking}, **given)
        assert "thinking.budget_tokens" in response.headers["x-topspin-ignored"].split(", ")


NEWER_TAGS = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "begin": "<f=add>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            }
        ],
    }
}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"structural_tag": TAGS}},
        {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
        {"response_format": {"type": "structural_tag", **TAGS}},
        {"response_format": {"type": "structural_tag", **NEWER_TAGS}},
    ],
)
def test_text_behind_a_trigger_has_a_form(fields: dict[str, Any]) -> None:
    grammar = sampled(**fields).grammar
    assert allows(grammar, "so")
    assert allows(grammar, 'so <f=add>{"a": 1}</f> and <f=add>{"a": 2}</f>.')
    assert not allows(grammar, "so <f=add>1</f>")
    assert not allows(grammar, 'so <f=sub>{"a": 1}</f>')


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ({**TAGS, "triggers": ["<g"]}, "no trigger begins"),
        ({"structures": TAGS["structures"]}, "needs `structures` and `triggers`"),
        ({**TAGS, **NEWER_TAGS}, "alone"),
    ],
)
def test_tags_that_cannot_be_are_refused(tags: dict[str, Any], said: str) -> None:
    error = error_of(CHAT, {"structured_outputs": {"structural_tag": tags}})
    assert said in error["message"]
    assert error["param"] == "structured_outputs.structural_tag"
    assert error_of(CHAT, {"response_format": {"type": "text", **tags}})["param"]


@pytest.mark.parametrize("name", ["use_beam_search", "kv_transfer_params"])
def test_what_is_refused_says_why(name: str) -> None:
    message = error_of(CHAT, {name: [1]})["message"]
    assert message.startswith(f"`{name}` is not supported by this server: ")
