"""Shared by the chaos tests: watched streams, and events that happen to nodes.

Owns the events and their detection times as a client or an operator would see them. Knows a running
tests.system.rig.server.Server but not its internals.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.system.rig.server import Server

STREAM_TIMEOUT_S = 120.0
# Of text, or in an object of JSON.
STATE = re.compile(r'scheduler: ((?:ready|recovering|starting)[^"\n]*)')


@dataclass
class Watched:
    """One stream: the received tokens and its end (monotonic seconds)."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0
    status: int = 0
    ended_s: float = field(default=0.0, compare=False)


def stream_body(prompt: list[int], num_tokens: int) -> dict[str, object]:
    """Return the body of a greedy stream of `num_tokens`, whatever they are."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


class Streams:
    """Completion streams of all prompts at once, each in a thread.

    With `num_logprobs` every token comes with that many log-probabilities, and its own. `fields`
    are added to every request.
    """

    def __init__(
        self,
        url: str,
        prompts: list[list[int]],
        num_tokens: int,
        *,
        num_logprobs: int | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        self.watched = [Watched(prompt) for prompt in prompts]
        self._url = url
        self._num_tokens = num_tokens
        self._num_logprobs = num_logprobs
        self._fields = fields or {}
        self._arrived = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._run, args=(watched,)) for watched in self.watched
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, watched: Watched) -> None:
        body = {
            **stream_body(watched.prompt, self._num_tokens),
            "logprobs": self._num_logprobs,
            **self._fields,
        }
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=STREAM_TIMEOUT_S) as response:
            watched.status = response.status_code
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    watched.num_done += 1
                elif line.startswith("data: "):
                    self._take(watched, json.loads(line[6:]))
        watched.ended_s = time.monotonic()

    def _take(self, watched: Watched, event: dict[str, Any]) -> None:
        if "error" in event:
            watched.errors.append(event["error"])
            return
        for choice in event["choices"]:
            watched.tokens += choice.get("token_ids", [])
            logprobs = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
            # Token by token: drafts decide how many an event has.
            for own, best in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
                watched.logprobs += [own, *best.values()]
        self._arrived.release()

    def wait_for_events(self, count: int) -> None:
        """Wait until `count` more events with tokens have come, over all streams."""
        for _ in range(count):
            assert self._arrived.acquire(timeout=STREAM_TIMEOUT_S), "the streams are silent"

    def wait_for_all(self) -> None:
        """Wait until every stream has tokens."""
        wait_until(lambda: all(each.tokens for each in self.watched), "the streams are silent")

    def join(self) -> list[Watched]:
        """Wait until all streams end."""
        for thread in self._threads:
            thread.join(STREAM_TIMEOUT_S)
            assert not thread.is_alive(), "a stream hangs"
        return self.watched


def check_identical(streams: list[Watched], expected: list[list[int]]) -> None:
    """Check that every stream ends once, without errors, with the tokens of an undisturbed run."""
    for watched, tokens in zip(streams, expected, strict=True):
        assert watched.status == 200
        assert watched.errors == []
        assert watched.num_done == 1
        assert watched.tokens == tokens


def kill(server: Server, role: str) -> None:
    """End a node's process without warning."""
    os.kill(server.pids[role], signal.SIGKILL)


def stop_and_continue(server: Server, role: str) -> None:
    """Freeze a node until it is declared dead; then continue it, if it still exists."""
    pid, seen = server.pids[role], len(server.output)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: f"lost {role}" in server.output[seen:], "nobody noticed")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def frame_fault(number: int) -> Callable[[Server, str], None]:
    """Return the event that sends signal `number` to a chaos node."""
    return lambda server, role: os.kill(server.pids[role], number)


EVENTS: dict[str, Callable[[Server, str], None]] = {
    "kill": kill,
    "stop and continue": stop_and_continue,
    "dropped frame": frame_fault(signal.SIGUSR1),
    "duplicated frame": frame_fault(signal.SIGUSR2),
    "reordered frame": frame_fault(signal.SIGRTMIN),
    "slow frame": frame_fault(signal.SIGRTMIN + 1),
}


def wait_until(condition: Callable[[], bool], complaint: str, timeout_s: float = 120.0) -> float:
    """Wait for `condition`; returns how long it took in seconds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, complaint
        time.sleep(0.01)
    return time.monotonic() - started


def wait_until_whole(server: Server) -> None:
    """Wait until every node serves again, and learn the new process ids."""

    def is_whole() -> bool:
        states = STATE.findall(server.output)
        return bool(states) and states[-1] == "ready"

    wait_until(is_whole, "the engine does not become whole again")
    server.pids = server.pids_by_role()
