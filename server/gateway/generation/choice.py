"""One choice as it grows: the engine's tokens, and the text that the client is shown of them.

Owns the order of detokenising, stop strings, messages and counting: text is never half a character,
never part of a stop string, and tokens after a stop are neither shown nor counted. Pure: knows no
HTTP, no clock and no other choice. Fed by server.gateway.generation.run, read by the encoders of
server.gateway.dialects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from models.text.tokenizer import IncrementalDetokenizer
from server.gateway.generation.prompts import Prompt
from server.gateway.generation.stop_strings import StopScanner, StopStrings
from server.gateway.operations.metrics import First
from server.gateway.parsing.message import AnswerMessage
from server.gateway.parsing.parts import Part, joined
from topspin.errors import EngineUnavailable, ProtocolError
from topspin.messages import RequestOutput, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How the tokens of a request become text. `stops` None: no stop strings."""

    stops: StopStrings | None = None
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None


# A token, and its log-probability if that was asked for.
_Token = tuple[int, TokenLogprobs | None]


class Choice:
    """One choice of a request; nothing is added after its `finish_reason`.

    `message` is its text as a message, None: it is shown as it is, in `texts`. `is_first`: of its
    prompt's choices. `first` and `last_output_at_s` tell when its outputs came. `num_tokens` counts
    them, with a stop token; `stop_reason` is the string or the client's token that ended it.

    What is not shown yet: `texts`, or `parts` of the message, with `token_ids` that the client may
    see and `logprobs` if it asked for them; of an answer that is sent whole, all. A stream calls
    `clear` after each of its events: `num_shown_tokens` counts the tokens up to there, `has_begun`
    says that there were any.
    """

    def __init__(
        self,
        *,
        index: int,
        prompt: Prompt,
        is_first: bool,
        options: TextOptions,
        detokenizer: IncrementalDetokenizer,
        message: AnswerMessage | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.is_first = is_first
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.first: First | None = None
        self.last_output_at_s: float | None = None
        self.finish_reason: Literal["stop", "length"] | None = None
        self.stop_reason: str | int | None = None
        self.has_begun = False
        self.num_shown_tokens = 0
        self.texts: list[str] = []
        self.parts: list[Part] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._message = message
        self._options = options
        self._detokenizer = detokenizer
        self._scanner = (
            StopScanner(options.stops, include_stop=options.include_stop)
            if options.stops is not None
            else None
        )
        # Tokens of which it cannot be told yet whether they are reasoning.
        self._undecided: list[_Token] = []

    @property
    def has_message(self) -> bool:
        """Whether its text is a message."""
        return self._message is not None

    @property
    def message(self) -> AnswerMessage:
        """The choice as a message; only where it is one."""
        assert self._message is not None
        return self._message

    @property
    def text(self) -> str:
        """The text that is not shown yet; only where it is no message."""
        return "".join(self.texts)

    def clear(self) -> None:
        """Take what is not shown yet as shown."""
        self.has_begun = True
        self.num_shown_tokens = self.num_tokens
        self.texts, self.parts, self.token_ids, self.logprobs = [], [], [], []

    def push(self, output: RequestOutput) -> None:
        """Add the engine's next output.

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
            self._push_plain(output)
        else:
            self._push_scanned(output, self._scanner)

    def _visible(self, output: RequestOutput) -> Sequence[int]:
        """Return the tokens that have text: a stop token has none unless asked for."""
        if output.stop_token_id is None or self._options.include_stop:
            return output.token_ids
        return output.token_ids[:-1]

    def _push_plain(self, output: RequestOutput) -> None:
        visible = self._visible(output)
        if self._hides_tokens:
            texts = [self._detokenizer.push((token_id,)) for token_id in visible]
        else:
            texts = [self._detokenizer.push(visible)]
        if output.finish_reason is not None:
            texts.append(self._detokenizer.flush())
        self._add(output, texts)

    def _push_scanned(self, output: RequestOutput, scanner: StopScanner) -> None:
        """Push token by token: the one that completes a stop string is the last one counted."""
        texts: list[str] = []
        for nth, token_id in enumerate(self._visible(output), start=1):
            armed = self.num_tokens + nth >= self._options.min_tokens
            scanned = scanner.push(self._detokenizer.push((token_id,)), armed=armed)
            texts.append(scanned.text)
            if scanned.stop is not None:
                self._add(output, texts, stop=scanned.stop, num_tokens=nth)
                return
        stop: str | None = None
        if output.finish_reason is not None:
            tail = scanner.push(self._detokenizer.flush())
            texts += (tail.text, scanner.flush())
            stop = tail.stop
        self._add(output, texts, stop=stop)

    @property
    def _hides_tokens(self) -> bool:
        return self._message is not None and self._message.options.hides_reasoning_tokens

    def _add(
        self,
        output: RequestOutput,
        texts: Sequence[str],
        *,
        stop: str | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Add an output's first `num_tokens` tokens (None: all) and their texts."""
        reason = output.finish_reason
        assert reason != "abort", "refused by push"
        token_ids, logprobs = output.token_ids, output.logprobs
        if num_tokens is not None:
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        self.num_tokens += len(token_ids)
        self.finish_reason = reason if stop is None else "stop"
        self.stop_reason = stop
        if stop is None and output.stop_token_id in self._options.stop_token_ids:
            self.stop_reason = output.stop_token_id
        if self._hides_tokens:
            self._add_each(zip_longest(token_ids, logprobs), texts)
            return
        self.token_ids += token_ids
        self.logprobs += logprobs
        if self._message is None:
            self.texts += texts
        else:
            self.parts += self._message.push(
                "".join(texts), num_tokens=len(token_ids), is_last=self.finish_reason is not None
            )

    def _add_each(self, tokens: Iterable[_Token], texts: Sequence[str]) -> None:
        """Add tokens with their texts, one by one, without those of the reasoning and its marks.

        Texts behind those of the tokens have none of their own.
        """
        message, shown, parts = self.message, list[_Token](), list[Part]()
        for token, text in zip_longest(tokens, texts):
            was_inside = message.is_inside_reasoning
            parts += message.push(text or "", num_tokens=0 if token is None else 1)
            self._undecided += () if token is None or was_inside else (token,)
            if message.place != "undecided":
                shown += self._undecided if message.place == "answer" else ()
                self._undecided = []
        if self.finish_reason is not None:
            parts += message.push("", is_last=True)
            shown, self._undecided = shown + self._undecided, []
        # The step's text is one event, which has all its tokens.
        self.parts += joined(parts)
        self.token_ids += (token_id for token_id, _ in shown)
        self.logprobs += (each for _, each in shown if each is not None)
