"""One streamed reply of the OpenAI API, read event by event.

Owns the meaning of events (output, token count or error) and the assignment of tokens to arrival
times. Takes bytes and times; knows no socket and no clock. benchmarks.load.client.http feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from benchmarks.load.client.sse import EventParser


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[msgspec.Raw] | None = None  # /v1/completions
    content: list[msgspec.Raw] | None = None  # /v1/chat/completions


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    # Some servers send an error as a separate object: {"object": "error", "message": ...}.
    object: str | None = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class ReplyError(Exception):
    """The reply is not a stream of the OpenAI API, or reports an error; `kind` is stable."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Arrival(NamedTuple):
    """The output in one read from the socket.

    `num_tokens` is None if an event does not give it; `total_tokens` is the server's running
    count after it, if it sends one.
    """

    time_s: float
    num_events: int
    num_chars: int
    num_tokens: int | None
    total_tokens: int | None


class ReplyReader:
    """Collects one reply; pass every read with its time to `feed`, then read the figures."""

    def __init__(self) -> None:
        self.http_status: int | None = None
        self.arrivals: list[Arrival] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None
        self.last_choice_s: float | None = None
        self.done_s: float | None = None
        self._parser = EventParser()
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The answer so far, without reasoning."""
        return "".join(self._texts)

    def feed(self, block: bytes, time_s: float) -> int:
        """Take one read that came at `time_s`; return the number of events with output.

        Raises ReplyError for invalid JSON and for an error from the server.
        """
        return self._take(self._parser.feed(block), time_s)

    def finish(self, time_s: float) -> None:
        """Take the end of the body; raises ReplyError if the reply is incomplete."""
        self._take(self._parser.finish(), time_s)
        if self.last_choice_s is None:
            raise ReplyError("empty", "the reply ended without a single choice")
        if self.done_s is None:
            if self.finish_reason is None:
                raise ReplyError("truncated", "the reply ended with neither a reason nor [DONE]")
            self.done_s = time_s

    def _take(self, events: list[bytes], time_s: float) -> int:
        num_events = num_chars = 0
        num_tokens: int | None = 0
        total_tokens = None
        for data in events:
            if data == b"[DONE]":
                if self.last_choice_s is None:
                    raise ReplyError("empty", "the reply ended without a single choice")
                self.done_s = time_s
                continue
            event = _parse(data)
            if event.usage is not None:
                total_tokens = self._count(event.usage)
            for choice in event.choices or ():
                self.last_choice_s = time_s
                self.finish_reason = choice.finish_reason or self.finish_reason
                output = _output(choice, has_begun=bool(self.arrivals or num_events))
                if output is None:
                    continue
                num_events += 1
                num_chars += output.num_chars
                self._texts.append(output.text)
                if output.num_tokens is None or num_tokens is None:
                    num_tokens = None
                else:
                    num_tokens += output.num_tokens
        if num_events:
            arrival = Arrival(time_s, num_events, num_chars, num_tokens, total_tokens)
            self.arrivals.append(arrival)
        return num_events

    def _count(self, usage: _Usage) -> int | None:
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self.completion_tokens = usage.completion_tokens
        return usage.completion_tokens


class _Output(NamedTuple):
    text: str
    num_chars: int
    num_tokens: int | None


def _parse(data: bytes) -> _Event:
    try:
        event = _decode(data)
    except msgspec.MsgspecError as error:
        sample = data[:80].decode(errors="replace")
        raise ReplyError("bad_reply", f"not an event of the API ({error}): {sample}") from None
    if event.error is not None or event.object == "error":
        raise ReplyError("stream_error", _message(event))
    return event


def _message(event: _Event) -> str:
    error = event.error if event.error is not None else event.message
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)


def _output(choice: _Choice, *, has_begun: bool) -> _Output | None:
    """Return the output in `choice`, or None if it has none.

    A token may have no text yet (an incomplete character): an empty text is output, unless it
    only gives the role or the finish reason. Before any other output it is none either, if it has
    no token: some servers say with it that they have begun.
    """
    if choice.index:
        return None
    delta = choice.delta
    text = choice.text if delta is None else delta.content
    hidden = "" if delta is None else (delta.reasoning_content or delta.reasoning or "")
    num_tokens = _num_tokens(choice)
    num_chars = len(text or "") + len(hidden)
    if not num_chars and not num_tokens and not (delta is not None and delta.tool_calls):
        announces = choice.finish_reason is not None or (delta is not None and delta.role)
        if text is None or announces or not has_begun:
            return None
    return _Output(text or "", num_chars, num_tokens)


def _num_tokens(choice: _Choice) -> int | None:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    if choice.logprobs is not None:
        tokens = choice.logprobs.tokens or choice.logprobs.content
        return len(tokens) if tokens else None
    return None


class TokenCounts(NamedTuple):
    """The number of tokens of each arrival, and whether the server gave it."""

    per_arrival: tuple[int, ...]
    exact: bool


def tokens_per_arrival(arrivals: Sequence[Arrival], total: int | None) -> TokenCounts:
    """Assign `total` completion tokens (None: unknown) to the arrivals that brought them.

    In order of preference: the server's running count; the tokens given in each event; one
    token per event if their number equals the total, or is one less, because the token that
    ends an answer has no text. Else an estimate: the total divided by length of text.
    """
    running = [arrival.total_tokens for arrival in arrivals]
    if all(count is not None for count in running):
        marks = [0, *(count for count in running if count is not None)]
        return TokenCounts(tuple(after - before for before, after in pairwise(marks)), exact=True)
    named = [arrival.num_tokens for arrival in arrivals]
    if all(count is not None for count in named):
        return TokenCounts(tuple(count for count in named if count is not None), exact=True)
    events = tuple(arrival.num_events for arrival in arrivals)
    if total is None or sum(events) in (total, total - 1):
        return TokenCounts(events, exact=total is not None)
    weights = [arrival.num_chars for arrival in arrivals]
    return TokenCounts(_share(total, weights if any(weights) else events), exact=False)


def _share(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide `total` by `weights`, rounding the running sum so that the parts add up to `total`."""
    whole = sum(weights)
    marks = [0]
    reached = 0
    for weight in weights:
        reached += weight
        marks.append(round(total * reached / whole))
    return tuple(after - before for before, after in pairwise(marks))
