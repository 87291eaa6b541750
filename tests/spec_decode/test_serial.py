"""The serial runner over a model that is a table: the best trees by brute force, and its cache."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_decode.draft import Draft, DraftRequest, accepted
from spec_decode.forest import MAX_CHUNK, MIN_CHUNK, Growth
from spec_decode.serial import SerialDrafter
from tests.pairwise import slow_rows
from tests.spec_decode.table import VOCAB, Table, logps_after, request

TREE = Growth(passes=32, width=3, num_top=VOCAB)


def weights_of(draft: Draft, text: Sequence[int]) -> list[float]:
    """Return the sums of log-probabilities of a draft's nodes."""
    found = []
    for idx in range(len(draft.tokens)):
        path = draft.path(idx)
        found.append(sum(logps_after([*text, *path[:n]])[path[n]] for n in range(len(path))))
    return found


def best_weights(text: Sequence[int], count: int) -> list[float]:
    """Return the `count` greatest weights of all continuations of up to four tokens."""
    every = (path for n in range(1, 5) for path in itertools.product(range(VOCAB), repeat=n))
    sums = [
        sum(logps_after([*text, *path[:n]])[path[n]] for n in range(len(path))) for path in every
    ]
    return sorted(sums, reverse=True)[:count]


def draft_of(drafter: SerialDrafter, *requests: DraftRequest) -> Sequence[Draft]:
    return drafter.draft(requests)


@pytest.mark.parametrize(("width", "count"), slow_rows([(1, 4), (2, 1)], beside=[(5, 4)]))
def test_the_draft_is_the_best_tree_whatever_grew_before(width: int, count: int) -> None:
    """Also after verdicts of every kind: on a miss, in the tree, and at its end."""
    rng = random.Random(3)
    drafter = SerialDrafter(Table(), TREE._replace(width=width), max_length=1000)
    text = [1, 2, 3]
    for _ in range(12):
        (draft,) = draft_of(drafter, request(7, text, count))
        assert sorted(weights_of(draft, text), reverse=True) == pytest.approx(
            best_weights(text, count)
        )
        path = draft.path(rng.randrange(len(draft.tokens)))
        text = [*text, *path[: rng.randint(0, len(path))], rng.randrange(VOCAB)]


@settings(max_examples=50)
@given(st.data())
def test_random_verdicts_of_several_requests(data: st.DataObject) -> None:
    """The table refuses rows without ancestors, and its answers are those of the whole text."""
    growth = Growth(
        passes=data.draw(st.integers(1, 4)),
        width=data.draw(st.integers(1, 3)),
        num_top=data.draw(st.integers(1, VOCAB)),
    )
    table = Table()
    drafter = SerialDrafter(table, growth, max_length=60)
    texts = [[0], [1, 1, 1], [2, 0, 2, 0]]
    for _ in range(data.draw(st.integers(1, 8))):
        asked = data.draw(st.sets(st.integers(0, 2), min_size=1))
        counts = {idx: data.draw(st.integers(1, 6)) for idx in asked}
        drafts = draft_of(drafter, *(request(idx, texts[idx], counts[idx]) for idx in asked))
        for idx, draft in zip(asked, drafts, strict=True):
            assert 0 < len(draft.tokens) <= counts[idx]
            for node in range(len(draft.tokens)):
                *before, token = draft.path(node)
                assert (
                    token
                    in sorted(
                        logps_after(texts[idx] + before), key=logps_after(texts[idx] + before).get
                    )[-growth.num_top :]
                )
            sampled = [data.draw(st.integers(0, VOCAB - 1)) for _ in range(len(draft.tokens) + 1)]
            path = accepted(draft, sampled, [True] * len(sampled))
            texts[idx] += [draft.tokens[node] for node in path]
            texts[idx].append(sampled[1 + path[-1]] if path else sampled[0])
            assert table.verified[idx] == texts[idx][: len(table.verified[idx])]
            if data.draw(st.booleans()):  # a step without a draft
                texts[idx].append(data.draw(st.integers(0, VOCAB - 1)))


def test_chains_cost_a_row_per_token() -> None:
    table = Table()
    drafter = SerialDrafter(table, Growth(passes=6, width=1, num_top=1), max_length=1000)
    text = [4, 4]
    (draft,) = draft_of(drafter, request(1, text, 6))
    assert draft.is_chain
    assert len(draft.tokens) == 6
    assert table.num_passes == 6
    assert table.num_rows == 2 + 5
    # All were accepted: the last of them and the bonus are what the cache lacks.
    (draft,) = draft_of(drafter, request(1, [*text, *draft.tokens, 0], 3))
    assert len(draft.tokens) == 3
    assert table.num_rows == 7 + 2 + 2


def test_a_long_prompt_is_fed_over_several_drafts_and_delays_no_other() -> None:
    table = Table()
    drafter = SerialDrafter(table, TREE, max_length=10_000)
    long, short, late = [1] * (2 * MAX_CHUNK + 5), [2], [3] * (MIN_CHUNK + 1)
    for turn in range(3):
        before = table.num_rows
        asked = [request(1, long, 2), request(2, short, 2), request(3, late, 2)]
        drafts = draft_of(drafter, *asked)
        assert bool(drafts[0].tokens) == (turn == 2), "the long prompt has not been seen yet"
        # The tokens that are known, at most; then the trees of two nodes.
        assert table.num_rows - before <= MAX_CHUNK + 2 * MIN_CHUNK + 3 * TREE.passes
        if turn:
            assert drafts[2].tokens
        for draft, text in zip(drafts, (long, short, late), strict=True):
            if draft.tokens:
                assert sorted(weights_of(draft, text), reverse=True) == pytest.approx(
                    best_weights(text, 2)
                )
        assert drafts[1].tokens
        # Each step of the target gives a token.
        for text in (long, short, late):
            text.append(4)
    assert table.verified[1] == long[: len(table.verified[1])]
    assert len(table.verified[1]) >= len(long) - 1


def test_sequences_make_room_for_others_and_come_back() -> None:
    table = Table(room=12)
    drafter = SerialDrafter(table, TREE, max_length=1000)
    assert draft_of(drafter, request(1, [1] * 8, 1))[0].tokens
    assert draft_of(drafter, request(2, [2] * 8, 1))[0].tokens
    assert list(table.verified) == [2]
    (first, second) = draft_of(drafter, request(1, [1] * 9, 1), request(2, [2] * 9, 1))
    assert not first.tokens, "both do not fit, and neither loses its rows to the other"
    assert second.tokens
    drafter.end(request(2, [2] * 9, 1).text)
    assert draft_of(drafter, request(1, [1] * 10, 1))[0].tokens
    drafter.end(request(1, [1] * 10, 1).text)
    drafter.end(request(3, [1], 1).text)  # was never drafted
    assert table.used() == 0


def test_texts_longer_than_the_model_knows_are_not_drafted() -> None:
    drafter = SerialDrafter(Table(), TREE, max_length=10)
    assert draft_of(drafter, request(1, [1] * 8, 2))[0].tokens
    assert not draft_of(drafter, request(1, [1] * 9, 2))[0].tokens
    assert draft_of(drafter, request(1, [1] * 9, 1))[0].tokens
