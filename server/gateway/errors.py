"""Errors as HTTP clients see them: one JSON shape for every failure.

Owns the mapping from topspin.errors to status, headers and OpenAI's error object (four
members, always), and the errors that only HTTP has. Knows no route and no engine; called by
the application's exception handlers and by streams that fail half-way.
"""

from __future__ import annotations

import logging
from typing import Generic, Literal, TypeVar

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
    RequestError,
    StepUnfinished,
    TopspinError,
)

MAX_MESSAGE_CHARS = 512
RETRY_AFTER_S = 1
# Statuses of failures that may be over in a moment.
PASSING = frozenset((429, 503))
INTERNAL_ERROR = "internal error"
# Messages for clients; the errors' own texts may name processes, hosts and exceptions.
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
}
HTTP_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}
PUBLIC_MESSAGES = {
    NodeLost.code: "a node that held the request was lost",
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


_Body = TypeVar("_Body", ErrorBody, AnthropicErrorBody)


class Failure(msgspec.Struct, Generic[_Body], frozen=True, kw_only=True):
    """A failure ready to be sent: as a response, or as an event of a running stream."""

    status: int
    body: _Body

    def encode(self) -> bytes:
        """Return the body as JSON."""
        return msgspec.json.encode(self.body)


def truncated(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """Return `text`, cut at `limit` characters: a message never echoes a huge request."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def describe(error: Exception) -> Failure[ErrorBody]:
    """Return the status and the body that a client gets for `error`.

    The texts of RequestError, EngineUnavailable, Overloaded and HTTPException are written for
    clients. For any other error the client gets its code with a fixed message; the text is only
    logged.
    """
    if isinstance(error, TopspinError):
        generic = error.code == RequestError.code
        return _failure(
            error.status,
            message=_public_message(error),
            param=error.param if isinstance(error, RequestError) else None,
            code=None if generic else error.code,
        )
    if isinstance(error, HTTPException):
        code = HTTP_CODES.get(error.status_code)
        return _failure(error.status_code, message=str(error.detail), param=None, code=code)
    _log.error("a request failed by a bug", exc_info=error)
    return _failure(500, message=INTERNAL_ERROR, param=None, code="internal_error")


def _public_message(error: TopspinError) -> str:
    if isinstance(error, RequestError | EngineUnavailable | Overloaded):
        return str(error)
    _log.error("a request failed (%s): %s", error.code, error)
    return PUBLIC_MESSAGES.get(error.code, INTERNAL_ERROR)


def describe_to_anthropic(error: Exception) -> Failure[AnthropicErrorBody]:
    """Return the status and the body that a client of /v1/messages gets for `error`."""
    failure = describe(error)
    kind = ANTHROPIC_TYPES.get(failure.status)
    if kind is None:
        kind = "invalid_request_error" if failure.status < 500 else "api_error"
    message, param = failure.body.error.message, failure.body.error.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    body = AnthropicErrorBody(error=AnthropicError(type=kind, message=message))
    return Failure(status=failure.status, body=body)


def error_response(error: Exception, *, to_anthropic: bool = False) -> Response:
    """Return the HTTP response for `error`, in OpenAI's shape or in Anthropic's."""
    failure: Failure[AnthropicErrorBody] | Failure[ErrorBody]
    failure = describe_to_anthropic(error) if to_anthropic else describe(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if failure.status in PASSING:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return Response(
        failure.encode(),
        status_code=failure.status,
        headers=headers,
        media_type="application/json",
    )


def _failure(
    status: int, *, message: str, param: str | None, code: str | None
) -> Failure[ErrorBody]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Failure(
        status=status,
        body=ErrorBody(
            error=ErrorObject(
                message=truncated(message),
                type="rate_limit_error" if status == 429 else kind,
                param=None if param is None else truncated(param, 128),
                code=code,
            )
        ),
    )
