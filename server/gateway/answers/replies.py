"""Encoding of text deltas as the bytes of an answer, streamed or whole, for both endpoints.

Owns the sequence of events per choice (chat: role, contents, finish; completions: texts,
finish) and the two forms of log-probabilities. Pure: knows no engine and no connection.
Called by server.gateway.handler; every method returns encoded JSON or SSE events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, Raw, UnsetType

from models.tokenizer import Tokenizer
from server.gateway.answers.generation import ChoiceText, Delta
from server.gateway.answers.prompts import Prompt, encode_prompt_logprobs
from server.gateway.answers.wire import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessageOut,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    PromptTokensDetails,
    TopLogprob,
    Usage,
    finite,
)
from server.gateway.errors import describe
from topspin.messages import TokenLogprobs

DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(kw_only=True, slots=True)
class Choice:
    """One choice of a request as it grows.

    `is_first`: of its prompt's choices. `shown`, `token_ids` and `logprobs` fill only if the answer
    is sent whole, `num_streamed_tokens` only if it is streamed.
    """

    index: int
    prompt: Prompt
    is_first: bool
    text: ChoiceText
    num_tokens: int = 0
    num_streamed_tokens: int = 0
    num_cached_tokens: int = 0
    last_output_at_s: float | None = None
    finish_reason: FinishReason | None = None
    num_logprob_chars: int = 0
    shown: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


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
    """The encoder of one endpoint's answers."""

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """Return the events for an addition to a choice."""

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event that carries the token counts, with no choices."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""


def error_event(error: Exception) -> bytes:
    """Return the event for a failure after the stream has begun."""
    return b"data: " + describe(error).encode() + b"\n\n"


class ChatReplies:
    """Answers of POST /v1/chat/completions."""

    def __init__(self, head: ReplyHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder()

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """Return role (once), content (if there is any) and finish events."""
        head, index = self._head, choice.index
        events: list[bytes] = []
        if delta.is_first:
            role = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            prompt = choice.prompt.ids if head.return_token_ids else UNSET
            usage = head.usage_so_far(choice)
            events.append(self._event(role, usage=usage, prompt_token_ids=prompt))
        choice.num_streamed_tokens += len(delta.token_ids)
        usage = head.usage_so_far(choice)
        if delta.text or (delta.token_ids and head.shows_tokens):
            content = ChatChunkChoice(
                index=index,
                delta=ChatDelta(content=delta.text),
                logprobs=self._logprobs(delta.token_ids, delta.logprobs),
                token_ids=list(delta.token_ids) if head.return_token_ids else UNSET,
            )
            events.append(self._event(content, usage=usage))
        if delta.finish_reason is not None:
            finish = ChatChunkChoice(
                index=index, delta=ChatDelta(), finish_reason=delta.finish_reason
            )
            events.append(self._event(finish, usage=usage))
        return b"".join(events)

    def usage_event(self, usage: Usage) -> bytes:
        """Return the last chunk."""
        return self._event(None, usage=usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer."""
        head, prompt = self._head, choices[0].prompt
        answer = ChatAnswer(
            id=head.id,
            created=head.created_at_s,
            model=head.model,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
            prompt_logprobs=_prompt_logprobs(head, prompt, self._tokenizer, self._encoder),
            prompt_token_ids=prompt.ids if head.return_token_ids else UNSET,
        )
        return self._encoder.encode(answer)

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish_reason is not None, "only complete choices are answered"
        return ChatChoice(
            index=choice.index,
            message=ChatMessageOut(content="".join(choice.shown)),
            logprobs=self._logprobs(choice.token_ids, choice.logprobs),
            finish_reason=choice.finish_reason,
            token_ids=choice.token_ids if self._head.return_token_ids else UNSET,
        )

    def _event(
        self,
        choice: ChatChunkChoice | None,
        *,
        usage: Usage | None = None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        head = self._head
        chunk = ChatChunk(
            id=head.id,
            created=head.created_at_s,
            model=head.model,
            choices=[] if choice is None else [choice],
            usage=usage if head.include_usage else UNSET,
            prompt_token_ids=prompt_token_ids,
        )
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> ChatLogprobs | None:
        num_top = self._head.num_logprobs
        if num_top is None:
            return None
        return ChatLogprobs(
            content=[
                ChatLogprob(
                    token=self._tokenizer.token_text(token_id),
                    logprob=finite(entry.logprob),
                    bytes=list(self._tokenizer.token_bytes(token_id)),
                    top_logprobs=self._top(entry, num_top),
                )
                for token_id, entry in zip(token_ids, logprobs, strict=True)
            ]
        )

    def _top(self, entry: TokenLogprobs, num_top: int) -> list[TopLogprob]:
        best = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        return [
            TopLogprob(
                token=self._tokenizer.token_text(token_id),
                logprob=finite(logprob),
                bytes=list(self._tokenizer.token_bytes(token_id)),
            )
            for token_id, logprob in best
        ]


class CompletionReplies:
    """Answers of POST /v1/completions."""

    def __init__(self, head: ReplyHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder()

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """Return text (if there is any; the first has an echoed prompt's) and finish events."""
        head = self._head
        events: list[bytes] = []
        choice.num_streamed_tokens += len(delta.token_ids)
        usage = head.usage_so_far(choice)
        echoes = delta.is_first and choice.prompt.echo is not None
        shows_tokens = head.shows_tokens and (delta.is_first or delta.token_ids)
        if delta.text or echoes or shows_tokens:
            grown = CompletionChoice(
                index=choice.index,
                text=(choice.prompt.echo or "") + delta.text if echoes else delta.text,
                logprobs=self._logprobs(choice, delta.token_ids, delta.logprobs, echoes=echoes),
                token_ids=list(delta.token_ids) if head.return_token_ids else UNSET,
                prompt_token_ids=self._prompt_of(choice) if delta.is_first else UNSET,
            )
            events.append(self._event(grown, usage=usage))
        if delta.finish_reason is not None:
            finish = CompletionChoice(
                index=choice.index, text="", finish_reason=delta.finish_reason
            )
            events.append(self._event(finish, usage=usage))
        return b"".join(events)

    def usage_event(self, usage: Usage) -> bytes:
        """Return the last chunk."""
        return self._event(None, usage=usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer."""
        head = self._head
        answer = Completion(
            id=head.id,
            created=head.created_at_s,
            model=head.model,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
        )
        return self._encoder.encode(answer)

    def _whole_choice(self, choice: Choice) -> CompletionChoice:
        head, prompt = self._head, choice.prompt
        return CompletionChoice(
            index=choice.index,
            text=(prompt.echo or "") + "".join(choice.shown),
            logprobs=self._logprobs(
                choice, choice.token_ids, choice.logprobs, echoes=prompt.echo is not None
            ),
            finish_reason=choice.finish_reason,
            token_ids=choice.token_ids if head.return_token_ids else UNSET,
            prompt_logprobs=_prompt_logprobs(head, prompt, self._tokenizer, self._encoder),
            prompt_token_ids=self._prompt_of(choice),
        )

    def _prompt_of(self, choice: Choice) -> list[int] | UnsetType:
        return choice.prompt.ids if self._head.return_token_ids else UNSET

    def _event(self, choice: CompletionChoice | None, *, usage: Usage | None = None) -> bytes:
        head = self._head
        chunk = Completion(
            id=head.id,
            created=head.created_at_s,
            model=head.model,
            choices=[] if choice is None else [choice],
            usage=usage if head.include_usage else UNSET,
        )
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"

    def _logprobs(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        *,
        echoes: bool,
    ) -> CompletionLogprobs | None:
        """Return the entries, with `echoes` the prompt's before them.

        Offsets continue from the end of the choice's last chunk. A prompt's entries are many, and
        encoded one by one: one encoding of all would hold the interpreter's lock for long.
        """
        num_top = self._head.num_logprobs
        if num_top is None:
            return None
        entries: Sequence[TokenLogprobs | None] = logprobs
        if echoes:
            token_ids = [*choice.prompt.ids, *token_ids]
            entries = [None, *choice.prompt.scores, *logprobs]
        shown = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._tokenizer.token_text(token_id)
            shown.text_offset.append(choice.num_logprob_chars)
            choice.num_logprob_chars += len(text)
            shown.tokens.append(text)
            if entry is None:
                shown.token_logprobs.append(None)
                shown.top_logprobs.append(None)
                continue
            shown.token_logprobs.append(finite(entry.logprob))
            top = self._top(text, entry, num_top)
            shown.top_logprobs.append(Raw(self._encoder.encode(top)) if echoes else top)
        return shown

    def _top(self, chosen: str, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """Return the best tokens and the chosen one; of equal texts the likeliest is kept."""
        top: dict[str, float] = {}
        best = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        for token_id, logprob in best:
            top.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
        top.setdefault(chosen, finite(entry.logprob))
        return top


def _prompt_logprobs(
    head: ReplyHead, prompt: Prompt, tokenizer: Tokenizer, encoder: msgspec.json.Encoder
) -> list[Raw | None] | UnsetType:
    """Return the log-probabilities of a prompt's tokens if the client asked for them."""
    if head.num_prompt_logprobs is None:
        return UNSET
    return encode_prompt_logprobs(
        prompt, head.num_prompt_logprobs, tokenizer=tokenizer, encoder=encoder
    )
