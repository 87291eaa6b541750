"""Asynchronous drafts in scripted orders of events: a target, the way between, and the rounds."""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_decode.asking import Questions
from spec_decode.draft import Draft, accepted
from spec_decode.forest import MAX_CHUNK, Growth
from spec_decode.round_depth import RoundDepth
from spec_decode.rounds import MAX_SEQUENCES, DraftRounds
from tests.mutations import damaged
from tests.spec_decode.table import VOCAB, Table, logps_after, request
from topspin.errors import ProtocolError
from topspin.messages import (
    TreeOffers,
    Verdict,
    Verdicts,
    decode,
    encode,
    pack_ints,
)

GROWTH = Growth(passes=4, width=2, num_top=2)
MOST = 4
STEP_S, PASS_S = 4.0, 1.0
"""A pass that a target waits for pays on a miss, and not where the tree has a draft."""


def next_token(text: Sequence[int]) -> int:
    """What plain decoding continues with: often the likeliest token of the draft model."""
    rng = random.Random(repr(("target", list(text)[-5:])))
    logps = logps_after(text)
    return max(logps, key=lambda t: logps[t]) if rng.random() < 0.9 else rng.randrange(VOCAB)


def plain(text: Sequence[int], count: int) -> list[int]:
    found = list(text)
    while len(found) < count:
        found.append(next_token(found))
    return found


def verify(text: list[int], draft: Draft) -> int:
    """Let the target go on by a draft; returns how many of its tokens were accepted."""
    sampled = [next_token(text)]
    sampled += [next_token([*text, *draft.path(idx)]) for idx in range(len(draft.tokens))]
    path = accepted(draft, sampled, [True] * len(sampled))
    text += [draft.tokens[idx] for idx in path]
    text.append(sampled[1 + path[-1]] if path else sampled[0])
    return len(path)


class Script:
    """One target and one draft node; what is said lies in queues until it is delivered."""

    def __init__(self, texts: list[list[int]], *, table: Table | None = None) -> None:
        self.table = table or Table()
        self.rounds = DraftRounds(self.table, GROWTH, max_length=200)
        self.questions = Questions(VOCAB)
        self.texts = texts
        self.to_draft: deque[Verdicts] = deque()
        self.to_target: deque[TreeOffers] = deque()
        self.num_accepted = 0
        self.now_s = 0.0

    def ask(self, at_most: int = MOST) -> None:
        self.requests = [request(idx, text, at_most) for idx, text in enumerate(self.texts)]
        self.to_draft.append(self.questions.ask(self.requests, step_s=STEP_S))

    def grow(self) -> bool:
        has_grown = self.rounds.grow()
        if has_grown:
            self.rounds.took(PASS_S)
        return has_grown

    def hear(self) -> None:
        self.now_s += 1.0
        self.rounds.hear(b"target", self.to_draft.popleft(), self.now_s)

    def answer(self) -> None:
        self.now_s += 1.0
        self.to_target += [message for _, message in self.rounds.take_offers()]

    def serve(self) -> int:
        """Answer what is asked, after the passes that this needs; return how many there were."""
        num_passes = 0
        self.answer()
        while not self.to_target:
            assert self.grow(), "whoever waits is answered"
            num_passes += 1
            self.answer()
        return num_passes

    def take(self) -> None:
        self.questions.take(self.to_target.popleft())

    def step(self) -> None:
        for text, draft in zip(self.texts, self.questions.drafts(self.requests), strict=True):
            self.num_accepted += verify(text, draft)
        self.ask()


@settings(max_examples=30)
@given(st.data())
def test_any_order_of_events_gives_the_tokens_of_plain_decoding(data: st.DataObject) -> None:
    script = Script([[0, 1], [3, 2, 2]])
    script.ask()
    for _ in range(data.draw(st.integers(1, 60))):
        possible: list[Callable[[], object]] = [script.step, script.grow, script.answer]
        possible += [script.hear] if script.to_draft else []
        possible += [script.take] if script.to_target else []
        data.draw(st.sampled_from(possible))()
        for idx, text in enumerate(script.texts):
            assert text == plain([[0, 1], [3, 2, 2]][idx], len(text))
        for own, verified in script.table.verified.items():
            assert any(verified == text[: len(verified)] for text in script.texts), own


def run_rounds(script: Script, count: int, *, passes: int) -> None:
    """Let `count` steps be answered in time, with so many passes while the target verifies."""
    script.ask()
    for _ in range(count):
        script.hear()
        script.serve()
        script.take()
        for _ in range(passes):
            script.grow()
        script.step()


def test_a_hit_is_answered_without_a_pass_and_a_miss_after_one() -> None:
    script = Script([[0, 1]])
    run_rounds(script, 100, passes=3)
    counts = script.rounds.counts
    assert script.num_accepted > 60
    assert counts.num_root_hits > 10
    assert counts.num_root_misses > 5
    # The first question and each miss; a hit whose root is a leaf may need one as well.
    waited = counts.num_passes - counts.num_overlapped
    assert 1 + counts.num_root_misses <= waited < 101
    assert counts.num_overlapped > 20


def test_passes_while_the_target_verifies_make_longer_drafts() -> None:
    idle, busy = Script([[0, 1]]), Script([[0, 1]])
    busy.rounds.depth = Deep(most=GROWTH.passes)
    run_rounds(idle, 100, passes=0)
    run_rounds(busy, 100, passes=GROWTH.passes)
    assert busy.num_accepted > 1.1 * idle.num_accepted


class Deep(RoundDepth):
    """Always as many passes as there may be."""

    @property
    def passes(self) -> int:
        return GROWTH.passes


def test_chains_that_are_accepted_whole_stay_as_long() -> None:
    """Passes in the time of a step make up for the tokens of the draft and the one behind it."""
    table = Table()
    rounds = DraftRounds(table, Growth(passes=MOST, width=1, num_top=1), max_length=500)
    questions, text, lengths = Questions(VOCAB), [0, 1], []
    for step in range(30):
        asked = request(0, text)
        rounds.hear(b"target", questions.ask([asked], step_s=20.0), float(step))
        while not (answers := rounds.take_offers()):
            rounds.grow()
            rounds.took(PASS_S)
        questions.take(answers[0][1])
        (draft,) = questions.drafts([asked])
        lengths.append(len(draft.tokens))
        text += draft.tokens
        logps = logps_after(text)
        text.append(max(logps, key=lambda token: logps[token]))
        while rounds.grow():
            rounds.took(PASS_S)
    assert lengths[5:] == [MOST] * 25
    assert rounds.counts.num_root_misses == 0


def test_a_small_tree_grows_before_the_answer_where_passes_are_fast() -> None:
    for step_s, most in ((100.0, 4), (4.0, 2)):
        script = Script([[0, 1]])
        script.rounds.took(PASS_S)
        asked = script.questions.ask([request(0, [0, 1])], step_s=step_s)
        script.rounds.hear(b"target", asked, 0.0)
        num_passes = script.serve()
        assert 1 <= num_passes <= most
        assert (num_passes > 1) == (step_s == 100.0)


def test_a_target_that_says_too_little_is_asked_to_begin_again() -> None:
    script = Script([[0, 1]])
    run_rounds(script, 3, passes=1)
    script.to_draft.clear()  # the last question is lost
    script.step()
    script.hear()
    script.answer()
    assert script.to_target[0].unknown == pack_ints([0])
    assert not script.to_target[0].offers
    script.take()
    script.step()
    assert script.to_draft[0].verdicts[0].start == 0
    script.hear()
    script.grow()
    script.answer()
    script.take()
    assert script.questions.drafts(script.requests)[0].tokens


def test_ended_sequences_and_lost_targets_leave_nothing_behind() -> None:
    script = Script([[0, 1], [2, 2]])
    run_rounds(script, 3, passes=1)
    script.hear()
    script.questions.end(0)
    script.questions.end(7)  # was never asked for
    script.texts = []
    script.ask()
    assert script.to_draft[0].ended == pack_ints([0])
    script.hear()
    assert len(script.table.verified) == 1
    script.rounds.lose(b"target")
    script.rounds.lose(b"another")
    assert not script.table.verified
    assert not script.grow()


def test_a_sequence_without_room_is_not_waited_for() -> None:
    script = Script([[1, 1], [2] * 20], table=Table(room=12))
    script.ask()
    script.hear()
    for _ in range(4):
        script.grow()
        script.answer()
    (answer,) = script.to_target
    assert len(answer.offers) == 1


def test_long_prompts_are_fed_while_the_target_goes_on() -> None:
    prompt = [0, 1] * MAX_CHUNK
    rounds = DraftRounds(Table(), GROWTH, max_length=10_000)
    questions = Questions(VOCAB)
    rounds.hear(b"target", questions.ask([request(5, prompt)]), 0.0)
    ((_, answer),) = rounds.take_offers()
    assert not answer.offers
    assert rounds.grow()
    text = plain(prompt, len(prompt) + 1)
    rounds.hear(b"target", questions.ask([request(5, text)]), 1.0)
    ((_, answer),) = rounds.take_offers()
    assert not answer.offers, "more than a chunk is left"
    assert rounds.grow()
    rounds.hear(b"target", questions.ask([request(5, plain(text, len(text) + 1))]), 2.0)
    assert not rounds.take_offers(), "a pass is worth the wait"
    while not (answers := rounds.take_offers()):
        assert rounds.grow()
    assert answers[0][1].offers


def test_texts_longer_than_the_model_knows_are_not_drafted() -> None:
    rounds = DraftRounds(Table(), GROWTH, max_length=10)
    rounds.hear(b"target", Questions(VOCAB).ask([request(1, [1] * 9, at_most=2)]), 0.0)
    ((_, answer),) = rounds.take_offers()
    assert not answer.offers


def verdict(seq_id: int, *tokens: int, start: int = 0) -> Verdict:
    return Verdict(seq_id=seq_id, start=start, tokens=pack_ints(tokens), at_most=3, num_prompt=2)


def test_what_would_harm_others_is_refused_and_changes_nothing() -> None:
    rounds = DraftRounds(Table(), GROWTH, max_length=20)
    rounds.hear(b"target", Verdicts(epoch=1, verdicts=(verdict(1, 0, 1),)), 0.0)
    good = verdict(3, 0, 1)
    many = tuple(msgspec.structs.replace(good, seq_id=idx) for idx in range(MAX_SEQUENCES + 1))
    for said, message in (
        (Verdicts(epoch=2, verdicts=(good, verdict(2, 0, VOCAB))), "not of 5"),
        (Verdicts(epoch=2, verdicts=(good, good)), "two verdicts of one sequence"),
        (Verdicts(epoch=2, verdicts=(msgspec.structs.replace(good, tokens=b"abc"),)), "multiple"),
        (Verdicts(epoch=2, ended=b"abc"), "multiple of 4"),
        (Verdicts(epoch=2, verdicts=many), "more than 65536 sequences"),
    ):
        with pytest.raises(ProtocolError, match=message):
            rounds.hear(b"target", said, 0.0)
    answers: list[tuple[bytes, TreeOffers]] = []
    while not answers:
        assert rounds.grow()
        answers = rounds.take_offers()
    ((_, offers),) = answers
    assert (offers.epoch, len(offers.offers)) == (1, 1)


VERDICTS = [
    encode(Verdicts(epoch=1, verdicts=(verdict(1, 0, 1, 2),))),
    encode(Verdicts(epoch=2, step_s=0.25, ended=pack_ints([1, 2]))),
    encode(Verdicts(epoch=3, verdicts=(verdict(1, 1, 2, start=3), verdict(2**31 - 1, 1, 2)))),
]
NUMBERS = st.sampled_from([*range(5)] * 8 + [-1, 2**31 - 1, 2**31, 2**63])
TOKENS = st.sampled_from([0, 1, 2, 3, 4, VOCAB, -1])
PACKED = st.sampled_from([b"", b"abc"]) | st.lists(TOKENS, min_size=1, max_size=3).map(pack_ints)
# Well-formed, of any values.
SAID = st.builds(
    Verdicts,
    epoch=NUMBERS,
    step_s=st.sampled_from([0.0, 0.5] * 6 + [1e9, 1e99, -1.0, math.nan, math.inf]),
    verdicts=st.lists(
        st.builds(
            Verdict,
            seq_id=NUMBERS,
            start=NUMBERS,
            tokens=PACKED,
            at_most=NUMBERS,
            num_prompt=NUMBERS,
        ),
        max_size=3,
    ).map(tuple),
    ended=PACKED,
).map(encode)


@settings(max_examples=40)
@given(st.lists(damaged(VERDICTS) | SAID | st.binary(max_size=50), min_size=1, max_size=6))
def test_any_verdicts_are_answered_or_refused(said: list[bytes]) -> None:
    """Between those of a target that keeps to the rules, which notices nothing."""
    script = Script([[0, 1], [3, 2, 2]])
    script.ask()
    for data in said:
        script.hear()
        with contextlib.suppress(ProtocolError):
            message = decode(data)
            if isinstance(message, Verdicts):
                script.rounds.hear(b"stranger", message, script.now_s)
        while not script.to_target:
            assert script.grow(), "whoever waits is answered"
            for peer, answer in script.rounds.take_offers():
                assert decode(encode(answer)) == answer
                if peer == b"target":
                    script.to_target.append(answer)
        script.take()
        script.step()
    assert script.texts == [plain(text[:3], len(text)) for text in script.texts]
