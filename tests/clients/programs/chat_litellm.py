"""litellm's calls: `chat_litellm.py URL`. Knows only what its own environment has."""

import asyncio
import sys
from typing import Literal

import litellm
from pydantic import BaseModel, ConfigDict, Field


class Trip(BaseModel):
    # Without it a small model adds properties of its own, without end.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=30)


TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "books a trip",
        "parameters": Trip.model_json_schema(),
    },
}
NUM_TOKENS = 8
CALL = {
    "model": "openai/tiny",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "num_retries": 0,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Name three colours."}],
}


def check_chat() -> None:
    whole = litellm.completion(**CALL, max_tokens=NUM_TOKENS)
    text = whole.choices[0].message.content
    assert text, whole
    assert whole.choices[0].finish_reason == "length", whole
    assert whole.usage.completion_tokens == NUM_TOKENS, whole.usage
    options = {"include_usage": True}
    stream = litellm.completion(**CALL, max_tokens=NUM_TOKENS, stream=True, stream_options=options)
    built = litellm.stream_chunk_builder(list(stream))
    assert built.choices[0].message.content == text, built
    assert built.choices[0].finish_reason == "length", built
    assert built.usage.completion_tokens == NUM_TOKENS, built.usage
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens, built.usage


async def check_many() -> None:
    calls = [litellm.acompletion(**CALL, max_tokens=4, n=2) for _ in range(4)]
    for answer in await asyncio.gather(*calls):
        assert len(answer.choices) == 2, answer
        assert answer.usage.completion_tokens == 8, answer.usage


def check_tools() -> None:
    named = {"type": "function", "function": {"name": "book"}}
    for choice in ("required", named):
        asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        whole = litellm.completion(**CALL, **asked)
        [call] = whole.choices[0].message.tool_calls
        assert call.function.name == "book", whole
        Trip.model_validate_json(call.function.arguments)
        stream = litellm.completion(**CALL, **asked, stream=True)
        built = litellm.stream_chunk_builder(list(stream))
        [streamed] = built.choices[0].message.tool_calls
        assert streamed.function.name == "book", built
        assert streamed.function.arguments == call.function.arguments, built


def check_schema() -> None:
    answer = litellm.completion(**CALL, response_format=Trip)
    Trip.model_validate_json(answer.choices[0].message.content)


def check_completion() -> None:
    asked = {key: value for key, value in CALL.items() if key not in ("messages", "model")}
    answer = litellm.text_completion(
        model="text-completion-openai/tiny", prompt="One, two,", max_tokens=5, **asked
    )
    assert answer.choices[0].text, answer
    assert answer.usage.completion_tokens == 5, answer.usage


def check_error() -> None:
    refusal = ""
    try:
        litellm.completion(**CALL, max_tokens=10**6)
    except litellm.BadRequestError as error:
        refusal = str(error)
    assert "1000000 requested output tokens" in refusal, refusal


def check_responses() -> None:
    asked = {key: CALL[key] for key in ("model", "api_base", "api_key", "temperature")}
    answer = litellm.responses(input="Name three colours.", max_output_tokens=16, **asked)
    assert 0 < answer.usage.output_tokens <= 16, answer
    assert answer.output[0].content[0].text, answer


if __name__ == "__main__":
    check_chat()
    asyncio.run(check_many())
    check_tools()
    check_schema()
    check_completion()
    check_error()
    check_responses()
