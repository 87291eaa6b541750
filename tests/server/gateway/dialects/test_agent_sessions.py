"""Sessions shaped like coding agents': what they vary without meaning costs no cached prefix."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.gateway.calls import CHAT, CHAT_BODY, events_of, post, prompt_of
from tests.server.gateway.dialects.test_tools import TOOLS
from tests.server.gateway.fakes import FakeEngine, gateway, ids, output, saying, tool_template
from topspin.messages import AddRequest, RequestOutput, unpack_ints

NUM_TURNS = 8
BLOCK_SIZE = 16
Turn = Callable[[int, random.Random], dict[str, Any]]
SYSTEM = "You are a coding agent. " * 12
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "required": ["path", "line"],
}


def shuffled(value: Any, rng: random.Random) -> Any:
    """Return the same JSON with the keys of its objects in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def arguments(turn: int) -> dict[str, Any]:
    return {"path": f"src/file_{turn}.py", "line": turn}


def result(turn: int) -> str:
    return f"def function_{turn}(): return {turn}\n" * 4


def marked(turn: int, last: int, block: dict[str, Any]) -> dict[str, Any]:
    """Return the block with the mark of the cache's end, which moves to the last one."""
    return {**block, "cache_control": {"type": "ephemeral"}} if turn == last else block


def anthropic_turn(num_turns: int, rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend the tests."}]
    for turn in range(num_turns):
        use = {"type": "tool_use", "id": f"t{turn}", "name": "read", "input": arguments(turn)}
        text = {"type": "text", "text": f"I read file {turn}."}
        messages.append({"role": "assistant", "content": [text, use]})
        answer = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": result(turn)}
        messages.append({"role": "user", "content": [marked(turn, num_turns - 1, answer)]})
    tool = {"name": "read", "description": "Reads.", "input_schema": shuffled(SCHEMA, rng)}
    billing = f"x-anthropic-billing-header: cc_version=2; cch={rng.randrange(16**5):05x};"
    return {
        "model": "tiny",
        "max_tokens": 5,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [shuffled(tool, rng)],
        "messages": messages,
    }


def chat_turn(num_turns: int, rng: random.Random) -> dict[str, Any]:
    billing = {"type": "text", "text": f"x-anthropic-billing-header: {rng.random()}"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [billing, {"type": "text", "text": SYSTEM}]},
        {"role": "user", "content": "Mend the tests."},
    ]
    for turn in range(num_turns):
        indent = rng.choice([None, 1])
        function = {"name": "read", "arguments": json.dumps(arguments(turn), indent=indent)}
        call = {"id": f"t{turn}", "type": "function", "function": shuffled(function, rng)}
        content = f"I read file {turn}."
        messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        part = marked(turn, num_turns - 1, {"type": "text", "text": result(turn)})
        messages.append({"role": "tool", "tool_call_id": f"t{turn}", "content": [part]})
    function = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
    tool = shuffled({"type": "function", "function": function}, rng)
    return {"model": "tiny", "max_tokens": 5, "messages": messages, "tools": [tool]}


def responses_turn(num_turns: int, rng: random.Random) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": "Mend the tests."}]
    for turn in range(num_turns):
        text = {"type": "output_text", "text": f"I read file {turn}.", "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [text]})
        call = {"type": "function_call", "call_id": f"t{turn}", "name": "read"}
        items.append({**call, "arguments": json.dumps(arguments(turn)), "id": f"fc{rng.random()}"})
        answer = {"type": "function_call_output", "call_id": f"t{turn}", "output": result(turn)}
        items.append(shuffled(answer, rng))
    tool = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}
    body = {"model": "tiny", "max_output_tokens": 5, "input": items, "instructions": SYSTEM}
    return {**body, "tools": [shuffled(tool, rng)], "prompt_cache_key": str(rng.random())}


@pytest.mark.parametrize(
    ("path", "turn"),
    [("/v1/messages", anthropic_turn), (CHAT, chat_turn), ("/v1/responses", responses_turn)],
    ids=["messages", "chat", "responses"],
)
async def test_a_session_hits_the_cache_for_all_that_it_repeats(path: str, turn: Turn) -> None:
    """All but the generation prompt's tokens of a turn are the next one's prefix."""
    fake, rng = FakeEngine(saying("ok")), random.Random(5)
    options: dict[str, Any] = {"template": tool_template(), "max_request_tokens": 20_000}
    async with gateway(fake, **options) as client:
        for number in range(NUM_TURNS):
            response = await client.post(path, json=turn(number, rng))
            assert response.status_code == 200, response.text
    prompts = [list(unpack_ints(request.prompt)) for request in fake.added]
    hits = possible = 0
    for before, prompt in itertools.pairwise(prompts):
        same = 0
        while same < min(len(before), len(prompt)) and before[same] == prompt[same]:
            same += 1
        hits += same // BLOCK_SIZE * BLOCK_SIZE
        possible += len(before) // BLOCK_SIZE * BLOCK_SIZE
    assert possible > 8_000
    assert hits >= 0.95 * possible


@pytest.mark.parametrize("stream", [False, True])
def test_the_report_names_the_message_by_which_a_prompt_differs(stream: bool) -> None:
    texts = {"system": "Be kind.", "user": "One.", "assistant": "Two."}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    messages.append({"role": "user", "content": "Three."})
    body = {**CHAT_BODY, "messages": messages, "tools": TOOLS, "report_prefix_cache": True}
    options: dict[str, Any] = {"template": tool_template(), "max_request_tokens": 1000}

    def report(cached_text: str) -> dict[str, Any]:
        def script(request: AddRequest) -> list[RequestOutput]:
            num_cached = len(ids(cached_text))
            return [output(request, ids("ok"), finish_reason="stop", num_cached_tokens=num_cached)]

        response = post(CHAT, {**body, "stream": stream}, FakeEngine(script), **options)
        answer = events_of(response)[0] if stream else response.json()
        found: dict[str, Any] = answer["prefix_cache"]
        return found

    fake = FakeEngine(saying("ok"))
    post(CHAT, body, fake, **options)
    prompt = prompt_of(fake.added[0])
    middle = prompt.index("Two.") + 1
    assert report(prompt[:middle]) == {
        "cached_tokens": len(ids(prompt[:middle])),
        "prompt_tokens": len(ids(prompt)),
        "message": 2,
        "role": "assistant",
        "text": "wo.user: Three.assistant: ",
    }
    assert report("")["message"] is None
    assert report(prompt[: prompt.index("Three.") + 1])["message"] == 3
