"""One choice's text: stop strings, stop tokens, characters and counts, against brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.text.tokenizer import IncrementalDetokenizer
from server.gateway.generation.choice import Choice, TextOptions
from server.gateway.generation.prompts import Prompt
from server.gateway.generation.stop_strings import StopStrings
from server.gateway.parsing.message import AnswerMessage, MessageOptions
from server.gateway.parsing.parts import Content, Reasoning
from tests.server.gateway.fakes import ids, output, tokenizer
from tests.server.gateway.generation.test_stop_strings import first_stop
from topspin.errors import EngineUnavailable, ProtocolError
from topspin.messages import FinishReason, TokenLogprobs

TEXTS = st.text(alphabet="abhelo wrd\u00e9\u6f22\U0001f600", max_size=30)
STOPS = st.lists(
    st.text(alphabet="abhelo w\u00e9\u6f22\U0001f600", min_size=1, max_size=4), max_size=3
)


def choice(options: TextOptions, message: AnswerMessage | None = None) -> Choice:
    detokenizer = IncrementalDetokenizer(
        tokenizer(), prompt_ids=ids("prompt"), skip_special_tokens=options.skip_special_tokens
    )
    return Choice(
        index=0,
        prompt=Prompt(ids=[]),
        is_first=True,
        options=options,
        detokenizer=detokenizer,
        message=message,
    )


def feed(
    choice: Choice,
    token_ids: list[int],
    *,
    sizes: random.Random | None = None,
    finish_reason: FinishReason = "length",
    stop_token_id: int | None = None,
) -> list[str]:
    """Push the tokens in outputs of one, or of random sizes, until the choice has finished.

    Returns the texts that they add.
    """
    texts: list[str] = []
    index = 0
    while index < len(token_ids) and choice.finish_reason is None:
        size = 1 if sizes is None else sizes.randint(1, 4)
        part = token_ids[index : index + size]
        last = index + len(part) == len(token_ids)
        choice.push(
            output(
                "r",
                part,
                index=index,
                finish_reason=finish_reason if last else None,
                stop_token_id=stop_token_id if last else None,
            )
        )
        texts.append(choice.text)
        choice.clear()
        index += len(part)
    return texts


def text_of(options: TextOptions, token_ids: list[int]) -> str:
    return "".join(feed(choice(options), token_ids))


@settings(max_examples=120)
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
    grown = choice(options)
    shown = "".join(feed(grown, token_ids, sizes=sizes))
    if expected is None:
        assert shown == text
        assert grown.num_tokens == len(token_ids)
        assert grown.finish_reason == ("length" if token_ids else None)
    elif token_ids:
        end, stop = expected
        assert shown == text[: end if include else end - len(stop)]
        assert grown.num_tokens == next(t for t, size in enumerate(certain) if size >= end)
        assert (grown.finish_reason, grown.stop_reason) == ("stop", stop)


@settings(max_examples=100)
@given(token_ids=st.lists(st.integers(0, tokenizer().vocab_size - 1), min_size=1, max_size=20))
def test_random_tokens_without_stops_equal_their_decoding(token_ids: list[int]) -> None:
    whole = tokenizer().decode(token_ids, skip_special_tokens=True)
    assert text_of(TextOptions(), token_ids) == whole
    # A stop string of more tokens, which cannot occur, takes the other code path to the same text.
    assert text_of(TextOptions(stops=StopStrings(["\x00" * 21])), token_ids) == whole


def test_no_output_ends_in_half_a_character() -> None:
    token_ids = ids("\u6f22\U0001f600")
    assert len(token_ids) == 7
    texts = feed(choice(TextOptions()), token_ids)
    assert texts == ["", "", "\u6f22", "", "", "", "\U0001f600"]


def test_a_stop_string_in_the_flushed_tail_still_cuts() -> None:
    cut = choice(TextOptions(stops=StopStrings(["\ufffd"])))
    assert "".join(feed(cut, ids("a\u6f22")[:-1])) == "a"
    assert cut.finish_reason == "stop"


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
    stopped = choice(options)
    texts = feed(stopped, [*ids("hello"), stop_id], finish_reason="stop", stop_token_id=stop_id)
    assert "".join(texts) == expected
    assert stopped.num_tokens == 2
    assert stopped.finish_reason == "stop"


def test_logprobs_are_cut_with_their_tokens() -> None:
    cut = choice(TextOptions(stops=StopStrings(["b"]), num_logprobs=0))
    logprobs = [TokenLogprobs(logprob=-float(i)) for i in range(3)]
    cut.push(output("r", ids("abc"), logprobs=tuple(logprobs)))
    assert cut.token_ids == ids("ab")
    assert cut.logprobs == logprobs[:2]


def test_the_tokens_of_a_step_are_one_text_where_those_of_reasoning_are_hidden() -> None:
    options = MessageOptions(reasons=True, hides_reasoning_tokens=True)
    thoughtful = choice(TextOptions(num_logprobs=0), AnswerMessage(options))
    token_ids = ids("<think>a</think>bcd")
    logprobs = tuple(TokenLogprobs(logprob=-float(i)) for i in range(len(token_ids)))
    thoughtful.push(output("r", token_ids, logprobs=logprobs, finish_reason="length"))
    assert thoughtful.parts == [Reasoning("a"), Content("bcd")]
    assert thoughtful.token_ids == token_ids[-3:]
    assert thoughtful.logprobs == list(logprobs[-3:])


def test_missing_logprobs_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="0 logprobs came for 1 tokens"):
        choice(TextOptions(num_logprobs=1)).push(output("r", ids("a")))


def test_an_abort_by_the_engine_is_an_error_not_an_answer() -> None:
    with pytest.raises(EngineUnavailable):
        choice(TextOptions()).push(output("r", [], finish_reason="abort"))
