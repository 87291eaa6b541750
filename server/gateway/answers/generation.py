"""One choice: the engine's tokens are turned into text for the client.

Owns the order of detokenising, stop strings and counting: text is never half a character,
never part of a stop string, and tokens after a stop are neither shown nor counted. Pure:
knows no HTTP, no clock and no other choice. Called by server.gateway.handler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple, Protocol

from server.gateway.answers.stop_strings import StopScanner, StopStrings
from server.gateway.parsing.message import Message
from server.gateway.parsing.parts import Part
from topspin.errors import EngineUnavailable, ProtocolError
from topspin.messages import RequestOutput, TokenLogprobs

# A token, and its log-probability if that was asked for.
_Token = tuple[int, TokenLogprobs | None]


class Detokenizer(Protocol):
    """The methods used of models.text.tokenizer.IncrementalDetokenizer."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return the text held back so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How the tokens of a request become text. `stops` None: no stop strings."""

    stops: StopStrings | None = None
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None


class Delta(NamedTuple):
    """The text and tokens that one engine output adds to its choice.

    `is_first` marks the choice's first delta. `token_ids` are the tokens that count, including a
    stop token; `shown_ids` those that the client may see, `logprobs` are theirs if it asked for
    them.
    `stopped_here`: a stop string ended the choice and the engine does not know it yet;
    `stop_reason`: that string, or the stop token that the client named. `parts` are the text as
    parts of a message, if it is one.
    """

    is_first: bool
    text: str
    token_ids: Sequence[int]
    shown_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: Literal["stop", "length"] | None
    stopped_here: bool
    stop_reason: str | int | None
    parts: Sequence[Part]


class ChoiceText:
    """Turns the outputs of one choice, in order, into deltas; none follow a finish reason.

    `message` None: the text is not a message.
    """

    def __init__(
        self, options: TextOptions, detokenizer: Detokenizer, message: Message | None = None
    ) -> None:
        self._options = options
        self.message = message
        self._detokenizer = detokenizer
        self._scanner = (
            StopScanner(options.stops, include_stop=options.include_stop)
            if options.stops is not None
            else None
        )
        self._num_tokens = 0
        # Tokens of which it cannot be told yet whether they are reasoning.
        self._undecided: list[_Token] = []

    def push(self, output: RequestOutput) -> Delta:
        """Return the delta of `output`.

        Raises ProtocolError if logprobs are missing, EngineUnavailable if the engine aborted
        the request.
        """
        if output.finish_reason == "abort":
            raise EngineUnavailable("the engine ended the request before it was complete")
        if self._options.num_logprobs is not None and len(output.logprobs) != len(output.token_ids):
            raise ProtocolError(
                f"{len(output.logprobs)} logprobs came for {len(output.token_ids)} tokens"
            )
        if self._scanner is None:
            return self._push_plain(output)
        return self._push_scanned(output, self._scanner)

    def _visible(self, output: RequestOutput) -> Sequence[int]:
        """Return the tokens that have text: a stop token has none unless asked for."""
        if output.stop_token_id is None or self._options.include_stop:
            return output.token_ids
        return output.token_ids[:-1]

    def _push_plain(self, output: RequestOutput) -> Delta:
        visible = self._visible(output)
        if self.message is not None and self.message.options.hides_reasoning_tokens:
            texts = [self._detokenizer.push((token_id,)) for token_id in visible]
        else:
            texts = [self._detokenizer.push(visible)]
        if output.finish_reason is not None:
            texts.append(self._detokenizer.flush())
        return self._delta(output, texts=texts)

    def _push_scanned(self, output: RequestOutput, scanner: StopScanner) -> Delta:
        """Push token by token: the one that completes a stop string is the last one counted."""
        shown: list[str] = []
        for token_id in self._visible(output):
            self._num_tokens += 1
            armed = self._num_tokens >= self._options.min_tokens
            scanned = scanner.push(self._detokenizer.push((token_id,)), armed=armed)
            shown.append(scanned.text)
            if scanned.stop is not None:
                num_tokens = self._num_tokens - output.index
                return self._delta(output, texts=shown, stop=scanned.stop, num_tokens=num_tokens)
        if output.finish_reason is None:
            return self._delta(output, texts=shown)
        tail = scanner.push(self._detokenizer.flush())
        shown.append(tail.text)
        shown.append(scanner.flush())
        return self._delta(output, texts=shown, stop=tail.stop)

    def _delta(
        self,
        output: RequestOutput,
        *,
        texts: Sequence[str],
        stop: str | None = None,
        num_tokens: int | None = None,
    ) -> Delta:
        reason = output.finish_reason
        assert reason != "abort", "refused by push"
        is_end = reason is not None or stop is not None
        token_ids, text = output.token_ids[:num_tokens], "".join(texts)
        shown_ids, logprobs = token_ids, output.logprobs[:num_tokens]
        parts: Sequence[Part] = ()
        if self.message is not None:
            if self.message.options.hides_reasoning_tokens:
                tokens = zip_longest(token_ids, logprobs)
                parts, shown = self._push_each(self.message, tokens, texts, is_end=is_end)
                shown_ids = tuple(token_id for token_id, _ in shown)
                logprobs = tuple(each for _, each in shown if each is not None)
            else:
                parts = self.message.push(text, num_tokens=len(token_ids), is_last=is_end)
        stop_reason: str | int | None = stop
        if stop is None and output.stop_token_id in self._options.stop_token_ids:
            stop_reason = output.stop_token_id
        return Delta(
            is_first=output.index == 0,
            text=text,
            token_ids=token_ids,
            shown_ids=shown_ids,
            logprobs=logprobs,
            finish_reason="stop" if stop is not None else reason,
            stopped_here=stop is not None and reason is None,
            stop_reason=stop_reason,
            parts=parts,
        )

    def _push_each(
        self, message: Message, tokens: Iterable[_Token], texts: Sequence[str], *, is_end: bool
    ) -> tuple[list[Part], list[_Token]]:
        """Add tokens with their texts, one by one; return the parts, and the tokens to be shown.

        None is shown that belongs to the reasoning or to its marks. Texts behind those of the
        tokens have none of their own.
        """
        parts: list[Part] = []
        shown: list[_Token] = []
        for token, text in zip_longest(tokens, texts):
            was_inside = message.is_inside_reasoning
            parts += message.push(text or "", num_tokens=0 if token is None else 1)
            self._undecided += () if token is None or was_inside else (token,)
            if message.place != "undecided":
                shown += self._undecided if message.place == "answer" else ()
                self._undecided = []
        if is_end:
            parts += message.push("", is_last=True)
            shown, self._undecided = shown + self._undecided, []
        return parts, shown
