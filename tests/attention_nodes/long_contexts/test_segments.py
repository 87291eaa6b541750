"""The pool of coded segments under random admissions, closings, ends and reuse of blocks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attention_nodes.long_contexts.segments import SegmentPool

NUM_PLACES = 5
NUM_BLOCKS = 6
SEQUENCES = range(4)


class Segments(RuleBasedStateMachine):
    """Every place holds a text; whoever is led to a place must find the text that it wrote.

    A segment's text is what its last block says. As a scheduler does, a block in use by a sequence
    is never overwritten.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = SegmentPool(NUM_PLACES)
        self.text_of_block = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.text_of_place: dict[int, int] = {}
        self.wanted: dict[int, list[tuple[int, int]]] = {each: [] for each in SEQUENCES}
        self.open_text: dict[int, int] = {}
        self.num_texts = 0

    def new_text(self) -> int:
        self.num_texts += 1
        return self.num_texts

    @rule(sequence=st.sampled_from(SEQUENCES), block=st.integers(0, NUM_BLOCKS - 1))
    def close_or_share(self, sequence: int, block: int) -> None:
        text = self.text_of_block[block]
        if not self.pool.share(sequence, block):
            place = self.pool.close(sequence, block)
            if place is None:
                return
            self.text_of_place[place] = text
        self.wanted[sequence].append((block, text))

    @rule(sequence=st.sampled_from(SEQUENCES))
    def begin(self, sequence: int) -> None:
        if sequence in self.open_text:
            return
        place = self.pool.begin(sequence)
        if place is not None:
            self.text_of_place[place] = self.open_text[sequence] = self.new_text()

    @rule(sequence=st.sampled_from(SEQUENCES))
    def end_open(self, sequence: int) -> None:
        self.pool.end_open(sequence)
        self.open_text.pop(sequence, None)

    @rule(sequence=st.sampled_from(SEQUENCES))
    def end(self, sequence: int) -> None:
        self.pool.end(sequence)
        self.wanted[sequence] = []
        self.open_text.pop(sequence, None)

    @precondition(lambda self: len(self.in_use()) < NUM_BLOCKS)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(range(NUM_BLOCKS)) - self.in_use())))
        self.pool.overwrite([block])
        self.text_of_block[block] = self.new_text()

    def in_use(self) -> set[int]:
        return {block for wanted in self.wanted.values() for block, _ in wanted}

    @invariant()
    def places_hold_what_their_sequences_wrote(self) -> None:
        used: set[int] = set()
        for sequence, wanted in self.wanted.items():
            places = self.pool.closed(sequence)
            assert [self.text_of_place[each] for each in places] == [text for _, text in wanted]
            used |= set(places)
        opened = [self.pool.open_place(each) for each in self.open_text]
        assert None not in opened
        assert len(set(opened)) == len(opened), "an open place has one owner"
        assert not used & set(opened)
        for sequence, text in self.open_text.items():
            place = self.pool.open_place(sequence)
            assert place is not None
            assert self.text_of_place[place] == text
        assert self.pool.num_used == len(used) + len(opened) <= NUM_PLACES


Segments.TestCase.settings = settings(max_examples=20)
TestSegments = Segments.TestCase


def test_codes_of_a_sequence_that_has_ended_are_found_until_their_place_is_needed() -> None:
    pool = SegmentPool(2)
    place = pool.close(0, 7)
    pool.end(0)
    assert pool.share(1, 7)
    assert pool.closed(1) == [place]
    pool.end(1)
    assert pool.close(2, 8) is not None
    assert pool.close(2, 9) == place, "the other is given up"
    assert not pool.share(3, 7)
    assert pool.close(3, 7) is None


def test_an_open_segment_keeps_its_place_until_it_is_given_up() -> None:
    pool = SegmentPool(2)
    place = pool.begin(0)
    assert pool.close(0, 3) not in (None, place)
    assert pool.open_place(0) == place
    assert pool.close(1, 4) is None
    pool.end_open(0)
    assert pool.open_place(0) is None
    assert pool.close(1, 4) == place
