"""A stream that a client may continue at any gateway: the ids of its events, and where it was cut.

Owns the headers Idempotency-Key and Last-Event-ID and the form of ids. Nothing is stored. A request
with a key draws its seed from it, so the same request gives the same tokens again: the answer is
generated anew (its prompt is cached) and what its client has is left out. An id says how many
tokens there were and which, so that an answer that comes out otherwise is an error, not a text
with a seam. Knows no JSON; called by server.gateway.handler.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Self

import msgspec

from server.gateway.bodies.fields import MAX_REQUEST_ID_CHARS
from topspin.errors import InvalidRequest, RequestError
from topspin.messages import RequestOutput, pack_ints

KEY_HEADER: Final = "Idempotency-Key"
LAST_HEADER: Final = "Last-Event-ID"
RESUMPTION_HEADERS: Final = (KEY_HEADER, LAST_HEADER)
_ID: Final = re.compile(r"(\d{1,9})-(\d{1,9})\.(\d{1,9})-(\d{1,12})-([0-9a-f]{16})", re.ASCII)
_END: Final = b"\n\n"


class Position(NamedTuple):
    """The place behind the `num_events`-th event of an output.

    The output has the tokens `start` to `num_tokens` of the answer. `digest` is of all tokens up to
    there, `created_at_s` the time that all events show.
    """

    start: int
    num_tokens: int
    num_events: int
    created_at_s: int
    digest: str

    def __str__(self) -> str:
        tokens = f"{self.start}-{self.num_tokens}"
        return f"{tokens}.{self.num_events}-{self.created_at_s}-{self.digest}"


class Resumption:
    """The events of one stream of one choice, and those of them that its client has.

    `seed` and `request_id` follow from the key, `created_at_s` from the stream that was cut.
    """

    def __init__(self, key: str, tenant: str, *, last: Position | None, now_s: int) -> None:
        named = hashlib.sha256(f"{tenant}\0{key}".encode())
        self.request_id = f"key-{named.hexdigest()[:32]}"
        self.seed = int.from_bytes(named.digest()[-7:], "little")
        self.created_at_s = now_s if last is None else last.created_at_s
        self._last = last
        self._tokens = hashlib.sha256()
        self._start = self._num_tokens = 0
        self._held: RequestOutput | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str], *, tenant: str, now_s: int) -> Self:
        """Return what the headers, one of which is there, ask for; raises InvalidRequest."""
        key, given = headers.get(KEY_HEADER), headers.get(LAST_HEADER)
        if not key or len(key) > MAX_REQUEST_ID_CHARS or not (key.isascii() and key.isprintable()):
            reason = f"`{KEY_HEADER}` must have 1 to {MAX_REQUEST_ID_CHARS} printable characters"
            if key is None:
                reason = f"`{LAST_HEADER}` needs the `{KEY_HEADER}` of the stream that was cut"
            raise InvalidRequest(reason, param=KEY_HEADER)
        last = None
        if given is not None:
            match = _ID.fullmatch(given)
            if match is None:
                raise InvalidRequest(
                    f"`{LAST_HEADER}` is no id of an event of this server", param=LAST_HEADER
                )
            start, num_tokens, num_events, created_at_s = map(int, match.groups()[:4])
            last = Position(start, num_tokens, num_events, created_at_s, match[5])
        return cls(key, tenant, last=last, now_s=now_s)

    def check(self, *, num_choices: int, stream: bool) -> None:
        """Raise InvalidRequest if the request is none that goes on where it was cut."""
        if self._last is not None and (num_choices != 1 or not stream):
            raise InvalidRequest(
                f"`{LAST_HEADER}`: only a stream of one choice goes on", param=LAST_HEADER
            )

    def pieces(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """Yield an output in the pieces that the client has had, as far as it has.

        The last event that it has may be one of several of an output, which are the same only for
        the same tokens at once.
        """
        for piece in self._cut(output):
            held, self._held = self._held, None
            joined = piece if held is None else _joined(held, piece)
            end = self._num_tokens + len(joined.token_ids)
            last = self._last
            is_within = (
                last is not None and last.start <= self._num_tokens and end < last.num_tokens
            )
            if is_within and piece.finish_reason is None:
                self._held = joined
            else:
                yield joined

    def _cut(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """Yield an output cut where the client's last output begins and ends."""
        held = 0 if self._held is None else len(self._held.token_ids)
        done = self._num_tokens + held
        ends = [] if self._last is None else [self._last.start - done, self._last.num_tokens - done]
        start, size = 0, len(output.token_ids)
        for end in (*(end for end in ends if 0 < end < size), size):
            is_last = end == size
            yield msgspec.structs.replace(
                output,
                index=output.index + start,
                token_ids=output.token_ids[start:end],
                logprobs=output.logprobs[start:end],
                prompt_logprobs=output.prompt_logprobs if start == 0 else (),
                finish_reason=output.finish_reason if is_last else None,
                stop_token_id=output.stop_token_id if is_last else None,
            )
            start = end

    def added(self, output: RequestOutput) -> None:
        """Note an output that its choice has got."""
        self._start = self._num_tokens
        self._num_tokens += len(output.token_ids)
        self._tokens.update(pack_ints(output.token_ids))

    def events(self, events: bytes) -> bytes:
        """Return the events of the last output with their ids, without those that the client has.

        Raises AnswerChanged if the tokens are not those that the client has had.
        """
        digest, last = self._tokens.hexdigest()[:16], self._last
        num_had = 0
        if last is not None and self._num_tokens <= last.num_tokens:
            if self._num_tokens < last.num_tokens:
                return b""
            if digest != last.digest:
                raise AnswerChanged("the answer came out otherwise; ask without Last-Event-ID")
            num_had = last.num_events
        found = []
        for number, event in enumerate(events.split(_END)[:-1], start=1):
            tokens = (self._start, self._num_tokens)
            place = Position(*tokens, number, self.created_at_s, digest)
            if number > num_had:
                found.append(f"id: {place}\n".encode() + event + _END)
        return b"".join(found)


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Return two outputs that follow each other as one."""
    return msgspec.structs.replace(
        second,
        index=first.index,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        queue_s=first.queue_s,
        prefill_s=first.prefill_s,
    )


class AnswerChanged(RequestError):
    """A stream cannot go on: another computation of it has other tokens."""

    code = "answer_changed"
    status = 409
