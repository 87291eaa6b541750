"""The answers of the OpenAI API as structs, encoded by msgspec.

Owns the names and the order of members, and nothing else. `Optional` members are null when
they have no value, members that are UNSET are absent (they were not asked for).
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from server.gateway.answers.cache_report import PrefixCacheReport

FinishReason = Literal["stop", "length", "tool_calls"]

# OpenAI's value for a negligible probability; JSON has no infinity.
_LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """Return `logprob`, or the lowest value for minus infinity."""
    return max(logprob, _LOWEST_LOGPROB)


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens`: prompt tokens whose keys and values were in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning_tokens`: output tokens that the answer shows as reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate for a position. `bytes` are the token's, possibly part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen token of a position and the best candidates."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat choice, one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion choice; offsets count characters of its text.

    Parts of characters are `bytes:` and their bytes, at the offset of their character. An echoed
    prompt's first token has no entry. `top_logprobs` may hold encoded items.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | Raw | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate for a position of the prompt; the most likely one has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


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
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a chat answer that is not streamed."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Raw | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
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


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a completion or of a chunk; finish_reason is null until the last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Raw | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion answer, and also one event of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models; max_model_len is null until the engine has reported it.

    `root` is the checkpoint's directory on the server's host. `default_sampling_params` apply
    unless a request sets them; their `max_tokens` is for chats.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "topspin"
    root: str
    max_model_len: int | None
    vocab_size: int
    default_sampling_params: dict[str, float | None]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/models."""

    object: str = "list"
    data: list[ModelCard]
