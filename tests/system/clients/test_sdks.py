"""The official clients of OpenAI and Anthropic against real processes.

The model has random weights: what it must say (calls of tools, JSON) is forced by grammars, and the
turns of the agent loop are scripted by `tool_choice`. No client is told that this is not its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.checkpoints import make_checkpoint
from tests.system.rig.server import Server

TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{% for message in messages %}
<{% if message.role == "tool" %}result{% else %}{{ message.role }}{% endif %}>{{ message.content }}
{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
"""
USER: Any = {"role": "user", "content": "Serve!"}


class Shot(BaseModel):
    """A tool of the model, and the schema of an answer."""

    stroke: Literal["lob", "drop"]
    spin: bool


SHOT_TOOL: Any = {
    "name": "Shot",
    "description": "plays a shot",
    "input_schema": Shot.model_json_schema(),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("sdks")
    path = make_checkpoint(directory / "tiny", "qwen3_moe", max_position_embeddings=16384)
    template = Path(directory / "tools.jinja")
    template.write_text(TEMPLATE)
    with Server(path, directory, "--transport", "local", "--chat-template", str(template)) as it:
        yield it.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as it:
        yield it


def test_chats_are_parsed_by_pydantic(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=[USER], response_format=Shot, max_tokens=1500
    )
    assert isinstance(answer.choices[0].message.parsed, Shot)
    with client.chat.completions.stream(
        model="tiny", messages=[USER], response_format=Shot, max_tokens=1500
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert isinstance(final.choices[0].message.parsed, Shot)


def test_an_agent_calls_tools_over_several_turns(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Shot)]
    messages: list[Any] = [USER]
    for turn in range(3):
        answer = client.chat.completions.parse(
            model="tiny", messages=messages, tools=tools, tool_choice="required", max_tokens=1500
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert calls
        assert all(isinstance(call.function.parsed_arguments, Shot) for call in calls)
        messages.append(choice.message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"point {turn}"} for call in calls
        ]
    with client.chat.completions.stream(
        model="tiny",
        messages=messages,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "Shot"}},
        max_tokens=1500,
        stream_options={"include_usage": True},
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert len(done) == 1
    assert isinstance(done[0].parsed_arguments, Shot)
    assert final.usage is not None
    assert final.usage.prompt_tokens_details is not None
    # The turns before are the prefix of this one.
    assert (final.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_responses_are_parsed_continued_and_streamed(client: openai.OpenAI) -> None:
    first = client.responses.parse(
        model="tiny", input="Serve!", text_format=Shot, max_output_tokens=1000
    )
    assert isinstance(first.output_parsed, Shot)
    tool: Any = {
        "type": "function",
        "name": "Shot",
        "strict": True,
        "parameters": {**Shot.model_json_schema(), "additionalProperties": False},
    }
    with client.responses.stream(
        model="tiny",
        input="Again!",
        previous_response_id=first.id,
        tools=[tool],
        tool_choice={"type": "function", "name": "Shot"},
        max_output_tokens=1000,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    [call] = final.output
    assert call.type == "function_call"
    assert Shot.model_validate_json(call.arguments)
    [stored] = client.responses.retrieve(final.id).output
    assert stored.type == "function_call"
    assert (stored.call_id, stored.arguments) == (call.call_id, call.arguments)


def test_async_streams_at_once(url: str) -> None:
    async def test() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as own:

            async def ask(seed: int) -> str:
                stream = await own.chat.completions.create(
                    model="tiny", messages=[USER], stream=True, max_tokens=16, seed=seed
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(ask, range(4)))

    assert len(set(asyncio.run(test()))) == 4


def test_anthropics_client(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as own:
        check_anthropic(own)


def check_anthropic(own: anthropic.Anthropic) -> None:
    messages: list[Any] = [USER]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 1500, "tools": [SHOT_TOOL]}
    for _ in range(2):
        with own.messages.stream(
            **asked,
            messages=messages,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        ) as stream:
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        [use] = answer.content
        assert use.type == "tool_use"
        assert Shot.model_validate(use.input)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "point"}
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    count = own.messages.count_tokens(model="tiny", messages=messages, tools=[SHOT_TOOL])
    last = own.messages.create(**{**asked, "max_tokens": 5}, messages=messages)
    usage = last.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens
