"""The parts that the answers of OpenAI's older endpoints, chat and completions, share.

Owns the frame of their streams, and vLLM's form of a prompt's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from models.text.tokenizer import Tokenizer
from server.gateway.dialects.dialect import ReplyHead
from server.gateway.errors import describe
from server.gateway.generation.choice import Choice
from server.gateway.generation.prompts import Prompt
from server.gateway.generation.usage import PromptTokensDetails, Usage

COMMENT: Final = b": keep-alive\n\n"
"""Of server-sent events, which clients skip."""
_DONE: Final = b"data: [DONE]\n\n"
# OpenAI's value for a negligible probability; JSON has no infinity.
_LOWEST_LOGPROB: Final = -9999.0

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate for a position of the prompt; the most likely one has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


class ChunkReplies:
    """The frame of a stream of chunks, of the type `chunk`, which [DONE] ends."""

    keep_alive = COMMENT
    chunk: Callable[..., msgspec.Struct]

    def __init__(self, head: ReplyHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._params = head.params
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder()

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the chunk with the counts, if it was asked for, and the end."""
        last = self._event(None, usage=usage) if self._params.include_usage else b""
        return last + _DONE

    def failed(self, error: Exception) -> bytes:
        """Return the error and the end."""
        return b"data: " + describe(error).body() + b"\n\n" + _DONE

    def _event(
        self, choice: msgspec.Struct | None, *, usage: Usage | None = None, **members: object
    ) -> bytes:
        chunk = self.chunk(
            id=self._head.id,
            created=self._head.created_at_s,
            model=self._params.model,
            choices=[] if choice is None else [choice],
            usage=usage if self._params.include_usage else UNSET,
            **members,
        )
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"

    @property
    def _shows_tokens(self) -> bool:
        """Whether tokens are shown even while they have no text yet."""
        return self._params.return_token_ids or self._params.text.num_logprobs is not None

    def _usage_so_far(self, choice: Choice, num_tokens: int) -> Usage | None:
        """Return the counts of one choice; None unless every chunk carries them."""
        if not self._params.continuous_usage:
            return None
        num_prompt_tokens = len(choice.prompt.ids)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=num_prompt_tokens + num_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=choice.num_cached_tokens),
        )

    def _prompt_ids(self, prompt: Prompt) -> list[int] | UnsetType:
        return prompt.ids if self._params.return_token_ids else UNSET

    def _prompt_logprobs(self, prompt: Prompt) -> list[Raw | None] | None:
        """Return vLLM's `prompt_logprobs`: None, then per token an object from ids to candidates.

        None unless they were asked for.

        A token's object has the token itself and the best ones. Encoded token by token, since one
        encoding of a long prompt's would hold the interpreter's lock for long.
        """
        num_top = self._params.num_prompt_logprobs
        if num_top is None:
            return None
        rows: list[Raw | None] = [None]
        for token_id, entry in zip(prompt.ids[1:], prompt.scores, strict=True):
            candidates = {token_id: (entry.logprob, entry.rank)}
            best = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
            for rank, (candidate_id, logprob) in enumerate(best, start=1):
                candidates.setdefault(candidate_id, (logprob, rank))
            row = {
                candidate_id: PromptLogprob(
                    logprob=finite(logprob),
                    rank=rank,
                    decoded_token=self._tokenizer.token_text(candidate_id),
                )
                for candidate_id, (logprob, rank) in candidates.items()
            }
            rows.append(Raw(self._encoder.encode(row)))
        return rows


def finite(logprob: float) -> float:
    """Return `logprob`, or the lowest value for minus infinity."""
    return max(logprob, _LOWEST_LOGPROB)


def shown_stop(reason: str | int | None) -> str | int | UnsetType:
    """Return the member `stop_reason`, which only answers that such a stop ended have."""
    return UNSET if reason is None else reason
