"""A target's questions to a draft node: whose answers count, and how long it waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_decode.asking import FIRST_WAIT_S, MAX_UNANSWERED, Patience, Questions
from spec_decode.draft import NO_DRAFT, Draft
from tests.mutations import damaged
from tests.spec_decode.table import VOCAB, request
from topspin.errors import ProtocolError
from topspin.messages import (
    TreeOffer,
    TreeOffers,
    Verdict,
    decode,
    encode,
    pack_ints,
)

MOST = 4


def offers_of(
    epoch: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    logps: tuple[float, ...],
    *,
    seq_id: int = 0,
    unknown: bytes = b"",
) -> TreeOffers:
    """Return an offer behind the token 2."""
    tree = TreeOffer(
        seq_id=seq_id, root=2, tokens=pack_ints(tokens), parents=pack_ints(parents), logps=logps
    )
    return TreeOffers(epoch=epoch, offers=(tree,), unknown=unknown)


@pytest.mark.parametrize(
    ("tokens", "parents", "logps"),
    [
        ([1, 2], [-1], (0.0, 0.0)),
        ([1], [0], (0.0,)),
        ([1], [-2], (0.0,)),
        ([-1], [-1], (0.0,)),
        ([VOCAB], [-1], (0.0,)),
        ([1], [-1], ()),
        ([1], [-1], (0.1,)),
        ([1], [-1], (float("nan"),)),
    ],
)
def test_offers_that_are_no_drafts_are_refused(
    tokens: list[int], parents: list[int], logps: tuple[float, ...]
) -> None:
    questions = Questions(VOCAB)
    asked = request(0, [1, 2])
    epoch = questions.ask([asked]).epoch
    assert questions.take(offers_of(epoch, tokens, parents, logps))
    with pytest.raises(ProtocolError, match="an offer"):
        questions.drafts([asked])


def test_offers_for_another_epoch_or_root_are_dropped_and_long_ones_cut() -> None:
    questions = Questions(VOCAB)
    first = request(0, [1, 2], at_most=2)
    offered = offers_of(questions.ask([first]).epoch, [3, 4, 1], [-1, -1, 0], (-0.1, -0.2, -0.3))
    assert questions.take(offered)
    assert questions.drafts([first]) == [Draft((3, 4), (-1, -1), (-0.1, -0.2))]
    assert questions.drafts([request(0, [1, 2, 3])]) == [NO_DRAFT], "another root"
    second = request(0, [1, 2, 3, 2])
    asked = questions.ask([second])
    assert asked.verdicts == (Verdict(seq_id=0, start=2, tokens=pack_ints([3, 2]), at_most=MOST),)
    questions.ask([second])
    assert not questions.take(msgspec.structs.replace(offered, epoch=asked.epoch))
    assert questions.drafts([second]) == [NO_DRAFT], "another epoch"
    with pytest.raises(ProtocolError, match="an answer to question 9 of 3"):
        questions.take(TreeOffers(epoch=9))


def test_a_draft_node_that_never_answers_is_not_asked_for_ever() -> None:
    questions = Questions(VOCAB)
    epochs = []
    while questions.may_ask:
        epochs.append(questions.ask([request(0, [1, 2])]).epoch)
    assert len(epochs) == MAX_UNANSWERED
    assert not questions.is_answered
    assert questions.take(TreeOffers(epoch=epochs[-1]))
    assert questions.is_answered
    assert questions.may_ask


def test_whoever_is_late_is_not_waited_for_until_it_answers_in_time() -> None:
    patience = Patience()
    assert patience.step_s(0.0) == 0.0
    assert patience.wait_s == FIRST_WAIT_S
    patience.done(0.001, was_answered=True)
    assert patience.step_s(0.011) == pytest.approx(0.010)
    assert patience.wait_s == pytest.approx(0.010)
    patience.done(0.021, was_answered=False)
    patience.step_s(0.031)
    assert patience.wait_s == 0.0
    patience.done(0.031, was_answered=False)
    patience.answered_late()
    assert patience.wait_s == pytest.approx(0.010)


OFFERS = [
    encode(offers_of(epoch, [3, 4], [-1, 0], (-0.5, -1.0), seq_id=seq_id, unknown=pack_ints([7])))
    for epoch, seq_id in ((1, 0), (2, 0), (2, 1))
]


@settings(max_examples=80)
@given(st.lists(damaged(OFFERS) | st.binary(max_size=50), min_size=1, max_size=4))
def test_any_offers_are_drafts_or_refused(said: list[bytes]) -> None:
    questions = Questions(VOCAB)
    requests = [request(0, [0, 1, 2]), request(1, [4, 2])]
    for data in said:
        questions.ask(requests)
        try:
            message = decode(data)
            if isinstance(message, TreeOffers) and questions.take(message):
                for draft in questions.drafts(requests):
                    assert len(draft.tokens) == len(draft.parents) == len(draft.logps) <= MOST
                    assert all(0 <= token < VOCAB for token in draft.tokens)
        except ProtocolError:
            questions = Questions(VOCAB)  # as after a lost connection
