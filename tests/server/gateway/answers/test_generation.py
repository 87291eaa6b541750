"""One choice's text: stop strings, stop tokens, characters and counts, against brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.text.tokenizer import IncrementalDetokenizer
from server.gateway.answers.generation import ChoiceText, Delta, TextOptions
from server.gateway.answers.stop_strings import StopStrings
from tests.server.gateway.answers.test_stop_strings import first_stop
from tests.server.gateway.fakes import EOS_ID, ids, output, tokenizer
from topspin.errors import EngineUnavailable, ProtocolError
from topspin.messages import FinishReason, TokenLogprobs

TEXTS = st.text(alphabet="abhelo wrd\u00e9\u6f22\U0001f600", max_size=30)
STOPS = st.lists(
    st.text(alphabet="abhelo w\u00e9\u6f22\U0001f600", min_size=1, max_size=4), max_size=3
)


def choice(options: TextOptions) -> ChoiceText:
    detokenizer = IncrementalDetokenizer(
        tokenizer(), prompt_ids=ids("prompt"), skip_special_tokens=options.skip_special_tokens
    )
    return ChoiceText(options, detokenizer)


def feed(
    text: ChoiceText,
    token_ids: list[int],
    *,
    sizes: random.Random | None = None,
    finish_reason: FinishReason = "length",
    stop_token_id: int | None = None,
) -> list[Delta]:
    """Push the tokens in outputs of one, or of random sizes, until the choice has finished."""
    deltas: list[Delta] = []
    index = 0
    while index < len(token_ids):
        size = 1 if sizes is None else sizes.randint(1, 4)
        part = token_ids[index : index + size]
        last = index + len(part) == len(token_ids)
        deltas.append(
            text.push(
                output(
                    "r",
                    part,
                    index=index,
                    finish_reason=finish_reason if last else None,
                    stop_token_id=stop_token_id if last else None,
                )
            )
        )
        index += len(part)
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(max_examples=120, deadline=None)
@given(
    text=TEXTS,
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    seed=st.none() | st.integers(0, 99),
)
def test_any_stream_equals_brute_force(
    text: str, stops: list[str], include: bool, min_tokens: int, seed: int | None
) -> None:
    token_ids = ids(text)
    # The certain text after t tokens: all but a half character at the end.
    certain = [
        len(tokenizer().decode(token_ids[:t], skip_special_tokens=True).rstrip("\ufffd"))
        for t in range(len(token_ids) + 1)
    ]
    first_armed = min(max(min_tokens, 1), len(token_ids) + 1) - 1
    expected = first_stop(text, stops, from_end=certain[first_armed])
    options = TextOptions(
        stops=StopStrings(stops) if stops else None, include_stop=include, min_tokens=min_tokens
    )
    sizes = None if seed is None else random.Random(seed)
    deltas = feed(choice(options), token_ids, sizes=sizes)
    num_tokens = sum(len(delta.token_ids) for delta in deltas)
    if not token_ids:
        assert deltas == []
    elif expected is None:
        assert joined(deltas) == text
        assert num_tokens == len(token_ids)
        assert deltas[-1].finish_reason == "length"
        assert not deltas[-1].stopped_here
    else:
        end, stop = expected
        assert joined(deltas) == text[: end if include else end - len(stop)]
        assert num_tokens == next(t for t, size in enumerate(certain) if size >= end)
        assert deltas[-1].finish_reason == "stop"


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, tokenizer().vocab_size - 1), min_size=1, max_size=20))
def test_random_tokens_without_stops_equal_their_decoding(token_ids: list[int]) -> None:
    whole = tokenizer().decode(token_ids, skip_special_tokens=True)
    assert joined(feed(choice(TextOptions()), token_ids)) == whole
    # A stop string of more tokens, which cannot occur, takes the other code path to the same text.
    options = TextOptions(stops=StopStrings(["\x00" * 21]))
    assert joined(feed(choice(options), token_ids)) == whole


def test_no_delta_ends_in_half_a_character() -> None:
    token_ids = ids("\u6f22\U0001f600")
    assert len(token_ids) == 7
    deltas = feed(choice(TextOptions()), token_ids)
    assert [delta.text for delta in deltas] == ["", "", "\u6f22", "", "", "", "\U0001f600"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert joined(feed(choice(TextOptions()), ids("a\u6f22")[:-1])) == "a\ufffd"


def test_a_stop_string_in_the_flushed_tail_still_cuts() -> None:
    options = TextOptions(stops=StopStrings(["\ufffd"]))
    deltas = feed(choice(options), ids("a\u6f22")[:-1])
    assert joined(deltas) == "a"
    assert deltas[-1].finish_reason == "stop"
    assert not deltas[-1].stopped_here, "the engine has finished by itself"


@pytest.mark.parametrize("stops", [None, StopStrings(["zz"])])
@pytest.mark.parametrize(
    ("stop_token", "include", "skip_special", "expected"),
    [
        ("<|eos|>", False, True, "hello"),
        ("<|eos|>", True, True, "hello"),
        ("<|eos|>", False, False, "hello"),
        ("<|eos|>", True, False, "hello<|eos|>"),
        ("w", False, True, "hello"),
        ("w", True, True, "hellow"),
    ],
)
def test_a_stop_token_counts_and_shows_only_if_asked(
    stops: StopStrings | None, stop_token: str, include: bool, skip_special: bool, expected: str
) -> None:
    options = TextOptions(stops=stops, include_stop=include, skip_special_tokens=skip_special)
    stop_id = ids(stop_token)[0]
    deltas = feed(
        choice(options), [*ids("hello"), stop_id], finish_reason="stop", stop_token_id=stop_id
    )
    assert joined(deltas) == expected
    assert sum(len(delta.token_ids) for delta in deltas) == 2
    assert deltas[-1].finish_reason == "stop"


def test_the_stop_is_reported_for_abort_only_while_the_engine_runs() -> None:
    options = TextOptions(stops=StopStrings(["b"]))
    running = choice(options).push(output("r", ids("ab"), index=0))
    assert running.stopped_here
    assert running.text == "a"
    finished = choice(options).push(output("r", ids("ab"), index=0, finish_reason="length"))
    assert not finished.stopped_here
    assert finished.finish_reason == "stop"


def test_logprobs_are_cut_with_their_tokens() -> None:
    options = TextOptions(stops=StopStrings(["b"]), num_logprobs=0)
    logprobs = tuple(TokenLogprobs(logprob=-float(i)) for i in range(3))
    delta = choice(options).push(output("r", ids("abc"), logprobs=logprobs))
    assert list(delta.token_ids) == ids("ab")
    assert list(delta.logprobs) == list(logprobs[:2])


def test_missing_logprobs_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="0 logprobs came for 1 tokens"):
        choice(TextOptions(num_logprobs=1)).push(output("r", ids("a")))


def test_an_abort_by_the_engine_is_an_error_not_an_answer() -> None:
    with pytest.raises(EngineUnavailable):
        choice(TextOptions()).push(output("r", [], finish_reason="abort"))


def test_eos_is_a_special_token() -> None:
    assert tokenizer().decode([EOS_ID], skip_special_tokens=True) == ""
