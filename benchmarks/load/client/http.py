"""One request over HTTP: send it, read the stream, and record the times of arrivals.

Owns the connection pool, the request body, the timeout and the names of errors. Decides
neither when a request is sent nor how to evaluate it: benchmarks.load.client.runner calls it, one
task per request. No request is ever sent twice: an error is a measurement.
"""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import dataclass, replace

import aiohttp
import msgspec

from benchmarks.load.client.reply import ReplyError, ReplyReader, tokens_per_arrival
from benchmarks.load.contracts import BenchRequest, MeasuredRequest, Target
from topspin.errors import ConfigError

# Fields of the body that the client owns, each with the reason why it may not be set.
OWNED_FIELDS = {
    "model": "use --model",
    "prompt": "the dataset makes it",
    "messages": "the dataset makes them",
    "max_tokens": "the dataset sets it",
    "stream": "latencies are measured on a stream",
    "n": "one answer a request is measured",
    "best_of": "one answer a request is measured",
}
# How long the body may stay open after [DONE] before the connection is closed.
AFTER_DONE_S = 1.0
MAX_ERROR_TEXT = 500


def request_body(target: Target, request: BenchRequest) -> bytes:
    """Return the JSON body of `request`.

    Raises ConfigError if the target's endpoint does not support it, or sets a client's field.
    """
    body: dict[str, object] = {"model": target.model}
    if target.backend == "openai-chat":
        if isinstance(request.prompt, list):
            raise ConfigError(
                "prompts of token ids go to completions only: use --backend openai, "
                "or a dataset of texts"
            )
        alone = {"role": "user", "content": request.prompt}
        body["messages"] = request.messages or [alone]
    elif request.prompt is None:
        raise ConfigError("messages go to the chat endpoint only: use --backend openai-chat")
    else:
        body["prompt"] = request.prompt
    body |= {
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name, value in (target.extra_body | request.extra_body).items():
        if name in OWNED_FIELDS:
            raise ConfigError(f"the extra body may not set {name!r}: {OWNED_FIELDS[name]}")
        body[name] = value
    return msgspec.json.encode(body)


@dataclass
class Snapshot:
    """The state of a run, for progress displays; `num_events` counts events with output."""

    elapsed_s: float = 0.0
    num_requests: int = 0
    num_sent: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_events: int = 0

    @property
    def num_running(self) -> int:
        """The number of requests at the server."""
        return self.num_sent - self.num_completed - self.num_failed


class Client:
    """Sends requests to one target and records them; use it as an async context.

    Times count from `begin`, which comes before the first `send`.
    """

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self._start_s = time.perf_counter()
        self.state = Snapshot()
        self._target = target
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Client:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(
            # A connection per request: some servers close one after a streamed answer, and a
            # request that meets that close would count as the server's failure.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers=headers | self._target.headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    def begin(self) -> None:
        """Set time 0 to now."""
        self._start_s = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since time 0."""
        return time.perf_counter() - self._start_s

    async def send(self, body: bytes, planned: MeasuredRequest) -> MeasuredRequest:
        """Send `body`, read the reply to its end, and return `planned` with the measurements.

        Errors are in the record; so is a cancellation, as "interrupted", after which the
        caller has to stop.
        """
        reader = ReplyReader()
        sent_s = self.now()
        self.state.num_sent += 1
        kind: str | None = None
        message = ""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                await self._exchange(body, reader, deadline)
        except ReplyError as error:
            kind, message = error.kind, str(error)
        except asyncio.CancelledError:
            kind, message = "interrupted", "the run was ended"
        except TimeoutError:
            if reader.done_s is None:
                kind, message = "timeout", f"no end within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            kind, message = _error_kind(error), f"{type(error).__name__}: {error}"
        record = _completed(
            replace(planned, sent_s=sent_s),
            reader,
            kind=kind,
            message=message,
            end_s=self.now(),
        )
        if record.ok:
            self.state.num_completed += 1
        elif kind != "interrupted":
            self.state.num_failed += 1
        return record

    async def _exchange(self, body: bytes, reader: ReplyReader, deadline: asyncio.Timeout) -> None:
        """Post and read into `reader`; raises the errors of both."""
        url = self._target.url
        async with self._session.post(url, data=body, allow_redirects=False) as response:
            reader.http_status = response.status
            if response.status != 200:
                text = (await response.text(errors="replace"))[:MAX_ERROR_TEXT]
                raise ReplyError(f"http_{response.status}", text or str(response.reason))
            if response.content_type == "application/json":
                text = (await response.text(errors="replace"))[:MAX_ERROR_TEXT]
                raise ReplyError("bad_reply", f"the server did not stream: {text}")
            async for block in response.content.iter_any():
                self.state.num_events += reader.feed(block, self.now())
                if reader.done_s is not None:
                    # Only the end of the body is still to come; it needs no concurrency place.
                    soon = asyncio.get_running_loop().time() + AFTER_DONE_S
                    deadline.reschedule(min(deadline.when() or soon, soon))
            reader.finish(self.now())


def _completed(
    record: MeasuredRequest, reader: ReplyReader, *, kind: str | None, message: str, end_s: float
) -> MeasuredRequest:
    arrivals = reader.arrivals
    total = reader.completion_tokens
    counts = tokens_per_arrival(arrivals, total)
    # An answer that ends with its first token (end of sequence) has no arrival.
    first_s = arrivals[0].time_s if arrivals else reader.last_choice_s
    return replace(
        record,
        first_token_s=first_s,
        last_token_s=reader.last_choice_s,
        end_s=reader.done_s if kind is None and reader.done_s is not None else end_s,
        arrival_times_s=tuple(arrival.time_s for arrival in arrivals),
        arrival_tokens=counts.per_arrival,
        arrival_tokens_exact=counts.exact,
        num_events=sum(arrival.num_events for arrival in arrivals),
        prompt_tokens=(
            record.prompt_tokens if reader.prompt_tokens is None else reader.prompt_tokens
        ),
        output_tokens=sum(counts.per_arrival) if total is None else total,
        tokens_from="events" if total is None else "usage",
        text=reader.text,
        http_status=reader.http_status,
        finish_reason=reader.finish_reason,
        error_kind=kind,
        error=message,
    )


def _error_kind(error: Exception) -> str:
    """Return the stable name of a connection's error."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "client_out_of_files"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return "bad_url"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError | OSError):
        return "disconnected"
    return "http_protocol"
