"""Tenants by HTTP over a whole engine: what one has said saves the other no work, and shows in
nothing that is counted. Timing itself is not measured: what is computed is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from kernels.contracts import SEGMENT_KEYS
from server.gateway.engine_client import EngineClient
from server.gateway.service import build_app
from tests.checkpoints import make_checkpoint
from tests.engine import Engine, engine_config
from tests.identity.cache.test_spill import config_of
from topspin import __version__
from topspin.messages import Hello, Stats
from topspin.plan.settings import GatewaySection
from topspin.plan.spec import ServeConfig
from topspin.plan.speculation import Speculation
from topspin.processes.channel import AsyncControlClient

NUM_TOKENS = 12
OURS, THEIRS = "sk-ours-0123456789", "sk-theirs-0123456789"
DRAFTS = Speculation(method="suffix", num_speculative_tokens=4, adaptive=False, prompt_lookup_min=3)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f"ours: {OURS}\ntheirs: {THEIRS}\n")
    return file


class Work(NamedTuple):
    """What the engine did for a request: tokens found in the cache, computed, and drafted.

    A step that was planned ahead may compute one token more than is wanted.
    """

    cached: int
    shown_cached: int
    drafted: int
    loaded: int
    computed: int

    def is_of_new(self, prompt: list[int]) -> bool:
        """Return whether it was done as if nobody had asked anything like it before."""
        return self[:-1] == (0, 0, 0, 0) and self.computed >= len(prompt) + NUM_TOKENS - 1


class Gateway:
    """A gateway before `engine`, with two tenants."""

    def __init__(self, client: httpx.AsyncClient, engine: EngineClient) -> None:
        self._client = client
        self._engine = engine

    async def ask(self, key: str, prompt: list[int], **fields: Any) -> tuple[str, Work]:
        """Complete a prompt; returns the text, and what it cost."""
        before = await self._stats()
        body = {"model": "tiny", "prompt": prompt, "seed": 7, "max_tokens": NUM_TOKENS, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        answer = await self._client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        after = await self._stats()
        found = answer.json()
        work = Work(
            cached=after.prefix_cache_hits - before.prefix_cache_hits,
            shown_cached=found["usage"]["prompt_tokens_details"]["cached_tokens"],
            drafted=after.num_draft_tokens - before.num_draft_tokens,
            loaded=after.kv.num_loaded_blocks - before.kv.num_loaded_blocks,
            computed=after.iteration_tokens_sum - before.iteration_tokens_sum,
        )
        return found["choices"][0]["text"], work

    async def _stats(self) -> Stats:
        return await self._engine.stats(10.0)


@asynccontextmanager
async def gateway_of(engine: Engine, key_file: Path) -> AsyncIterator[Gateway]:
    section = GatewaySection(served_names=("tiny",), api_key_file=str(key_file), access_log=False)
    client = EngineClient(AsyncControlClient(engine.address))
    app = build_app(ServeConfig(plan=engine.config, gateway=section), client)
    reading = asyncio.create_task(client.run())
    client.connection.send(Hello(role="gateway", index=1, incarnation=2, revision=__version__))
    try:
        async with asyncio.timeout(60):
            while client.state.state != "ready":
                await asyncio.sleep(0.01)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                yield Gateway(http, client)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        client.connection.close()


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 250, size=length).tolist() for length in lengths]


def test_a_tenant_pays_for_its_whole_prompt_and_gets_no_drafts_of_others(
    tmp_path: Path, key_file: Path
) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3_moe")
    [prompt] = prompts_of(40)

    async def test(engine: Engine) -> None:
        async with gateway_of(engine, key_file) as gateway:
            text, first = await gateway.ask(OURS, prompt)
            again, warm = await gateway.ask(OURS, prompt)
            assert first.is_of_new(prompt)
            assert (again, warm.cached, warm.shown_cached) == (text, 36, 36)
            assert warm.computed < len(prompt)
            assert warm.drafted > 0, "of one's own tenant's texts there are drafts"
            # The same with a salt that the other tenant could guess.
            for salt in ({}, {"cache_salt": "a"}):
                theirs, other = await gateway.ask(THEIRS, prompt, **salt)
                assert theirs == text
                assert other.is_of_new(prompt), other

    with Engine(engine_config(path, speculation=DRAFTS)) as engine:
        asyncio.run(test(engine))


def test_nothing_of_a_tenant_comes_back_from_the_file_for_another(
    tmp_path: Path, key_file: Path
) -> None:
    """With retrieval, where a prefix that others have pushed out of memory is in a file."""
    path = make_checkpoint(tmp_path / "model", "qwen3_moe", max_position_embeddings=8192)
    length = 3 * SEGMENT_KEYS + 100
    prompt, *others = prompts_of(length, length + 50, length + 100)

    async def test(engine: Engine) -> None:
        async with gateway_of(engine, key_file) as gateway:
            text, first = await gateway.ask(OURS, prompt)
            assert first.is_of_new(prompt)
            for each in others:
                await gateway.ask(OURS, each)
            again, warm = await gateway.ask(OURS, prompt)
            assert warm.cached > length // 2
            assert warm.loaded > 0
            theirs, other = await gateway.ask(THEIRS, prompt)
            assert other.is_of_new(prompt), other
            assert theirs == again == text

    spill = tmp_path / "spill"
    spill.mkdir()
    with Engine(config_of(path, 7_000, spill)) as engine:
        asyncio.run(test(engine))
