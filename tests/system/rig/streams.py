"""Requests without pause to an engine of processes; each answer is compared with transformers'.

Owns the streams, and counts answers. Knows no test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import httpx

from tests.system.conftest import NUM_TOKENS, Tiny

NUM_STREAMS = 8
DEADLINE_S = 120.0


class Load:
    """Requests on NUM_STREAMS streams, one after the other, until left; each answer is checked.

    `urls` may change meanwhile: the next request of a stream goes to one that is there then.
    """

    def __init__(
        self, urls: Sequence[str], tiny: Tiny, *, headers: Mapping[str, str] | None = None
    ) -> None:
        self._urls, self._tiny, self._headers = urls, tiny, headers
        self._stop = threading.Event()
        self.wrong: list[str] = []
        self.num_answers = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Load:
        self._threads = [
            threading.Thread(target=self._send, args=(idx,)) for idx in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _send(self, idx: int) -> None:
        turn = idx % len(self._tiny.prompts)
        body = {
            "model": "tiny",
            "prompt": self._tiny.prompts[turn],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        with httpx.Client(timeout=DEADLINE_S, headers=self._headers) as client:
            while not self._stop.is_set():
                urls = tuple(self._urls)
                url = urls[idx % len(urls)]
                answer = client.post(f"{url}/v1/completions", json=body)
                with self._lock:
                    self.num_answers += 1
                    if answer.status_code != 200:
                        self.wrong.append(answer.text)
                    elif answer.json()["choices"][0]["token_ids"] != self._tiny.tokens[turn]:
                        self.wrong.append(f"other tokens: {answer.text}")

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests have been answered."""
        wanted, end_s = self.num_answers + more, time.monotonic() + DEADLINE_S
        while self.num_answers < wanted and not self.wrong:
            assert time.monotonic() < end_s, f"{self.num_answers} answers"
            time.sleep(0.02)
