"""The prompts of a request as its answer needs them: tokens, text and log-probabilities.

Owns the collection of a prompt's log-probabilities, which the engine computes once, for the
prompt's first choice, and their form in vLLM's answers. Knows no HTTP and no stream; filled by
server.gateway.answers.run, read by server.gateway.answers.replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from models.text.tokenizer import Tokenizer
from server.gateway.answers.wire import PromptLogprob, finite
from server.gateway.engine_client import Arrival
from topspin.errors import ProtocolError
from topspin.messages import TokenLogprobs


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
    waiting: list[Arrival] = field(default_factory=list)

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


def encode_prompt_logprobs(
    prompt: Prompt, num_top: int, *, tokenizer: Tokenizer, encoder: msgspec.json.Encoder
) -> list[Raw | None]:
    """Return vLLM's `prompt_logprobs`: None, then per token an object from ids to candidates.

    A token's object has the token itself and the `num_top` best. Encoded token by token, since one
    encoding of a long prompt's would hold the interpreter's lock for long.
    """
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
                decoded_token=tokenizer.token_text(candidate_id),
            )
            for candidate_id, (logprob, rank) in candidates.items()
        }
        rows.append(Raw(encoder.encode(row)))
    return rows
