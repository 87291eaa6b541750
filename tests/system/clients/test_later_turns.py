"""Later turns of a conversation, by each API that agents speak: only what they add is computed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from models.sources.smollm2_moe import pull
from tests.system.rig.server import Server
from tests.test_docs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# The fields of the conversation and of an answer's most tokens, by the API's path.
APIS = {
    "chat/completions": ("messages", "max_tokens"),
    "responses": ("input", "max_output_tokens"),
    "messages": ("messages", "max_tokens"),
}
# Of the page that the conversation is about: 2,000 tokens and more.
NUM_CHARACTERS = 8_000
QUESTIONS = ["Which page is that?", "And who reads it?", "Say it shorter.", "Thanks. Again?"]
MIN_CACHED = 0.95
# What a later turn may take beside computing what it adds: so long, or so much of the first one's
# time, where other work slows all of them down.
SLACK_S = 0.3
SLACK_SHARE = 0.05


class Turn(NamedTuple):
    """An answer: its text, the time to its first text, and tokens of its prompt."""

    text: str
    ttft_s: float
    num_prompt: int
    num_cached: int


def text_in(event: Any) -> str:
    """Return the text that an event of a stream adds to the answer."""
    match event:
        case (
            {"choices": [{"delta": {"content": str(text)}}]}
            | {"type": "response.output_text.delta", "delta": str(text)}
            | {"type": "content_block_delta", "delta": {"text": str(text)}}
        ):
            return text
    return ""


def usage_in(event: Any) -> tuple[int, int] | None:
    """Return how many tokens the prompt had, and how many of them were cached, if it is told."""
    match event:
        case {"usage": {"prompt_tokens": num, "prompt_tokens_details": details}}:
            return num, details["cached_tokens"]
        case {"response": {"usage": {"input_tokens": num, "input_tokens_details": details}}}:
            return num, details["cached_tokens"]
        case {"type": "message_delta", "usage": usage}:
            cached = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + cached, cached
    return None


def ask(url: str, path: str, messages: list[dict[str, str]]) -> Turn:
    conversation, most_tokens = APIS[path]
    body: dict[str, Any] = {conversation: messages, most_tokens: 24, "stream": True}
    if path == "chat/completions":
        body["stream_options"] = {"include_usage": True}
    text, ttft_s, usage, begin_s = "", 0.0, None, time.monotonic()
    with httpx.stream("POST", f"{url}/v1/{path}", json=body, timeout=300) as got:
        for line in got.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += text_in(event)
                ttft_s = ttft_s or (time.monotonic() - begin_s if text else 0.0)
                usage = usage_in(event) or usage
    assert usage is not None, got.status_code
    return Turn(text, ttft_s, *usage)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--kv-cache-memory", "256MiB", "--max-ttft", "0")
    with Server(pull(progress=False), tmp_path_factory.mktemp("turns"), *flags) as server:
        yield server.url


@pytest.mark.parametrize("path", APIS)
def test_a_later_turn_costs_what_it_adds(path: str, url: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text()[:NUM_CHARACTERS]
    messages: list[dict[str, str]] = []
    turns = []
    for question in QUESTIONS:
        asked = question if messages else f"By {path}:\n{page}\n{question}"
        messages.append({"role": "user", "content": asked})
        turns.append(ask(url, path, messages))
        messages.append({"role": "assistant", "content": turns[-1].text})
    first, *later = turns
    assert first.num_prompt > 2_000
    assert first.num_cached < 100
    tokens_per_s = (first.num_prompt - first.num_cached) / first.ttft_s
    print(f"{tokens_per_s:.0f} tokens/s, {turns}")
    assert min(turn.num_cached / turn.num_prompt for turn in later) >= MIN_CACHED, turns
    # Other work on the machine only adds to a time: the quickest turn tells.
    over_s = [turn.ttft_s - (turn.num_prompt - turn.num_cached) / tokens_per_s for turn in later]
    assert min(over_s) <= max(SLACK_S, SLACK_SHARE * first.ttft_s), turns
