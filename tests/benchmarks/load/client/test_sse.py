"""The event parser: any cut of the bytes gives the same events."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.load.client.sse import EventParser

STREAM = (
    b"\xef\xbb\xbfdata: a\r\n\r\ndata:b\ndata: c\n\n: ping\n\nevent: x\rdata:  d\r\r"
    b"id: 3\n\ndata\n\ndata: e: f\n\ndata: last"
)
EVENTS = [b"a", b"b\nc", b" d", b"", b"e: f", b"last"]


def parse(blocks: list[bytes]) -> list[bytes]:
    parser = EventParser()
    events = [event for block in blocks for event in parser.feed(block)]
    return events + parser.finish()


@given(st.lists(st.integers(0, len(STREAM))))
@settings(max_examples=100)
def test_events_do_not_depend_on_where_the_bytes_are_cut(cuts: list[int]) -> None:
    marks = [0, *sorted(cuts), len(STREAM)]
    blocks = [STREAM[a:b] for a, b in pairwise(marks)]
    assert parse(blocks) == EVENTS


def test_an_event_comes_out_with_the_bytes_that_end_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: one\n") == []
    assert parser.feed(b"\ndata: two\n\ndata: thr") == [b"one", b"two"]
    assert parser.feed(b"ee\r\n") == []
    assert parser.feed(b"\r\n") == [b"three"]
    assert parser.finish() == []


def test_comments_and_other_fields_are_no_events() -> None:
    assert parse([b": keep-alive\n\nevent: ping\nretry: 5\n\n"]) == []
