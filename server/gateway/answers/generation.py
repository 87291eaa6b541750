"""One choice: the engine's tokens are turned into text for the client.

Owns the order of detokenising, stop strings and counting: text is never half a character,
never part of a stop string, and tokens after a stop are neither shown nor counted. Pure:
knows no HTTP, no clock and no other choice. Called by server.gateway.handler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from server.gateway.answers.stop_strings import StopScanner, StopStrings
from topspin.errors import EngineUnavailable, ProtocolError
from topspin.messages import RequestOutput, TokenLogprobs


class Detokenizer(Protocol):
    """The methods used of models.tokenizer.IncrementalDetokenizer."""

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
    num_logprobs: int | None = None


class Delta(NamedTuple):
    """The text and tokens that one engine output adds to its choice.

    `is_first` marks the choice's first delta. `token_ids` are the tokens that count, including a
    stop token; `logprobs` are theirs if the client asked for them.
    `stopped_here`: a stop string ended the choice and the engine does not know it yet.
    """

    is_first: bool
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: Literal["stop", "length"] | None
    stopped_here: bool


class ChoiceText:
    """Turns the outputs of one choice, in order, into deltas; none follow a finish reason."""

    def __init__(self, options: TextOptions, detokenizer: Detokenizer) -> None:
        self._options = options
        self._detokenizer = detokenizer
        self._scanner = (
            StopScanner(options.stops, include_stop=options.include_stop)
            if options.stops is not None
            else None
        )
        self._num_tokens = 0

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
        text = self._detokenizer.push(self._visible(output))
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
        return self._delta(output, text=text)

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
                return self._delta(output, text="".join(shown), stopped=True, num_tokens=num_tokens)
        if output.finish_reason is None:
            return self._delta(output, text="".join(shown))
        tail = scanner.push(self._detokenizer.flush())
        shown.append(tail.text)
        shown.append(scanner.flush())
        return self._delta(output, text="".join(shown), stopped=tail.stop is not None)

    def _delta(
        self,
        output: RequestOutput,
        *,
        text: str,
        stopped: bool = False,
        num_tokens: int | None = None,
    ) -> Delta:
        reason = output.finish_reason
        assert reason != "abort", "refused by push"
        return Delta(
            is_first=output.index == 0,
            text=text,
            token_ids=output.token_ids[:num_tokens],
            logprobs=output.logprobs[:num_tokens],
            finish_reason="stop" if stopped else reason,
            stopped_here=stopped and reason is None,
        )
