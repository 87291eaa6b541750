"""Errors as HTTP clients see them: one JSON shape for every failure.

Owns the mapping from topspin.errors to status, headers and OpenAI's error object (four
members, always), and the errors that only HTTP has. Knows no route and no engine; called by
the application's exception handlers and by streams that fail half-way.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from topspin.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    NodeLost,
    NotFound,
    Overloaded,
    Poison,
    RequestError,
    RequestTimeout,
    StepUnfinished,
    TopspinError,
)

MAX_MESSAGE_CHARS = 512
RETRY_AFTER_S = 1
# Statuses of failures that may be over in a moment.
PASSING = frozenset((429, 503))
INTERNAL_ERROR = "internal error"
# The paths below which errors have Anthropic's shape.
MESSAGES = "/v1/messages"
# Anthropic's names of errors; others of the client's are invalid_request_error.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
HTTP_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}
# Messages for clients; the errors' own texts may name processes, hosts and exceptions.
PUBLIC_MESSAGES = {
    NodeLost.code: "a node that held the request was lost",
    Poison.code: "nodes were lost twice while they computed the request; do not send it again",
    StepUnfinished.code: "a step that carried the request failed",
    EngineError.code: "the engine could not serve the request",
}

_log = logging.getLogger("gateway")


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model or a node's cache."""

    code = "context_length_exceeded"


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    code = "model_not_found"


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object; `param` and `code` may be null but are never missing."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The whole body of a failed request."""

    error: ErrorObject


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """Anthropic's error object; the message names the field."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The whole body of a failed request to /v1/messages."""

    type: Literal["error"] = "error"
    error: AnthropicError


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failure ready to be sent, in either shape: as a response, or as an event of a stream."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def body(self, *, to_anthropic: bool = False) -> bytes:
        """Return the error object as JSON."""
        return msgspec.json.encode(self._of_anthropic() if to_anthropic else self._of_openai())

    def _of_openai(self) -> ErrorBody:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return ErrorBody(
            error=ErrorObject(message=self.message, type=kind, param=self.param, code=self.code)
        )

    def _of_anthropic(self) -> AnthropicErrorBody:
        """Return Anthropic's object, whose message names the field."""
        others = "invalid_request_error" if self.status < 500 else "api_error"
        message = self.message
        if self.param is not None and self.param not in message:
            message = f"{self.param}: {message}"
        if self.code == ContextLengthExceeded.code:
            message = f"prompt is too long: {message}"  # agents look for these words
        kind = ANTHROPIC_TYPES.get(self.status, others)
        return AnthropicErrorBody(error=AnthropicError(type=kind, message=message))


def truncated(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """Return `text`, cut at `limit` characters: a message never echoes a huge request."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def describe(error: Exception) -> Failure:
    """Return the status and the error that a client gets for `error`.

    The texts of RequestError, EngineUnavailable, Overloaded and HTTPException are written for
    clients. For any other error the client gets its code with a fixed message; the text is only
    logged.
    """
    if isinstance(error, TopspinError):
        param = error.param if isinstance(error, RequestError) else None
        return Failure(
            status=error.status,
            message=truncated(_public_message(error)),
            param=None if param is None else truncated(param, 128),
            code=None if error.code == RequestError.code else error.code,
        )
    if isinstance(error, HTTPException):
        status, message = error.status_code, truncated(str(error.detail))
        return Failure(status=status, message=message, code=HTTP_CODES.get(status))
    _log.error("a request failed by a bug", exc_info=error)
    return Failure(status=500, message=INTERNAL_ERROR, code="internal_error")


def _public_message(error: TopspinError) -> str:
    if isinstance(error, RequestError | EngineUnavailable | Overloaded | RequestTimeout):
        return str(error)
    _log.error("a request failed (%s): %s", error.code, error)
    return PUBLIC_MESSAGES.get(error.code, INTERNAL_ERROR)


def error_response(error: Exception, path: str) -> Response:
    """Return the HTTP response for `error`, in the shape of the API at `path`."""
    failure = describe(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if failure.status in PASSING:
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        headers["Retry-After"] = str(max(RETRY_AFTER_S, math.ceil(wait_s)))
    return Response(
        failure.body(to_anthropic=path.startswith(MESSAGES)),
        status_code=failure.status,
        headers=headers,
        media_type="application/json",
    )
