"""GET / and /page/NAME: the files of the page.

Owns their types, their names for caches, and what a browser may do with them. They hold nothing of
the server's and are shown to everyone; what they ask for later is not. Knows no other route. Called
by server.gateway.app.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from server.gateway.errors import truncated
from server.gateway.openapi.endpoint import Endpoint

INDEX: Final = "index.html"
# By suffix; a file of another kind is not served.
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts and styles are files of ours; text never becomes markup, so that none can be put into it.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for again each time: after an update of the server no old module meets a new one.
    "Cache-Control": "no-cache",
}

PAGE = Endpoint(
    method="get",
    path="/",
    summary="Show the page: a chat, and for operators the engine at work",
    media_type="text/html",
)
PAGE_FILE = Endpoint(
    method="get",
    path="/page/{name}",
    summary="Send a file of the page",
    media_type="text/javascript",
    refusals=(404,),
    path_text="a name that the page, or one of its files, refers to",
)


class PageFile(NamedTuple):
    """A file of the page; `etag` is of its content."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files by name; they are read once."""
    found = {}
    for path in sorted(Path(__file__).with_name("static").iterdir()):
        if path.suffix in TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.name] = PageFile(content, TYPES[path.suffix], etag)
    return found


def page_paths() -> frozenset[str]:
    """Return the paths of all files, which ask for no key."""
    return frozenset({PAGE.path, *(PAGE_FILE.path.format(name=name) for name in page_files())})


async def send_file(request: Request) -> Response:
    """Answer with a file, or with 304 if the client has it.

    A proxy's prefix without a slash behind it is another directory to a browser: it is sent on.
    """
    name = request.path_params.get("name", INDEX)
    path = request.scope["raw_path"].decode("latin-1")
    if "name" not in request.path_params and not path.endswith("/"):
        return RedirectResponse(f"{path.rpartition('/')[2]}/", headers=HEADERS)
    file = page_files().get(name)
    if file is None:
        raise HTTPException(404, f"the page has no file `{truncated(name, 64)}`")
    headers = {**HEADERS, "ETag": file.etag}
    known = request.headers.get("if-none-match", "")
    if file.etag in (each.strip().removeprefix("W/") for each in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
