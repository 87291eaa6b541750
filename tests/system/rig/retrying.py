"""Streams of clients that do not give up: cut ones go on behind the last event that came.

Owns the clients: each asks with an Idempotency-Key, and again with Last-Event-ID when its
connection ends or the server refuses it for now. Knows no test.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Sequence

import httpx

from tests.system.rig.chaos import STREAM_TIMEOUT_S, Watched, stream_body

PAUSE_S = 0.1
PASSING = (429, 503)


class RetryingStreams:
    """Greedy streams of all prompts at once, each in a thread, until each is complete."""

    def __init__(self, url: str, prompts: Sequence[list[int]], num_tokens: int) -> None:
        self.watched = [Watched(prompt) for prompt in prompts]
        self.num_retries = 0
        self.longest_gap_s = 0.0
        self._url = f"{url}/v1/completions"
        self._num_tokens = num_tokens
        self._lock = threading.Lock()
        self._arrived = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in self.watched]
        for thread in self._threads:
            thread.start()

    def wait_for_events(self, count: int) -> None:
        """Wait until `count` more events with tokens have come, over all streams."""
        for _ in range(count):
            assert self._arrived.acquire(timeout=STREAM_TIMEOUT_S), "the streams are silent"

    def join(self) -> list[Watched]:
        """Wait until all streams are complete."""
        for thread in self._threads:
            thread.join(STREAM_TIMEOUT_S)
            assert not thread.is_alive(), "a stream hangs"
        return self.watched

    def _run(self, watched: Watched) -> None:
        body = stream_body(watched.prompt, self._num_tokens)
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        deadline_s = time.monotonic() + STREAM_TIMEOUT_S
        while not watched.num_done and not watched.errors and time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.TransportError):
                self._read(watched, body, headers)
            if not watched.num_done:
                with self._lock:
                    self.num_retries += 1
                time.sleep(PAUSE_S)

    def _read(self, watched: Watched, body: dict[str, object], headers: dict[str, str]) -> None:
        last_s = 0.0
        with httpx.stream(
            "POST", self._url, json=body, headers=headers, timeout=STREAM_TIMEOUT_S
        ) as response:
            watched.status = response.status_code
            if response.status_code in PASSING:
                return
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    watched.num_done += 1
                elif line.startswith("id: "):
                    headers["Last-Event-ID"] = line[4:]
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        watched.errors.append(event["error"])
                        return
                    for choice in event["choices"]:
                        watched.tokens += choice.get("token_ids", [])
                    now_s = time.monotonic()
                    with self._lock:
                        self.longest_gap_s = max(self.longest_gap_s, now_s - (last_s or now_s))
                    last_s = now_s
                    self._arrived.release()
