"""langchain-openai's calls: `chat_langchain.py URL`. Knows only what its own environment has."""

import asyncio
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

NUM_TOKENS = 8
SERVER = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}
QUESTION = "Name three colours."


class Trip(BaseModel):
    """A trip to book."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=30)


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


def chat(**fields: object) -> ChatOpenAI:
    return ChatOpenAI(model="tiny", temperature=0, **SERVER, **fields)


def check_stream() -> None:
    model = chat(max_tokens=NUM_TOKENS, stream_usage=True)
    whole = model.invoke(QUESTION)
    assert whole.content, whole
    assert whole.usage_metadata["output_tokens"] == NUM_TOKENS, whole
    chunks = list(model.stream(QUESTION))
    assert len(chunks) > 3, chunks
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.content == whole.content, (joined, whole)
    assert joined.usage_metadata == whole.usage_metadata, (joined, whole)
    assert joined.response_metadata["finish_reason"] == "length", joined


def check_batch() -> None:
    answers = chat(max_tokens=2).batch([QUESTION, "Hello", "Why?"])
    assert [answer.usage_metadata["output_tokens"] for answer in answers] == [2, 2, 2], answers


async def check_async() -> None:
    chunks = [chunk async for chunk in chat(max_tokens=4).astream(QUESTION)]
    assert "".join(chunk.content for chunk in chunks), chunks


def check_tools() -> None:
    for choice in ("any", "weather"):
        one = {"strict": True, "parallel_tool_calls": False}
        model = chat().bind_tools([weather], tool_choice=choice, **one)
        asked = HumanMessage("How is the weather?")
        answer = model.invoke([asked])
        [call] = answer.tool_calls
        assert call["name"] == "weather", answer
        assert not answer.invalid_tool_calls, answer
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage), result
        assert result.content == f"sunny in {call['args']['city']}", result
        chunks = list(model.stream([asked]))
        joined = chunks[0]
        for chunk in chunks[1:]:
            joined += chunk
        assert [(each["name"], each["args"]) for each in joined.tool_calls] == [
            (call["name"], call["args"])
        ], joined
        # The call and its result go back to the model, which may answer or call once more.
        told = chat(max_tokens=NUM_TOKENS).bind_tools([weather]).invoke([asked, answer, result])
        assert told.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"], told


def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        model = chat().with_structured_output(Trip, method=method, include_raw=True, strict=True)
        answer = model.invoke("Book a trip.")
        assert answer["parsing_error"] is None, answer
        assert isinstance(answer["parsed"], Trip), answer
    [*_, last] = chat().with_structured_output(Trip).stream("Book a trip.")
    assert isinstance(last, Trip), last


def check_completion() -> None:
    model = OpenAI(model="tiny", temperature=0, max_tokens=NUM_TOKENS, **SERVER)
    whole = model.invoke("One, two,")
    assert whole
    assert "".join(model.stream("One, two,")) == whole


def check_responses() -> None:
    answer = chat(max_tokens=NUM_TOKENS, use_responses_api=True).invoke(QUESTION)
    assert answer.text, answer
    assert answer.usage_metadata["output_tokens"] == NUM_TOKENS, answer


if __name__ == "__main__":
    check_stream()
    check_batch()
    asyncio.run(check_async())
    check_tools()
    check_structured_output()
    check_completion()
    check_responses()
