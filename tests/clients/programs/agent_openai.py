"""An agent of openai-agents with several tool turns: `agent_openai.py URL`.

The default model cannot choose tools sensibly. So every turn must call one (`tool_choice`
"required"), and which ones are offered is scripted: `look_up`, then `add`, then `finish`. What the
model writes into the calls is its own. Knows only what its own environment has.
"""

import asyncio
import json
import sys
from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import Field

PRICES = {"apple": 3, "pear": 5}
Digit = Annotated[int, Field(ge=0, le=9)]
TURNS = ["look_up", "add", "finish"]


class Shop:
    """The tools, and the calls so far: the turn's tool is the only one offered."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []

    def called(self, name: str, **arguments: object) -> None:
        self.calls.append((name, arguments))

    def tools(self) -> list:
        def look_up(fruit: Literal["apple", "pear"]) -> str:
            """Tells the price of a fruit."""
            self.called("look_up", fruit=fruit)
            return json.dumps({"fruit": fruit, "price": PRICES[fruit]})

        def add(a: Digit, b: Digit) -> int:
            """Adds two numbers."""
            self.called("add", a=a, b=b)
            return a + b

        def finish(verdict: Literal["buy", "leave"]) -> str:
            """Ends the shopping."""
            self.called("finish", verdict=verdict)
            return verdict

        def offered(turn: int):
            return lambda context, agent: len(self.calls) == turn

        return [
            function_tool(tool, is_enabled=offered(turn))
            for turn, tool in enumerate((look_up, add, finish))
        ]


async def check(model_type: type, *, streamed: bool) -> None:
    shop = Shop()
    async with AsyncOpenAI(
        base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        agent = Agent(
            name="shopper",
            instructions="Use the functions.",
            model=model_type(model="tiny", openai_client=client),
            model_settings=ModelSettings(
                tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=100
            ),
            reset_tool_choice=False,
            tools=shop.tools(),
            tool_use_behavior=StopAtTools(stop_at_tool_names=["finish"]),
        )
        question = "Buy me some fruit."
        if streamed:
            result = Runner.run_streamed(agent, question, max_turns=4)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, question, max_turns=4)
    assert [name for name, _ in shop.calls] == TURNS, shop.calls
    assert result.final_output == shop.calls[-1][1]["verdict"], result.final_output
    # The request, and a call and its result for each turn.
    history = result.to_input_list()
    assert len(history) == 1 + 2 * len(TURNS), history
    arguments = [json.loads(item["arguments"]) for item in history if "arguments" in item]
    assert arguments == [arguments for _, arguments in shop.calls], history
    assert result.context_wrapper.usage.requests == len(TURNS), result.context_wrapper.usage


if __name__ == "__main__":
    set_tracing_disabled(True)
    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        for how in (False, True):
            asyncio.run(check(model, streamed=how))
