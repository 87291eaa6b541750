"""Answers of POST /v1/completions, streamed and whole: texts, then the finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, UnsetType

from models.text.tokenizer import IncrementalDetokenizer, Tokenizer
from server.gateway.dialects.chunks import ChunkReplies, FinishReason, finite, shown_stop
from server.gateway.dialects.dialect import ReplyHead
from server.gateway.generation.choice import Choice
from server.gateway.generation.usage import Usage
from topspin.messages import TokenLogprobs


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion choice; offsets count characters of its text.

    Parts of characters are `bytes:` and their bytes, at the offset of their character. An echoed
    prompt's first token has no entry. `top_logprobs` may hold encoded items.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | Raw | None]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a completion or of a chunk; finish_reason is null until the last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[Raw | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion answer, and also one event of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


@dataclass(slots=True)
class _Offsets:
    """Makes a choice's text again, token by token, to tell where in it each token begins."""

    stream: IncrementalDetokenizer
    num_chars: int = 0

    def next(self, token_ids: Sequence[int]) -> list[int]:
        """Return where each of the next tokens begins, or the character of which it is a part."""
        found: list[int] = []
        for token_id in token_ids:
            found.append(self.num_chars)
            self.num_chars += len(self.stream.push((token_id,)))
        return found


class CompletionReplies(ChunkReplies):
    """Answers of POST /v1/completions: texts, then the finish."""

    chunk = Completion

    def __init__(self, head: ReplyHead, tokenizer: Tokenizer) -> None:
        super().__init__(head, tokenizer)
        self._offsets: dict[int, _Offsets] = {}

    def events(self, choice: Choice) -> bytes:
        """Return text (if there is any; the first has an echoed prompt's) and finish events."""
        is_first = not choice.has_begun
        events: list[bytes] = []
        usage = self._usage_so_far(choice, choice.num_tokens)
        text, token_ids = choice.text, choice.token_ids
        echoes = is_first and choice.prompt.echo is not None
        if text or echoes or (self._shows_tokens and (is_first or token_ids)):
            grown = CompletionChoice(
                index=choice.index,
                text=(choice.prompt.echo or "") + text if echoes else text,
                logprobs=self._logprobs(choice, echoes=echoes),
                token_ids=token_ids if self._params.return_token_ids else UNSET,
                prompt_token_ids=self._prompt_ids(choice.prompt) if is_first else UNSET,
            )
            events.append(self._event(grown, usage=usage))
        if choice.finish_reason is not None:
            finish = CompletionChoice(
                index=choice.index,
                text="",
                finish_reason=choice.finish_reason,
                stop_reason=shown_stop(choice.stop_reason),
            )
            events.append(self._event(finish, usage=usage))
        return b"".join(events)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer."""
        answer = Completion(
            id=self._head.id,
            created=self._head.created_at_s,
            model=self._params.model,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
        )
        return self._encoder.encode(answer)

    def _whole_choice(self, choice: Choice) -> CompletionChoice:
        prompt = choice.prompt
        return CompletionChoice(
            index=choice.index,
            text=(prompt.echo or "") + choice.text,
            logprobs=self._logprobs(choice, echoes=prompt.echo is not None),
            finish_reason=choice.finish_reason,
            stop_reason=shown_stop(choice.stop_reason),
            token_ids=choice.token_ids if self._params.return_token_ids else None,
            prompt_logprobs=self._prompt_logprobs(prompt),
            prompt_token_ids=self._prompt_ids(prompt) or None,
        )

    def _logprobs(self, choice: Choice, *, echoes: bool) -> CompletionLogprobs | None:
        """Return the entries, with `echoes` the prompt's before them.

        Offsets continue from the end of the choice's last chunk. A prompt's entries are many, and
        encoded one by one: one encoding of all would hold the interpreter's lock for long.
        """
        num_top, prompt = self._params.text.num_logprobs, choice.prompt
        if num_top is None:
            return None
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            skips = self._params.text.skip_special_tokens
            stream = IncrementalDetokenizer(
                self._tokenizer, prompt_ids=prompt.ids, skip_special_tokens=skips
            )
            offsets = self._offsets[choice.index] = _Offsets(stream)
        shown = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        if echoes:
            stream = IncrementalDetokenizer(
                self._tokenizer, prompt_ids=(), skip_special_tokens=False
            )
            echoed = _Offsets(stream)
            places = echoed.next(prompt.ids)
            # What the tokenizer added before a text is not in the echo.
            num_added = echoed.num_chars - len(prompt.echo or "")
            shown.text_offset.extend(max(0, each - num_added) for each in places)
            offsets.num_chars = len(prompt.echo or "")
            self._add(shown, prompt.ids, [None, *prompt.scores], num_top, is_long=True)
        shown.text_offset.extend(offsets.next(choice.token_ids))
        self._add(shown, choice.token_ids, choice.logprobs, num_top, is_long=echoes)
        return shown

    def _add(
        self,
        shown: CompletionLogprobs,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        num_top: int,
        *,
        is_long: bool,
    ) -> None:
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._name(token_id)
            shown.tokens.append(text)
            if entry is None:
                shown.token_logprobs.append(None)
                shown.top_logprobs.append(None)
                continue
            shown.token_logprobs.append(finite(entry.logprob))
            top = self._top(text, entry, num_top)
            shown.top_logprobs.append(Raw(self._encoder.encode(top)) if is_long else top)

    def _top(self, chosen: str, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """Return the best tokens and the chosen one; of equal texts the likeliest is kept."""
        top: dict[str, float] = {}
        best = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        for token_id, logprob in best:
            top.setdefault(self._name(token_id), finite(logprob))
        top.setdefault(chosen, finite(entry.logprob))
        return top

    def _name(self, token_id: int) -> str:
        """Return a token's text; parts of characters, which look alike as text, by their bytes."""
        if self._params.tokens_as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
