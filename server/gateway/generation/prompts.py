"""The prompts of a request as its answer needs them: tokens, text and log-probabilities.

Owns the collection of a prompt's log-probabilities, which the engine computes once, for the
prompt's first choice. Knows no HTTP and no stream; filled by server.gateway.generation.run, read
by the encoders of server.gateway.dialects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from models.text.tokenizer import Tokenizer
from server.gateway.bodies.generation import SamplingBody
from server.sampling_limits import MAX_BAD_WORD_TOKENS
from topspin.errors import InvalidRequest, ProtocolError
from topspin.messages import RequestOutput, TokenLogprobs


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One prompt of a request, shared by its choices.

    `echo` is the text shown before each completion; None: not asked for. `num_scores` is how many
    `scores` the engine sends: one for each token after the first, or none. `waiting` are outputs
    of other choices that came before the first choice's scores.
    """

    ids: list[int]
    echo: str | None = None
    num_scores: int = 0
    scores: list[TokenLogprobs] = field(default_factory=list)
    waiting: list[RequestOutput] = field(default_factory=list)

    @property
    def is_scored(self) -> bool:
        """Whether all log-probabilities that were asked for have come."""
        return len(self.scores) == self.num_scores

    def add_scores(self, scores: Sequence[TokenLogprobs]) -> None:
        """Append the log-probabilities of the next tokens; raises ProtocolError for too many."""
        self.scores.extend(scores)
        if len(self.scores) > self.num_scores:
            raise ProtocolError(
                f"{len(self.scores)} log-probabilities came for {self.num_scores} prompt tokens"
            )


def bad_word_tokens(
    words: Sequence[str] | None, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that must not come out, as vLLM takes them.

    Of each word the tokens at the beginning of a text and, if a space before it only changes its
    first token, those in the middle of one.
    """
    sequences: list[tuple[int, ...]] = []
    for idx, word in enumerate(words or ()):
        bare = word.lstrip()
        first, spaced = (
            tuple(tokenizer.encode(each, add_special_tokens=False)) for each in (bare, " " + bare)
        )
        if not 1 <= len(first) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"`bad_words[{idx}]` has {len(first)} tokens: 1 to {MAX_BAD_WORD_TOKENS} are "
                "possible",
                param=f"bad_words[{idx}]",
            )
        sequences.append(first)
        if len(spaced) == len(first) and spaced[0] != first[0]:
            sequences.append(spaced)
    return tuple(sequences)


def cut_prompt(token_ids: list[int], body: SamplingBody) -> list[int]:
    """Return the ids that a request wants of a prompt: all, the last ones, or the first ones."""
    num_tokens = body.truncate_prompt_tokens
    if num_tokens is None:
        return token_ids
    return token_ids[:num_tokens] if body.truncation_side == "right" else token_ids[-num_tokens:]
