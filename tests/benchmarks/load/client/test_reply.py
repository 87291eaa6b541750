"""A reply's events: which are output, how tokens are counted, which are errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.load.client.reply import Arrival, ReplyError, ReplyReader, tokens_per_arrival


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str | None, **choice: Any) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": None, **choice}])


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


def read(*blocks: bytes, finish: bool = True) -> ReplyReader:
    """Feed each block at the time of its index and finish one second later."""
    reader = ReplyReader()
    for index, block in enumerate(blocks):
        reader.feed(block, float(index))
    if finish:
        reader.finish(float(len(blocks)))
    return reader


def times(reader: ReplyReader) -> list[float]:
    return [arrival.time_s for arrival in reader.arrivals]


DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5})


def test_a_completion() -> None:
    reader = read(text("he"), text("llo", finish_reason="stop"), USAGE, DONE)
    assert reader.text == "hello"
    assert times(reader) == [0, 1]
    assert reader.last_choice_s == 1
    assert reader.done_s == 3
    assert (reader.prompt_tokens, reader.completion_tokens) == (7, 5)
    assert reader.finish_reason == "stop"


def test_a_chat_begins_with_its_first_output_not_with_its_role() -> None:
    reader = read(
        delta(role="assistant", content=""),
        delta(content="hi"),
        delta(finish_reason="stop"),
        DONE,
    )
    assert times(reader) == [1]
    assert reader.last_choice_s == 2
    assert reader.text == "hi"


def test_reasoning_and_tool_calls_are_output_but_not_the_answer() -> None:
    reader = read(
        delta(role="assistant", reasoning_content="let me"),
        delta(reasoning=" see"),
        delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]),
        delta(content="x", finish_reason="stop"),
    )
    assert times(reader) == [0, 1, 2, 3]
    assert reader.text == "x"


def test_half_a_character_is_output_without_text() -> None:
    assert times(read(text("a"), text(""), text("ä", finish_reason="length"))) == [0, 1, 2]
    assert times(read(delta(content="a"), delta(content=""), delta(content="ä"), DONE)) == [0, 1, 2]


@pytest.mark.parametrize("empty", [text(""), delta(content=""), b": keep-alive\n\n"])
def test_an_answer_does_not_begin_with_a_text_that_is_empty(empty: bytes) -> None:
    more = text if empty == text("") else lambda said: delta(content=said)
    assert times(read(empty, empty, more("a"), more("b"), DONE)) == [2, 3]
    choice = {"index": 0, "text": "", "finish_reason": None}
    with_token = event(choices=[{**choice, "token_ids": [5]}])
    assert times(read(with_token, more("a"), DONE)) == [0, 1]
    without = event(choices=[{**choice, "token_ids": []}])
    assert times(read(without, more("a"), DONE)) == [1]


def test_the_end_alone_is_no_output() -> None:
    reader = read(text("", finish_reason="stop"), DONE)
    assert times(reader) == []
    assert reader.last_choice_s == 0


def test_other_choices_are_not_measured() -> None:
    reader = read(text("other", index=1), text("mine"), DONE)
    assert reader.text == "mine"
    assert times(reader) == [1]


def test_events_of_one_read_are_one_arrival() -> None:
    reader = read(text("a") + text("b") + text("c"), text("d") + DONE)
    assert times(reader) == [0, 1]
    assert [arrival.num_events for arrival in reader.arrivals] == [3, 1]


def test_a_reason_is_an_end_without_done() -> None:
    assert read(text("a", finish_reason="length")).done_s == 1


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        ([text("a")], "truncated"),
        ([], "empty"),
        ([DONE], "empty"),
        ([USAGE, DONE], "empty"),
        ([b"data: <html>\n\n"], "bad_reply"),
        ([b'data: {"choices": 3}\n\n'], "bad_reply"),
        ([text("a"), event(error={"message": "out of memory"})], "stream_error"),
        ([text("a"), event(error="out of memory")], "stream_error"),
        ([text("a"), event(object="error", message="out of memory")], "stream_error"),
    ],
)
def test_what_is_no_whole_reply_is_an_error(blocks: list[bytes], kind: str) -> None:
    with pytest.raises(ReplyError) as caught:
        read(*blocks)
    assert caught.value.kind == kind
    if kind == "stream_error":
        assert str(caught.value) == "out of memory"


def arrival(num_events: int = 1, num_chars: int = 1, **fields: Any) -> Arrival:
    found = {"num_tokens": None, "total_tokens": None} | fields
    return Arrival(0.0, num_events, num_chars, **found)


def test_running_usage_says_the_tokens_of_each_arrival() -> None:
    counts = tokens_per_arrival([arrival(total_tokens=3), arrival(total_tokens=8)], 8)
    assert counts == ((3, 5), True)


def test_named_tokens_are_counted() -> None:
    ids = read(text("abc", token_ids=[1, 2, 3]), text("d", token_ids=[4]), USAGE, DONE)
    assert tokens_per_arrival(ids.arrivals, ids.completion_tokens) == ((3, 1), True)
    named = read(text("a", logprobs={"tokens": ["x", "y"]}), DONE)
    assert tokens_per_arrival(named.arrivals, None) == ((2,), True)
    content = event(choices=[{"delta": {"content": "a"}, "logprobs": {"content": [{}, {}]}}])
    assert tokens_per_arrival(read(content, DONE).arrivals, None) == ((2,), True)


def test_one_token_an_event_is_exact_where_the_total_agrees() -> None:
    arrivals = [arrival(num_events=1), arrival(num_events=3)]
    assert tokens_per_arrival(arrivals, 4) == ((1, 3), True)
    # The token that ends the answer has no event with output.
    assert tokens_per_arrival(arrivals, 5) == ((1, 3), True)
    assert tokens_per_arrival(arrivals, None) == ((1, 3), False)


def test_else_the_total_is_shared_out_by_length() -> None:
    arrivals = [arrival(num_chars=10), arrival(num_chars=30), arrival(num_chars=0)]
    assert tokens_per_arrival(arrivals, 8) == ((2, 6, 0), False)
    silent = [arrival(num_chars=0), arrival(num_chars=0)]
    assert tokens_per_arrival(silent, 7) == ((4, 3), False)
    assert tokens_per_arrival([], 0) == ((), True)


def test_shares_add_up_to_the_total() -> None:
    arrivals = [arrival(num_chars=1 + index % 5) for index in range(37)]
    for total in (1, 39, 100, 1001):
        assert sum(tokens_per_arrival(arrivals, total).per_arrival) == total
