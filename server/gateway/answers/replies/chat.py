"""Answers of POST /v1/chat/completions, streamed and whole.

Owns the sequence of a choice's events: its role, the parts of its message, its finish.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from models.text.tokenizer import Tokenizer
from server.gateway.answers.cache_report import PrefixCacheReport, PromptMap
from server.gateway.answers.generation import Delta
from server.gateway.answers.replies.base import (
    COMMENT,
    DONE_EVENT,
    Choice,
    ReplyHead,
    error_event,
    prompt_logprobs,
    shown_stop,
)
from server.gateway.answers.wire import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessageOut,
    FinishReason,
    FunctionOut,
    ToolCallOut,
    TopLogprob,
    Usage,
    finite,
)
from server.gateway.parsing.message import Message
from server.gateway.parsing.parts import CallArguments, CallBegin, Content, Part, Reasoning
from topspin.messages import TokenLogprobs


class ChatReplies:
    """Answers of POST /v1/chat/completions."""

    keep_alive = COMMENT

    def __init__(
        self, head: ReplyHead, tokenizer: Tokenizer, places: PromptMap | None = None
    ) -> None:
        """`places`: report where the prompt stops being in the cache."""
        self._places = places
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
            first = self._event(
                role, usage=usage, prompt_token_ids=prompt, prefix_cache=self._report(choice)
            )
            events.append(first)
        choice.num_streamed_tokens += len(delta.token_ids)
        usage = head.usage_so_far(choice)
        grown = [_grown(part) for part in delta.parts]
        if not grown and delta.shown_ids and head.shows_tokens:
            grown = [ChatDelta(content="")]
        for nth, each in enumerate(grown):
            # All tokens of a step go with its first part.
            token_ids = delta.shown_ids if nth == 0 else ()
            chunk = ChatChunkChoice(
                index=index,
                delta=each,
                logprobs=self._logprobs(token_ids, delta.logprobs if nth == 0 else ()),
                token_ids=list(token_ids) if head.return_token_ids else UNSET,
            )
            events.append(self._event(chunk, usage=usage))
        if delta.finish_reason is not None:
            finish = ChatChunkChoice(
                index=index,
                delta=ChatDelta(),
                finish_reason=chat_finish(choice),
                stop_reason=shown_stop(delta.stop_reason),
            )
            events.append(self._event(finish, usage=usage))
        return b"".join(events)

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the chunk with the counts, if it was asked for, and the end."""
        last = self._event(None, usage=usage) if self._head.include_usage else b""
        return last + DONE_EVENT

    def failed(self, error: Exception) -> bytes:
        """Return the error and the end."""
        return error_event(error) + DONE_EVENT

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer."""
        head, prompt = self._head, choices[0].prompt
        answer = ChatAnswer(
            id=head.id,
            created=head.created_at_s,
            model=head.model,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
            prompt_logprobs=prompt_logprobs(head, prompt, self._tokenizer, self._encoder),
            prompt_token_ids=prompt.ids if head.return_token_ids else UNSET,
            prefix_cache=self._report(choices[0]),
        )
        return self._encoder.encode(answer)

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=_whole_message(choice.message),
            logprobs=self._logprobs(choice.token_ids, choice.logprobs),
            finish_reason=chat_finish(choice),
            stop_reason=shown_stop(choice.stop_reason),
            token_ids=choice.token_ids if self._head.return_token_ids else UNSET,
        )

    def _event(
        self,
        choice: ChatChunkChoice | None,
        *,
        usage: Usage | None = None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        prefix_cache: PrefixCacheReport | UnsetType = UNSET,
    ) -> bytes:
        head = self._head
        chunk = ChatChunk(
            id=head.id,
            created=head.created_at_s,
            model=head.model,
            choices=[] if choice is None else [choice],
            usage=usage if head.include_usage else UNSET,
            prompt_token_ids=prompt_token_ids,
            prefix_cache=prefix_cache,
        )
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"

    def _report(self, choice: Choice) -> PrefixCacheReport | UnsetType:
        if self._places is None or not choice.is_first:
            return UNSET
        ids, num_cached = choice.prompt.ids, choice.num_cached_tokens
        cached = self._tokenizer.decode(ids[:num_cached], skip_special_tokens=False)
        return self._places.report(num_cached=num_cached, num_tokens=len(ids), cached_text=cached)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> ChatLogprobs | None:
        return chat_logprobs(self._head, self._tokenizer, token_ids, logprobs)


def chat_logprobs(
    head: ReplyHead,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
) -> ChatLogprobs | None:
    """Return the entries of these tokens, None unless they were asked for."""
    num_top = head.num_logprobs
    if num_top is None:
        return None
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=tokenizer.token_text(token_id),
                logprob=finite(entry.logprob),
                bytes=list(tokenizer.token_bytes(token_id)),
                top_logprobs=_top(tokenizer, entry, num_top),
            )
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def _top(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> list[TopLogprob]:
    best = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    return [
        TopLogprob(
            token=tokenizer.token_text(token_id),
            logprob=finite(logprob),
            bytes=list(tokenizer.token_bytes(token_id)),
        )
        for token_id, logprob in best
    ]


def chat_finish(choice: Choice) -> FinishReason:
    """Return why the choice ended.

    As OpenAI says, a call that the client named is a plain end. So is one that a stop string cut.
    """
    message, reason = choice.message, choice.finish_reason
    assert reason is not None, "only complete choices are answered"
    is_cut = isinstance(choice.stop_reason, str)
    is_call = reason == "stop" and message.calls and not message.options.is_named and not is_cut
    return "tool_calls" if is_call else reason


def _grown(part: Part) -> ChatDelta:
    match part:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning=text, reasoning_content=text)
        case CallBegin(index, id, name):
            function = FunctionOut(name=name, arguments="")
            begun = ToolCallOut(index=index, id=id, type="function", function=function)
            return ChatDelta(tool_calls=[begun])
        case CallArguments(index, text):
            more = ToolCallOut(index=index, function=FunctionOut(arguments=text))
            return ChatDelta(tool_calls=[more])


def _whole_message(message: Message) -> ChatMessageOut:
    calls = [
        ToolCallOut(
            id=call.id,
            type="function",
            function=FunctionOut(name=call.name, arguments=call.arguments),
        )
        for call in message.calls
    ]
    content, reasoning = message.content, message.reasoning
    return ChatMessageOut(
        content=None if calls and not content else content,
        reasoning=reasoning or UNSET,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
