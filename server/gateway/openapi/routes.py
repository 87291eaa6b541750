"""GET /openapi.json, /docs and /: the description of the API, without anything from elsewhere.

Owns these routes and the page's file. Knows no other route. Called by server.gateway.app.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from server.gateway.openapi.document import JSON, document

START_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Topspin</title>
<h1>Topspin</h1>
<p>This is an OpenAI-compatible server: point a client at <code>/v1</code>.
<p><a href="docs">Its routes, with examples</a> &middot; <a href="openapi.json">OpenAPI</a>
&middot; <a href="v1/models">models</a> &middot; <a href="health">health</a>
&middot; <a href="metrics">metrics</a>
</html>
"""
# The page loads nothing but the description, and nothing can be put into it from elsewhere.
POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
)


def documentation_routes() -> list[Route]:
    """Return the three routes."""

    async def openapi(_: Request) -> Response:
        return Response(document(), media_type=JSON)

    async def docs(_: Request) -> Response:
        return HTMLResponse(_page(), headers={"Content-Security-Policy": POLICY})

    async def start(_: Request) -> Response:
        return HTMLResponse(START_PAGE, headers={"Content-Security-Policy": POLICY})

    return [Route("/openapi.json", openapi), Route("/docs", docs), Route("/", start)]


@cache
def _page() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")
