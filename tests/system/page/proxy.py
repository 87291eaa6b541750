"""A proxy that shows a server below a prefix, which it leaves in place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

# The server's --root-path.
PREFIX = "/topspin"


@asynccontextmanager
async def proxy(url: str, outside: list[str]) -> AsyncIterator[str]:
    """Show a server below PREFIX; yields its address. `outside`: paths that miss the prefix."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        if not request.path.startswith(f"{PREFIX}/"):
            outside.append(request.path)
            raise web.HTTPNotFound
        headers = {**request.headers, "X-Forwarded-For": request.remote or ""}
        sent = {"data": await request.read() or None, "headers": headers}
        async with session.request(request.method, url + request.path_qs, **sent) as answer:
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
