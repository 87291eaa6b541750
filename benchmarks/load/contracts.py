"""The types that the load tester's parts exchange: requests in, records out.

Owns the types only: a BenchRequest comes from a dataset, a Target says where it is sent, a
LoadPattern when; a MeasuredRequest has all measurements of one request, and a LoadRun has all
records. Datasets make BenchRequests; benchmarks.load.client.runner makes a LoadRun of them;
metrics, page, sweep and compare read it. All times are seconds on one monotonic clock, counted
from the start of the run, unless the name says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.load.flags import flag, number

Message = dict[str, Any]
Backend = Literal["openai", "openai-chat"]
RampUp = Literal["linear", "exponential"]

ENDPOINTS: dict[str, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


@dataclass(frozen=True)
class BenchRequest:
    """One request of a dataset; exactly one of `prompt` and `messages` is set."""

    max_tokens: int
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    # The prompt's length, if the dataset knows it; the server's usage takes precedence.
    prompt_tokens: int | None = None
    # A replayed timestamp, from the start of the run.
    arrival_s: float | None = None
    # Fields of this request's body, which override those of the Target.
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError if it is not a valid request."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a request has either a prompt or messages")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; at least 1 is needed")


@dataclass(frozen=True)
class Target:
    """A server of the OpenAI API: address, endpoint, model, and the fields of every body."""

    base_url: str
    model: str
    backend: Backend = "openai"
    # Path below base_url; None: the backend's usual one.
    endpoint: str | None = None
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The address that requests are posted to."""
        return self.base_url.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])


@dataclass(frozen=True)
class LoadPattern:
    """When requests are sent: open loop by rate, ramp or replay, or closed loop by a limit."""

    request_rate: float = number(
        "--request-rate", math.inf, "requests/s, gamma gaps (inf: all at once)", above=0
    )
    burstiness: float = number(
        "--burstiness",
        1.0,
        "shape of the gaps: 1 Poisson, below 1 bursts, inf a clock (1)",
        above=0,
    )
    ramp_up: RampUp | None = flag("--ramp-up-strategy", choices=("linear", "exponential"))
    ramp_up_start_rps: float | None = number("--ramp-up-start-rps", None)
    ramp_up_end_rps: float | None = number("--ramp-up-end-rps", None)
    replay: bool = flag(
        "--replay --self-timed", False, "send at the dataset's own timestamps", action="store_true"
    )
    time_scale: float = number("--time-scale", 1.0, "2 replays half as fast", above=0)
    max_concurrency: int | None = number(
        "--max-concurrency", None, "most requests with the server at once", kind=int, least=1
    )
    request_timeout_s: float = number(
        "--request-timeout", 600.0, "a request without an end after N s has failed (600)", above=0
    )
    seed: int = number("--seed", 0, "of arrivals and dataset (0)", kind=int)


@dataclass(frozen=True)
class MeasuredRequest:
    """All measurements of one request; None for a point that it never reached.

    intended_s <= admitted_s <= sent_s <= first_token_s <= last_token_s <= end_s.

    `intended_s` is its scheduled time: the arrival time in an open loop; in a closed loop (an
    infinite rate under a concurrency limit) the time when a place became free. From intended to
    admitted it waited for a place under --max-concurrency; from admitted to sent is the client's
    own delay.

    An arrival is one read from the socket with output: events in one read arrive at the same time.
    `arrival_tokens` are the tokens of each arrival; exact if the server counts them (token ids,
    logprobs, running usage) or sent one token per event, else the tokens of `usage` divided by
    length of text.
    """

    index: int
    intended_s: float
    admitted_s: float | None = None
    sent_s: float | None = None
    first_token_s: float | None = None
    # The last output, or the finish reason if that came later.
    last_token_s: float | None = None
    # The time when the reply was complete, or the failure was noticed.
    end_s: float | None = None
    arrival_times_s: tuple[float, ...] = ()
    arrival_tokens: tuple[int, ...] = ()
    arrival_tokens_exact: bool = True
    # The number of events with output.
    num_events: int = 0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    # "usage": the server's count. "events": a lower bound from its events, if it sent no count.
    tokens_from: Literal["usage", "events"] = "usage"
    max_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    http_status: int | None = None
    # None if it succeeded, else a short stable name, e.g. "http_429", "timeout", "connection".
    error_kind: str | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the reply is complete."""
        return self.error_kind is None


@dataclass(frozen=True)
class ClientHealth:
    """Whether the client itself kept up; if `saturated`, the figures are the client's limits."""

    # CPU seconds of this process over the run's duration: 1.0 is one core.
    cpu_share: float
    # How late a periodic timer of the event loop fired, in seconds.
    loop_lag_p50_s: float
    loop_lag_p99_s: float
    loop_lag_max_s: float
    # sent_s - admitted_s over all requests, in seconds.
    send_lateness_p50_s: float
    send_lateness_p99_s: float
    send_lateness_max_s: float
    # One full sentence for each reason why the client counts as saturated.
    reasons: tuple[str, ...] = ()

    @property
    def saturated(self) -> bool:
        """Whether the figures may be limited by the client instead of the server."""
        return bool(self.reasons)


@dataclass(frozen=True)
class LoadRun:
    """One load test of one target: what metrics, JSON, report, sweep and compare read."""

    target: Target
    load: LoadPattern
    records: tuple[MeasuredRequest, ...]
    health: ClientHealth
    duration_s: float
    # Wall-clock start, ISO 8601 with the time zone.
    started_at: str
    # The number of planned requests; more than len(records) if it was interrupted.
    num_requested: int
    interrupted: bool = False
    # The dataset and other facts that the caller adds to the result.
    settings: dict[str, Any] = field(default_factory=dict)
