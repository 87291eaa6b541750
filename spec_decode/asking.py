"""A target's side of drafts that are made elsewhere: what is asked, and which answers count.

Owns the epochs of questions, which tokens of each sequence the draft node has been told, the offers
that fit the present roots, and how long an answer is waited for. Pure: messages and times come in
and go out; draft_nodes.asking connects it to a socket. Knows no tree: an offer is taken as a draft,
or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from spec_decode.draft import NO_DRAFT, ROOT, Draft, DraftRequest
from topspin.errors import ProtocolError
from topspin.messages import TreeOffer, TreeOffers, Verdict, Verdicts, pack_ints, unpack_ints

FIRST_WAIT_S: Final = 0.02
"""The longest wait for an offer before a step was timed."""
MAX_WAIT_S: Final = 1.0
MAX_UNANSWERED: Final = 4
"""Questions without an answer after which nothing more is asked: they would only pile up."""
_RATE: Final = 0.1


class Questions:
    """One target's questions on one connection to a draft node."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size` is the target's: offers have no other tokens."""
        self._vocab_size = vocab_size
        self._epoch = 0
        self._told: dict[int, int] = {}
        self._ended: list[int] = []
        self._offers: dict[int, TreeOffer] = {}
        self._num_answered = 0

    @property
    def is_answered(self) -> bool:
        """Return whether the last question has its answer."""
        return self._num_answered == self._epoch

    @property
    def may_ask(self) -> bool:
        """Return whether another question makes sense."""
        return self._epoch - self._num_answered < MAX_UNANSWERED

    def ask(self, requests: Sequence[DraftRequest], *, step_s: float = 0.0) -> Verdicts:
        """Return the question for drafts of `requests`, after a step of `step_s`.

        Offers that come for earlier ones are stale.
        """
        self._epoch += 1
        self._offers = {}
        ended, self._ended = self._ended, []
        return Verdicts(
            epoch=self._epoch,
            step_s=step_s,
            verdicts=tuple(self._verdict(each) for each in requests),
            ended=pack_ints(ended),
        )

    def _verdict(self, request: DraftRequest) -> Verdict:
        text = request.text
        start = self._told.get(text.seq_id, 0)
        self._told[text.seq_id] = len(text.tokens)
        return Verdict(
            seq_id=text.seq_id,
            start=start,
            tokens=pack_ints(text.tokens[start:].tolist()),
            at_most=request.at_most,
            num_prompt=0 if start else text.num_prompt,
        )

    def end(self, seq_id: int) -> None:
        """Let the next question say that a sequence is over."""
        if self._told.pop(seq_id, None) is not None:
            self._ended.append(seq_id)

    def take(self, answer: TreeOffers) -> bool:
        """Take an answer in; False: it is stale.

        Raises ProtocolError for packed fields of a wrong size, or an answer out of order.
        """
        for seq_id in unpack_ints(answer.unknown):
            self._told.pop(seq_id, None)
        if not self._num_answered < answer.epoch <= self._epoch:
            raise ProtocolError(f"an answer to question {answer.epoch} of {self._epoch}")
        self._num_answered = answer.epoch
        if not self.is_answered:
            return False
        self._offers = {each.seq_id: each for each in answer.offers}
        return True

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return a draft for each request, empty where no offer fits.

        Raises ProtocolError for an offer that is no draft.
        """
        return [self._draft(each) for each in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        offer = self._offers.get(request.text.seq_id)
        if offer is None or offer.root != request.text.tokens[-1]:
            return NO_DRAFT
        tokens, parents = tuple(unpack_ints(offer.tokens)), tuple(unpack_ints(offer.parents))
        logps = offer.logps
        if not len(tokens) == len(parents) == len(logps):
            raise ProtocolError(
                f"an offer of {len(tokens)} tokens has {len(parents)} parents, {len(logps)} logps"
            )
        if not all(0 <= token < self._vocab_size for token in tokens):
            raise ProtocolError(f"an offer's tokens {tokens} are not of {self._vocab_size}")
        if not all(logp <= 0.0 for logp in logps):
            raise ProtocolError(f"an offer's {logps} are no log-probabilities")
        if not all(ROOT <= parent < idx for idx, parent in enumerate(parents)):
            raise ProtocolError(f"an offer's parents {parents} are no tree's")
        count = request.at_most
        return Draft(tokens[:count], parents[:count], logps[:count])  # parents come before children


class Patience:
    """How long a step waits for an offer: no longer than a step takes without one.

    A draft node that was too late is not waited for again before it has answered in time.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._done_s: float | None = None
        self._is_trusted = True

    def step_s(self, now_s: float) -> float:
        """Learn that a question is asked now; return the time of the step since done(), or 0."""
        if self._done_s is None:
            return 0.0
        step_s, mean = now_s - self._done_s, self._mean_s
        # Between two questions there may be steps without drafts, or nothing to do.
        self._mean_s = step_s if mean is None else mean + _RATE * (min(step_s, 3 * mean) - mean)
        return step_s

    @property
    def wait_s(self) -> float:
        """Return how long the answer to a question is worth; 0: do not wait."""
        if not self._is_trusted:
            return 0.0
        return FIRST_WAIT_S if self._mean_s is None else min(self._mean_s, MAX_WAIT_S)

    def done(self, now_s: float, *, was_answered: bool) -> None:
        """Learn that the wait is over, with an answer or without one: the step begins."""
        self._done_s = now_s
        self._is_trusted = was_answered

    def answered_late(self) -> None:
        """Learn that the last question was answered before the next one is asked."""
        self._is_trusted = True
