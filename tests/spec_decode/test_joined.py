"""Several drafters on one tree: the likeliest of what all offer, by what came of earlier offers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from spec_decode.draft import NO_DRAFT, ROOT, Draft, DraftRequest, DraftText
from spec_decode.joined import JoinedDrafter
from spec_decode.suffix import SuffixDrafter


class Scripted:
    """Offers the same draft again and again; notes what it is asked."""

    def __init__(self, draft: Draft) -> None:
        self.offer = draft
        self.ended: list[int] = []
        self.is_closed = False

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(*(each[: request.at_most] for each in self.offer)) for request in requests]

    def end(self, text: DraftText) -> None:
        self.ended.append(text.seq_id)

    def close(self) -> None:
        self.is_closed = True


def chain(tokens: Sequence[int], share: float) -> Draft:
    return Draft.chain(tokens, [math.log(share)] * len(tokens))


def ask(joined: JoinedDrafter, tokens: Sequence[int], at_most: int, *, seq_id: int = 0) -> Draft:
    text = DraftText(seq_id, np.array(tokens, dtype=np.int32), 1)
    return joined.draft([DraftRequest(text, at_most)])[0]


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {draft.path(idx) for idx in range(len(draft.tokens))}


def test_common_tokens_are_offered_once_and_the_likeliest_first() -> None:
    first, second = chain((1, 2, 3), 0.9), chain((1, 5, 6), 0.6)
    joined = JoinedDrafter([Scripted(first), Scripted(second)])
    assert paths(ask(joined, [0], 5)) == {(1,), (1, 2), (1, 2, 3), (1, 5), (1, 5, 6)}
    # After the common token: 0.9 and 0.81 from the one, 0.6 and 0.36 from the other.
    assert paths(ask(joined, [0], 3)) == {(1,), (1, 2), (1, 2, 3)}
    draft = ask(joined, [0], 4)
    assert paths(draft) == {(1,), (1, 2), (1, 2, 3), (1, 5)}
    assert all(ROOT <= parent < idx for idx, parent in enumerate(draft.parents))


def test_nothing_offered_is_no_draft() -> None:
    joined = JoinedDrafter([Scripted(NO_DRAFT), Scripted(NO_DRAFT)])
    assert ask(joined, [0], 4) == NO_DRAFT
    one = JoinedDrafter([Scripted(NO_DRAFT), Scripted(chain((4, 5), 0.5))])
    assert paths(ask(one, [0], 4)) == {(4,), (4, 5)}


def test_a_drafter_that_promises_too_much_is_believed_less() -> None:
    """The first says "surely" and is always wrong; the other says 0.6 and is always right."""
    joined = JoinedDrafter([Scripted(chain((1, 2), 1.0)), Scripted(chain((7, 8), 0.6))])
    assert paths(ask(joined, [0], 2)) == {(1,), (1, 2)}
    text = [0]
    for _ in range(12):
        text += [7, 8, 9]
        draft = ask(joined, text, 2)
    assert paths(draft) == {(7,), (7, 8)}
    # A new sequence begins with what is known of others.
    assert paths(ask(joined, [0], 2, seq_id=1)) == {(7,), (7, 8)}


def test_a_sequence_on_which_a_drafter_is_right_is_not_judged_by_others() -> None:
    joined = JoinedDrafter([Scripted(chain((1, 2), 1.0)), Scripted(chain((7, 8), 0.6))])
    texts = {0: [0], 1: [0]}
    for _ in range(20):
        for seq_id, came in enumerate(([7, 8, 9], [1, 2, 3])):
            ask(joined, texts[seq_id], 2, seq_id=seq_id)
            texts[seq_id] += came
    assert paths(ask(joined, texts[0], 2, seq_id=0)) == {(7,), (7, 8)}
    assert paths(ask(joined, texts[1], 2, seq_id=1)) == {(1,), (1, 2)}


@pytest.mark.parametrize("came", [[], [1, 2, 3, 4, 5], [9]])
def test_any_text_may_follow_an_offer(came: list[int]) -> None:
    joined = JoinedDrafter([Scripted(chain((1, 2), 0.9))])
    ask(joined, [0], 1)
    assert paths(ask(joined, [0, *came], 2)) == {(1,), (1, 2)}


def test_ends_reach_all_drafters_and_leave_nothing() -> None:
    drafters = [Scripted(chain((1,), 0.9)), Scripted(chain((2,), 0.9))]
    joined = JoinedDrafter(drafters)
    ask(joined, [0], 2, seq_id=3)
    joined.end(DraftText(3, np.array([0, 1], dtype=np.int32), 1))
    joined.end(DraftText(4, np.array([0], dtype=np.int32), 1))
    assert [each.ended for each in drafters] == [[3, 4]] * 2
    assert not joined._records
    assert not joined._offered
    joined.close()
    assert all(each.is_closed for each in drafters)


def test_suffixes_name_shares_that_add_up() -> None:
    offered = SuffixDrafter().draft(
        [DraftRequest(DraftText(0, np.array([5, 1, 2, 9, 5, 1, 3, 9, 5, 1, 2, 8, 5, 1]), 1), 2)]
    )[0]
    assert offered.tokens[0] == 2
    assert math.exp(offered.logps[0]) == pytest.approx(2 / 3)
    assert len(offered.logps) == len(offered.tokens)
    joined = JoinedDrafter([SuffixDrafter(), Scripted(chain((3, 4), 0.2))])
    draft = ask(joined, [7, 8, 1, 2, 5, 7, 8], 4)
    assert paths(draft) == {(1,), (1, 2), (3,), (3, 4)}
