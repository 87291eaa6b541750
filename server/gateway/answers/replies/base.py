"""The shared side of all answers: choices as they grow, and the encoder of an API's answers.

Owns the types that the encoders of this folder have in common. An encoder is pure: it knows no
engine and no connection. Called by server.gateway.handler; every method returns encoded JSON or
SSE events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, Raw, UnsetType

from models.text.tokenizer import IncrementalDetokenizer, Tokenizer
from server.gateway.answers.generation import ChoiceText, Delta
from server.gateway.answers.prompts import Prompt, encode_prompt_logprobs
from server.gateway.answers.wire import PromptTokensDetails, Usage
from server.gateway.errors import describe
from server.gateway.operations.metrics import First
from server.gateway.parsing.message import Message
from topspin.messages import TokenLogprobs

DONE_EVENT = b"data: [DONE]\n\n"
# A comment of server-sent events, which clients skip.
COMMENT = b": keep-alive\n\n"


@dataclass(kw_only=True, slots=True)
class Choice:
    """One choice of a request as it grows.

    `is_first`: of its prompt's choices. `first`: its first output, once it is there. `shown`,
    `token_ids` and `logprobs` fill only if the answer is sent whole, `num_streamed_tokens` only if
    it is streamed. `offsets` makes the text again, token by token; of that, the first
    `num_logprob_chars` are of tokens with a log-probability.
    """

    index: int
    prompt: Prompt
    is_first: bool
    text: ChoiceText
    num_tokens: int = 0
    num_streamed_tokens: int = 0
    num_cached_tokens: int = 0
    first: First | None = None
    last_output_at_s: float | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    num_logprob_chars: int = 0
    offsets: IncrementalDetokenizer | None = None
    shown: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def message(self) -> Message:
        """The choice as a message; only where it is one."""
        assert self.text.message is not None
        return self.text.message


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyHead:
    """The members that all parts of an answer share, and the parts that the client asked for."""

    id: str
    created_at_s: int
    model: str
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool

    @property
    def shows_tokens(self) -> bool:
        """Whether tokens are shown even while they have no text yet."""
        return self.return_token_ids or self.num_logprobs is not None

    def usage_so_far(self, choice: Choice) -> Usage | None:
        """Return the counts of one choice so far; None unless every chunk carries them."""
        if not self.continuous_usage:
            return None
        num_prompt_tokens = len(choice.prompt.ids)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=choice.num_streamed_tokens,
            total_tokens=num_prompt_tokens + choice.num_streamed_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=choice.num_cached_tokens),
        )


class Replies(Protocol):
    """The encoder of one endpoint's answers; `keep_alive` says in a stream that more will come."""

    keep_alive: bytes

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """Return the events for an addition to a choice."""

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the events behind those of all choices."""

    def failed(self, error: Exception) -> bytes:
        """Return the events for a failure after the stream has begun."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""


def error_event(error: Exception) -> bytes:
    """Return OpenAI's event for a failure after the stream has begun."""
    return b"data: " + describe(error).encode() + b"\n\n"


def prompt_logprobs(
    head: ReplyHead, prompt: Prompt, tokenizer: Tokenizer, encoder: msgspec.json.Encoder
) -> list[Raw | None] | UnsetType:
    """Return the log-probabilities of a prompt's tokens if the client asked for them."""
    if head.num_prompt_logprobs is None:
        return UNSET
    return encode_prompt_logprobs(
        prompt, head.num_prompt_logprobs, tokenizer=tokenizer, encoder=encoder
    )


def shown_stop(reason: str | int | None) -> str | int | UnsetType:
    """Return the member `stop_reason`, which only answers that such a stop ended have."""
    return UNSET if reason is None else reason
