"""Tools on the default model, whose template shows none, as OpenAI's SDK and agents send them.

The tools have the schemas that Claude Code (`input_schema` with `$schema`, lists of objects) and
Codex (functions beside a namespace and a built-in tool) send. The model is too small to choose
well: what is asked for must be called, with arguments that follow the schema, and its result taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import httpx
import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from models.sources.smollm2_moe import pull
from tests.system.rig.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# Of an answer that must be a call, and of one that need not.
MAX_TOKENS, FEW_TOKENS = 200, 40
ASKED = "List the files in the folder src with the shell."
TEXT = {"type": "string"}
TODO = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "minLength": 1, "maxLength": 40},
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
    },
    "required": ["content", "status"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "run": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command to run", "maxLength": 40},
            "timeout": {"type": "number", "description": "in milliseconds (at most 600000)"},
            "mode": {"anyOf": [{"type": "string", "enum": ["ask", "do"]}, {"type": "null"}]},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    "write_todos": {
        "type": "object",
        "properties": {
            "todos": {"type": "array", "items": TODO, "minItems": 1, "maxItems": 2},
            "owner": {
                "type": "object",
                "properties": {"name": {**TEXT, "maxLength": 20}, "team": {"type": ["null"]}},
                "required": ["name"],
            },
        },
        "required": ["todos"],
        "additionalProperties": False,
    },
    "close_agent": {
        "type": "object",
        "properties": {"target": {**TEXT, "maxLength": 20}},
        "required": ["target"],
    },
    "get_goal": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
}
NAMESPACE = "agents"


class Call(NamedTuple):
    """A call of a tool, and what the client needs to answer it; `where`: its namespace."""

    name: str
    arguments: Any
    id: str
    where: str | None = None


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # A busy machine refuses nobody for the wait.
    flags = ("--kv-cache-memory", "256MiB", "--max-ttft", "0")
    with Server(pull(progress=False), tmp_path_factory.mktemp("tools"), *flags) as server:
        yield server.url


def most_tokens(choice: str) -> int:
    return FEW_TOKENS if choice == "auto" else MAX_TOKENS


def described(name: str) -> dict[str, Any]:
    return {"name": name, "description": f"Does what {name} says."}


def chat_calls(url: str, choice: str, *, stream: bool) -> list[Call]:
    tools: Any = [
        {"type": "function", "function": {**described(each), "parameters": SCHEMAS[each]}}
        for each in SCHEMAS
    ]
    named: Any = {"type": "function", "function": {"name": choice}}
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": ASKED}],
        "tools": tools,
        "tool_choice": named if choice in SCHEMAS else choice,
        "parallel_tool_calls": False,
        "max_tokens": most_tokens(choice),
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        if stream:
            state = ChatCompletionStreamState()
            for chunk in client.chat.completions.create(**asked, stream=True):
                state.handle_chunk(chunk)
            message: Any = state.current_completion_snapshot.choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        calls = [
            Call(each.function.name, json.loads(each.function.arguments), each.id)
            for each in message.tool_calls or ()
        ]
        results = [{"role": "tool", "tool_call_id": each.id, "content": "a.py"} for each in calls]
        said = {"role": "assistant", "content": message.content, "tool_calls": message.tool_calls}
        turns = [*asked["messages"], {key: said[key] for key in said if said[key]}, *results]
        last = {**asked, "messages": turns, "tool_choice": "none", "max_tokens": 4}
        assert client.chat.completions.create(**last).choices[0].message.content
    return calls


def messages_calls(url: str, choice: str, *, stream: bool) -> list[Call]:
    tools: Any = [{**described(each), "input_schema": SCHEMAS[each]} for each in SCHEMAS]
    kind = {"auto": "auto", "required": "any"}.get(choice, "tool")
    named = {"name": choice} if kind == "tool" else {}
    asked: dict[str, Any] = {
        "model": "tiny",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}]}],
        "tools": tools,
        "tool_choice": {"type": kind, **named, "disable_parallel_tool_use": True},
        "max_tokens": most_tokens(choice),
    }
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        calls = [
            Call(each.name, each.input, each.id)
            for each in message.content
            if each.type == "tool_use"
        ]
        results: Any = [
            {"type": "tool_result", "tool_use_id": each.id, "content": "a.py"} for each in calls
        ]
        turns = [
            *asked["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
        ]
        last = {**asked, "messages": turns, "tool_choice": {"type": "auto"}, "max_tokens": 4}
        assert client.messages.create(**last).content
    return calls


def responses_calls(url: str, choice: str, *, stream: bool) -> list[Call]:
    functions: dict[str, Any] = {
        each: {"type": "function", **described(each), "strict": False, "parameters": schema}
        for each, schema in SCHEMAS.items()
    }
    inner = functions.pop("close_agent")
    tools: Any = [
        *functions.values(),
        {"type": "namespace", "name": NAMESPACE, "description": "Agents.", "tools": [inner]},
    ]
    if choice == "auto":
        tools.append({"type": "web_search", "external_web_access": False})
    named = {"type": "function", "name": choice}
    if choice == "close_agent":
        named["namespace"] = NAMESPACE
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": [{"type": "message", "role": "user", "content": ASKED}],
        "instructions": "Be brief.",
        "tools": tools,
        "tool_choice": named if choice in SCHEMAS else choice,
        "parallel_tool_calls": False,
        "max_output_tokens": most_tokens(choice),
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        if stream:
            *_, last_event = client.responses.create(**asked, stream=True)
            response = last_event.response
        else:
            response = client.responses.create(**asked)
        items = [each.model_dump(exclude_none=True) for each in response.output]
        calls = [
            Call(
                each["name"], json.loads(each["arguments"]), each["call_id"], each.get("namespace")
            )
            for each in items
            if each["type"] == "function_call"
        ]
        results = [
            {"type": "function_call_output", "call_id": each.id, "output": "a.py"} for each in calls
        ]
        turns = [*asked["input"], *items, *results]
        last = {**asked, "input": turns, "tool_choice": "auto", "max_output_tokens": 4}
        assert client.responses.create(**last).output
    return calls


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", ["auto", "required", "run", "write_todos", "close_agent"])
@pytest.mark.parametrize("ask", [chat_calls, messages_calls, responses_calls])
def test_calls_are_what_was_asked_for(url: str, ask: Any, choice: str, *, stream: bool) -> None:
    calls = ask(url, choice, stream=stream)
    assert choice == "auto" or calls
    for call in calls:
        jsonschema.validate(call.arguments, SCHEMAS[call.name])
        assert choice in ("auto", "required", call.name)
        is_inner = ask is responses_calls and call.name == "close_agent"
        assert call.where == (NAMESPACE if is_inner else None)


def test_the_answer_says_that_the_prompt_is_a_generic_one(url: str) -> None:
    tool = {"type": "function", "function": {"name": "get_goal"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.headers["x-topspin-tools"] == "generic"
