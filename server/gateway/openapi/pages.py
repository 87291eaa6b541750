"""GET /openapi.json and /docs: the description of the API, without anything from elsewhere.

Owns these routes and the pages. Knows no other route. Called by server.gateway.app.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from server.gateway.openapi.endpoint import Endpoint

# The page loads nothing but the description, and nothing can be put into it from elsewhere.
POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
)


OPENAPI = Endpoint(
    method="get",
    path="/openapi.json",
    summary="Show this description",
    media_type="application/json",
)
DOCS = Endpoint(method="get", path="/docs", summary="Show it as a page", media_type="text/html")


async def show_page(_: Request, *, page: str) -> Response:
    """Answer with a page."""
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})


@cache
def docs_page() -> str:
    """Return the page that shows the description."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")
