"""Answers of POST /v1/chat/completions, streamed and whole.

Owns the sequence of a choice's events: its role, the parts of its message, its finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from models.text.tokenizer import Tokenizer
from server.gateway.dialects.chat.cache_report import PrefixCacheReport, PromptMap
from server.gateway.dialects.chunks import ChunkReplies, FinishReason, finite, shown_stop
from server.gateway.dialects.dialect import ReplyHead
from server.gateway.generation.choice import Choice
from server.gateway.generation.params import RequestParams
from server.gateway.generation.usage import Usage
from server.gateway.parsing.message import AnswerMessage
from server.gateway.parsing.parts import CallArguments, CallBegin, Content, Part, Reasoning
from topspin.messages import TokenLogprobs


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate for a position. `bytes` are the token's, possibly part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, frozen=True, kw_only=True):
    """The chosen token of a position and the best candidates.

    Or those that the request named, and the chosen one.
    """

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat choice, one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class FunctionOut(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call, or of an addition to one; `arguments` is JSON text."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallOut(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call; in a chunk with its index, and after its first chunk with nothing else new."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionOut


class ChatMessageOut(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message; its content is null if it only calls tools.

    Its reasoning has two names, since clients read one or the other.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a whole chat answer."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a chat answer that is not streamed."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Raw | None] | None
    prompt_token_ids: list[int] | None
    prefix_cache: PrefixCacheReport | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The addition of a chunk to the message; empty in the chunk that ends a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prefix_cache: PrefixCacheReport | UnsetType = UNSET


class ChatReplies(ChunkReplies):
    """Answers of POST /v1/chat/completions: role, parts of the message, finish."""

    chunk = ChatChunk

    def __init__(
        self,
        head: ReplyHead,
        tokenizer: Tokenizer,
        places: PromptMap | None = None,
        echoed: str = "",
    ) -> None:
        """`places`: report where the prompt stops being cached. `echoed` begins the answer."""
        super().__init__(head, tokenizer)
        self._places = places
        self._echoed = echoed

    def events(self, choice: Choice) -> bytes:
        """Return role (once), content (if there is any) and finish events."""
        params, index = self._params, choice.index
        events: list[bytes] = []
        if not choice.has_begun:
            role = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            first = self._event(
                role,
                usage=self._usage_so_far(choice, choice.num_shown_tokens),
                prompt_token_ids=self._prompt_ids(choice.prompt),
                prefix_cache=self._report(choice),
            )
            events.append(first)
            if self._echoed:
                echo = ChatChunkChoice(index=index, delta=ChatDelta(content=self._echoed))
                events.append(self._event(echo, usage=self._usage_so_far(choice, 0)))
        usage = self._usage_so_far(choice, choice.num_tokens)
        grown = [_grown(part) for part in choice.parts]
        if not grown and choice.token_ids and self._shows_tokens:
            grown = [ChatDelta(content="")]
        # All tokens of a step go with its first part.
        token_ids, logprobs = choice.token_ids, choice.logprobs
        for each in grown:
            chunk = ChatChunkChoice(
                index=index,
                delta=each,
                logprobs=self._logprobs(token_ids, logprobs),
                token_ids=token_ids if params.return_token_ids else UNSET,
            )
            events.append(self._event(chunk, usage=usage))
            token_ids, logprobs = [], []
        if choice.finish_reason is not None:
            finish = ChatChunkChoice(
                index=index,
                delta=ChatDelta(),
                finish_reason=chat_finish(choice),
                stop_reason=shown_stop(choice.stop_reason),
            )
            events.append(self._event(finish, usage=usage))
        return b"".join(events)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer."""
        prompt = choices[0].prompt
        answer = ChatAnswer(
            id=self._head.id,
            created=self._head.created_at_s,
            model=self._params.model,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
            prompt_logprobs=self._prompt_logprobs(prompt),
            prompt_token_ids=self._prompt_ids(prompt) or None,
            prefix_cache=self._report(choices[0]),
        )
        return self._encoder.encode(answer)

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=_whole_message(choice.message, self._echoed),
            logprobs=self._logprobs(choice.token_ids, choice.logprobs),
            finish_reason=chat_finish(choice),
            stop_reason=shown_stop(choice.stop_reason),
            token_ids=choice.token_ids if self._params.return_token_ids else None,
        )

    def _report(self, choice: Choice) -> PrefixCacheReport | UnsetType:
        if self._places is None or not choice.is_first:
            return UNSET
        ids, num_cached = choice.prompt.ids, choice.num_cached_tokens
        cached = self._tokenizer.decode(ids[:num_cached], skip_special_tokens=False)
        return self._places.report(num_cached=num_cached, num_tokens=len(ids), cached_text=cached)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> ChatLogprobs | None:
        return chat_logprobs(self._params, self._tokenizer, token_ids, logprobs)


def chat_logprobs(
    params: RequestParams,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
) -> ChatLogprobs | None:
    """Return the entries of these tokens, None unless they were asked for."""
    num_top = params.text.num_logprobs
    if num_top is None:
        return None

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        data = list(tokenizer.token_bytes(token_id))
        is_id = params.tokens_as_ids
        text = f"token_id:{token_id}" if is_id else tokenizer.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": data}

    content: list[ChatLogprob] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        best = [*zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)]
        if params.sampling.logprob_token_ids and token_id not in entry.top_ids:
            best.insert(0, (token_id, entry.logprob))
        top = [TopLogprob(**shown(*each)) for each in best]
        content.append(ChatLogprob(**shown(token_id, entry.logprob), top_logprobs=top))
    return ChatLogprobs(content=content)


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


def _whole_message(message: AnswerMessage, echoed: str) -> ChatMessageOut:
    calls = [
        ToolCallOut(
            id=call.id,
            type="function",
            function=FunctionOut(name=call.name, arguments=call.arguments),
        )
        for call in message.calls
    ]
    content, reasoning = echoed + message.content, message.reasoning
    return ChatMessageOut(
        content=None if calls and not content else content,
        reasoning=reasoning or UNSET,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
