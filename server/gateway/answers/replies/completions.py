"""Answers of POST /v1/completions, streamed and whole: texts, then the finish."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw, UnsetType

from models.text.tokenizer import IncrementalDetokenizer, Tokenizer
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
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
    finite,
)
from topspin.messages import TokenLogprobs


class CompletionReplies:
    """Answers of POST /v1/completions."""

    keep_alive = COMMENT

    def __init__(self, head: ReplyHead, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        """`skip_special_tokens`: the completions' texts do not show them."""
        self._head = head
        self._skips = skip_special_tokens
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
                index=choice.index,
                text="",
                finish_reason=delta.finish_reason,
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
            stop_reason=shown_stop(choice.stop_reason),
            token_ids=choice.token_ids if head.return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(head, prompt, self._tokenizer, self._encoder),
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
        shown = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        if echoes:
            prompt = choice.prompt
            self._add_offsets(shown, choice, prompt.ids, self._detokenizer((), skips=False))
            # What the tokenizer added before a text is not in the echo.
            num_added = choice.num_logprob_chars - len(prompt.echo or "")
            shown.text_offset[:] = [max(0, each - num_added) for each in shown.text_offset]
            choice.num_logprob_chars -= num_added
            self._add(shown, prompt.ids, [None, *prompt.scores], num_top, is_long=True)
        if choice.offsets is None:
            choice.offsets = self._detokenizer(choice.prompt.ids, skips=self._skips)
        self._add_offsets(shown, choice, token_ids, choice.offsets)
        self._add(shown, token_ids, logprobs, num_top, is_long=echoes)
        return shown

    def _detokenizer(self, prompt_ids: Sequence[int], *, skips: bool) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self._tokenizer, prompt_ids=prompt_ids, skip_special_tokens=skips
        )

    @staticmethod
    def _add_offsets(
        shown: CompletionLogprobs,
        choice: Choice,
        token_ids: Sequence[int],
        stream: IncrementalDetokenizer,
    ) -> None:
        """Add where in the text each token begins, or the character of which it is a part."""
        for token_id in token_ids:
            shown.text_offset.append(choice.num_logprob_chars)
            choice.num_logprob_chars += len(stream.push((token_id,)))

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
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
