"""The trace of one generation request: its span, and those of its choices' phases.

Owns their names, times and attributes, which follow OpenTelemetry's conventions for generative AI,
and vLLM where those say nothing. They never hold a prompt, an answer, a header or an error's text.
Pure: knows no clock and no exporter (server.gateway.operations.otlp). Filled in by
server.gateway.http.exchange and server.gateway.handler; docs/tracing.md lists it all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.exceptions import HTTPException

from server.gateway.generation.choice import Choice
from server.gateway.generation.params import RequestParams
from topspin.errors import TopspinError

# The routes whose POST requests have spans, and the names of what they do.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
CLIENT_GONE = "client_disconnected"
# What the access log and the metrics show for a client that went before its answer began.
GONE_STATUS = 499

Value = str | int | float | Sequence[str]


@dataclass(slots=True)
class RequestRecord:
    """A request as its spans need it; the fields with a default are set as they are learnt.

    `started_s` is of time.monotonic, `route` one of OPERATIONS. `params` and `choices` are those of
    the request's run, the choices still growing. `error_type`: why it failed, where that is known.
    """

    route: str
    started_s: float
    params: RequestParams | None = None
    response_id: str | None = None
    choices: Sequence[Choice] = ()
    error_type: str | None = None

    def submitted(
        self, params: RequestParams, *, response_id: str, choices: Sequence[Choice]
    ) -> None:
        """Take note of a request that was found good and given to the engine."""
        self.params, self.response_id, self.choices = params, response_id, choices

    def failed(self, error: Exception) -> None:
        """Take note of the kind of an error that the client is told."""
        if isinstance(error, TopspinError):
            self.error_type = error.code
        elif isinstance(error, HTTPException):
            self.error_type = str(error.status_code)
        else:
            self.error_type = type(error).__name__


class SpanData(NamedTuple):
    """One span; times in seconds of time.monotonic."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value]
    is_error: bool = False


def request_spans(
    record: RequestRecord, *, request_id: str, status: int | None, ended_s: float
) -> list[SpanData]:
    """Return the spans of a request that has ended: its own, and those of its choices' phases.

    `status` is that of its answer; None: none was begun. A request that was refused is no error of
    this server, whose span says so by its type alone.
    """
    operation = OPERATIONS[record.route]
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "topspin",
        "gen_ai.request.id": request_id,
        "http.request.method": "POST",
        "http.route": record.route,
    }
    if status is not None:
        attributes["http.response.status_code"] = status
    name = operation
    if record.params is not None:
        name = f"{operation} {record.params.model}"
        attributes |= _asked(record.params)
    if record.response_id is not None:
        attributes["gen_ai.response.id"] = record.response_id
    attributes |= _answered(record)
    error_type = record.error_type or _unnamed_error(record, status)
    if error_type is not None:
        attributes["error.type"] = error_type
    is_refused = status is not None and 400 <= status < GONE_STATUS
    root = SpanData(
        name, record.started_s, ended_s, attributes, error_type is not None and not is_refused
    )
    return [root, *(span for each in record.choices for span in _phases(each, record.started_s))]


def _asked(params: RequestParams) -> dict[str, Value]:
    asked: dict[str, Value] = {
        "gen_ai.request.model": params.model,
        "gen_ai.request.choice.count": params.num_choices,
        "gen_ai.request.stream": params.stream,
        "gen_ai.request.temperature": params.sampling.temperature,
        "gen_ai.request.top_p": params.sampling.top_p,
    }
    limit = params.default_max_tokens if params.max_tokens is None else params.max_tokens
    if limit is not None:
        asked["gen_ai.request.max_tokens"] = limit
    return asked


def _answered(record: RequestRecord) -> dict[str, Value]:
    choices = record.choices
    if not choices:
        return {}
    prompts = [choice for choice in choices if choice.is_first]
    answered: dict[str, Value] = {
        "gen_ai.usage.input_tokens": sum(len(each.prompt.ids) for each in prompts),
        "gen_ai.usage.output_tokens": sum(each.num_tokens for each in choices),
        "gen_ai.usage.cache_read.input_tokens": sum(each.num_cached_tokens for each in prompts),
    }
    firsts_s = [choice.first.at_s for choice in choices if choice.first is not None]
    if firsts_s:
        answered["gen_ai.latency.time_to_first_token"] = min(firsts_s) - record.started_s
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    if reasons:
        answered["gen_ai.response.finish_reasons"] = reasons
    return answered


def _unnamed_error(record: RequestRecord, status: int | None) -> str | None:
    """Return why a request failed for which no error was noted; None: it did not."""
    if status is None or status == GONE_STATUS:
        return CLIENT_GONE
    if status >= 400:
        return str(status)
    if any(choice.finish_reason is None for choice in record.choices):
        return CLIENT_GONE
    return None


def _phases(choice: Choice, started_s: float) -> list[SpanData]:
    """Return the phases of a choice one after the other; none before its first output.

    The scheduler's durations are laid before that output's arrival, so the prefill includes the way
    from the scheduler. None begins before the request.
    """
    if choice.first is None:
        return []
    prefilled_s = choice.first.at_s
    admitted_s = max(started_s, prefilled_s - choice.first.prefill_s)
    queued_s = max(started_s, admitted_s - choice.first.queue_s)
    index: dict[str, Value] = {"topspin.choice.index": choice.index}
    cached = {"topspin.choice.cached_tokens": choice.num_cached_tokens}
    phases = [
        SpanData("queue", queued_s, admitted_s, index),
        SpanData("prefill", admitted_s, prefilled_s, index | cached),
    ]
    ended_s = choice.last_output_at_s
    if ended_s is not None and ended_s > prefilled_s:
        generated = {"topspin.choice.output_tokens": choice.num_tokens}
        phases.append(SpanData("decode", prefilled_s, ended_s, index | generated))
    return phases
