"""One request's way through all processes, and a replay, in logs of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.system.chaos import wait_until
from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.server import Server, Settings
from topspin.logs import FORMAT_VARIABLE, is_json

# A step takes some milliseconds on the links alone: the node is killed inside of the request.
SLOW: Settings = {
    "latency_us": 2000,
    "deadline_s": 2,
    "restart": True,
}


def test_every_process_names_a_request_by_its_id(tiny: Tiny, tmp_path: Path) -> None:
    environment = {FORMAT_VARIABLE: "json"}
    with Server(tiny.path, tmp_path, settings=SLOW, env=environment) as server:
        body = {
            "model": "tiny",
            "prompt": tiny.prompts[0],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json=body,
            headers={"X-Request-Id": "traced"},
            timeout=120,
        ) as response:
            assert response.headers["X-Request-Id"] == "traced"
            events = response.iter_lines()
            next(events)
            server.kill("expert 0")
            rest = [event for event in events if event]
        assert rest[-1] == "data: [DONE]"

        def told() -> list[dict[str, Any]]:
            found = [json.loads(line) for line in server.output.splitlines() if is_json(line)]
            return [each for each in found if each.get("request_id") == "traced"]

        wait_until(lambda: any(each["role"] == "gateway" for each in told()), "not answered")
        assert [(each["role"], each["message"].partition(": ")[2]) for each in told()] == [
            ("scheduler", "request admitted"),
            ("scheduler", "request replayed"),
            ("scheduler", "request admitted"),
            ("scheduler", "request finished"),
            ("gateway", "answered"),
        ]
        answered = told()[-1]
        assert (answered["status"], answered["output_tokens"]) == (200, NUM_TOKENS)
        assert answered["prompt_tokens"] == len(tiny.prompts[0])
        roles = {json.loads(line)["role"] for line in server.output.splitlines() if is_json(line)}
        assert {"topspin", "gateway", "scheduler", "attention", "expert"} <= roles
        plain = [line for line in server.output.splitlines() if not is_json(line)]
        assert all(line.startswith(("Topspin is ready", "Try: ")) for line in plain), plain
