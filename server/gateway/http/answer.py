"""Answers in JSON."""

from __future__ import annotations

from starlette.responses import Response


def json_response(body: bytes, *, status: int = 200) -> Response:
    """Return an answer with a body that is JSON already."""
    return Response(body, status_code=status, media_type="application/json")
