"""The page behind a proxy's prefix: before a real server, and before one that has keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import web

from server.gateway.http.auth import ApiKeys
from tests.server.gateway.fakes import loopback, saying
from tests.server.gateway.operations.test_feed import FedEngine
from tests.system.page.browser import Browser
from tests.system.page.conftest import NUM_TOKENS, PREFIX
from tests.system.page.visits import ANSWER, IS_IDLE, OPERATOR, USER, ask, give, key_file, visit
from tests.system.rig.server import Server

pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def proxy(url: str, outside: list[str]) -> AsyncIterator[str]:
    """Show a server below a prefix; yields its address. `outside`: paths that miss the prefix."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        if not request.path.startswith(f"{PREFIX}/"):
            outside.append(request.path)
            raise web.HTTPNotFound
        address = url + request.path_qs.removeprefix(PREFIX)
        headers = {**request.headers, "X-Forwarded-For": request.remote or ""}
        asked = session.request(
            request.method, address, data=await request.read() or None, headers=headers
        )
        async with asked as answer:
            passed = web.StreamResponse(status=answer.status, headers=answer.headers)
            passed.headers.pop("Transfer-Encoding", None)
            await passed.prepare(request)
            async for piece in answer.content.iter_any():
                await passed.write(piece)
            return passed

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pass_on)
    running = web.AppRunner(app)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        await running.setup()
        await web.TCPSite(running, "127.0.0.1", 0).start()
        host, port = running.addresses[0][:2]
        yield f"http://{host}:{port}{PREFIX}/"
        await running.cleanup()


@pytest.mark.slow
def test_the_page_works_behind_the_prefix_of_a_proxy(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        outside: list[str] = []
        tab = await browser.tab()
        async with proxy(server.url, outside) as url:
            await visit(tab, url, temperature=0, max_tokens=NUM_TOKENS)
            await ask(tab, question[0])
            await tab.until(IS_IDLE)
            stats = await tab.run("document.querySelector('.assistant .stats').textContent")
            assert f"{NUM_TOKENS} tokens" in stats
            # Who comes by a proxy may be anybody: without keys the engine is not shown.
            await tab.run("location.hash = '#engine'")
            told = "document.querySelector('#engine .notice').textContent"
            await tab.until(f"{told}.includes('own host')")
            await tab.until("document.getElementById('state-text').textContent === 'ready'")
            await tab.open("about:blank")
        assert outside == []
        assert tab.complaints == []

    runner.run(test())


def test_an_operators_key_shows_the_engine_and_a_usual_one_only_the_chat(
    runner: asyncio.Runner, browser: Browser, tmp_path: Path
) -> None:
    async def test() -> None:
        outside: list[str] = []
        fake = FedEngine()
        fake.script = saying("hello")
        keys = ApiKeys(None, key_file(tmp_path))
        shown = {}
        async with (
            loopback(fake, keys=keys, root_path=PREFIX, deadline_s=None) as port,
            proxy(f"http://127.0.0.1:{port}", outside) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            for key in (OPERATOR, USER):
                tab = await browser.tab()
                await tab.open(f"{url}#engine")
                await give(tab, key)
                panels = "!document.querySelector('#engine .panels').hidden"
                told = "document.querySelector('#engine .notice').textContent"
                await tab.until(f"{panels} || {told}.includes('shown to operators only')")
                shown[key] = await tab.run(
                    f"[{panels}, document.querySelectorAll('[data-node], #rally dd').length]"
                )
                await tab.run("location.hash = '#chat'")
                await tab.until("!document.getElementById('chat').hidden")
                await ask(tab, "hi")
                await tab.until(f"{IS_IDLE} && {ANSWER} === 'hello'")
                assert tab.complaints == []
                await tab.open("about:blank")
            # Nor is it told to who asks without the page.
            answers = {
                (path, key): (
                    await client.get(path, headers={"Authorization": f"Bearer {key}"})
                ).status_code
                for path in ("feed", "trace")
                for key in (OPERATOR, USER)
            }
        assert shown == {OPERATOR: [True, 1], USER: [False, 0]}
        assert answers == {
            ("feed", OPERATOR): 200,
            ("feed", USER): 404,
            # Of the gateway's own host only, whoever asks.
            ("trace", OPERATOR): 404,
            ("trace", USER): 404,
        }
        assert outside == []

    runner.run(test())
