"""Two clients of a gateway whose waits tell how others delay it.

One reads a stream of tokens, the other asks one path again and again, on a new connection each
time. Called by benchmarks.gateway.large_bodies and benchmarks.gateway_hostile.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import aiohttp

TOKEN_PERIOD_MS = 10.0
# So long is waited for an answer; it counts as that slow.
TIMEOUT_S = 10.0
PAUSE_S = 0.005


class ClientWaits:
    """How long both clients waited since `clear`, in seconds."""

    def __init__(self) -> None:
        self.answers_s: list[float] = []
        self._gaps_s: list[float] = []
        self._last_s = 0.0
        self.have_begun = asyncio.Event()

    def clear(self) -> None:
        """Forget what was measured."""
        self.answers_s.clear()
        self._gaps_s.clear()

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two tokens, the last of which may still be to come."""
        return max([*self._gaps_s, time.monotonic() - self._last_s])

    async def read_stream(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read streams of tokens, one after the other, until one is cut off."""
        body = {"model": "stub", "prompt": [300, 301], "max_tokens": 4000, "stream": True}
        with suppress(aiohttp.ClientError):
            for seed in itertools.count():
                asked = session.post(f"{url}/v1/completions", json={**body, "seed": seed})
                async with asked as response:
                    if response.status != 200:
                        raise SystemExit(f"the gateway answered: {await response.text()}")
                    self._last_s = time.monotonic()
                    async for _ in response.content.iter_any():
                        last_s, self._last_s = self._last_s, time.monotonic()
                        self._gaps_s.append(self._last_s - last_s)
                        self.have_begun.set()

    async def keep_asking(self, session: aiohttp.ClientSession, url: str) -> None:
        """Ask `url` again and again."""
        while True:
            asked_s = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(TIMEOUT_S), session.get(url) as response:
                    await response.read()  # a delayed gateway may even answer 503
            self.answers_s.append(time.monotonic() - asked_s)
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def watching(
    url: str, path: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[ClientWaits]:
    """Let both clients go on while the block runs, which begins with the first token."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(force_close=True)
    waits = ClientWaits()
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=headers
    ) as session:
        clients = [
            asyncio.create_task(waits.read_stream(session, url)),
            asyncio.create_task(waits.keep_asking(session, url + path)),
        ]
        async with asyncio.timeout(TIMEOUT_S):
            await waits.have_begun.wait()
        yield waits
        for client in clients:
            client.cancel()
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
