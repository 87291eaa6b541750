"""Calls that name a function before a JSON object: to the letter, however the text is cut."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.gateway.parsing.call_formats import FORMATS
from server.gateway.parsing.message import AnswerMessage, MessageOptions
from server.gateway.parsing.parts import CallArguments, CallBegin
from tests.server.gateway.named import NAMES, bare_calls, written_section
from tests.server.gateway.parsing.answers import checking, reading

EACH = pytest.mark.parametrize("name", NAMES)
A, B = ("f", '{"a": "}<|tool_call_end|><｜tool▁call▁end｜>"}'), ("g.h-1", "{\n}")
read = reading(lambda name: MessageOptions(calls=FORMATS[name]))
check = checking(read)


@EACH
def test_calls_and_the_text_around_them(name: str) -> None:
    section = written_section(name, [A, B])
    check(name, section, "", [A, B])
    check(name, f"I look.\n\n{section}\n Done: {{x}} ```", "I look.Done: {x} ```", [A, B])
    check(name, f"{section}{written_section(name, [A])}", "", [A, B, A])


@EACH
def test_marks_that_models_forget_or_write_twice(name: str) -> None:
    section = written_section(name, [A, B])
    [first, second] = bare_calls(name, [A, B])
    begin, end = section[: section.index(first)], section[section.index(second) + len(second) :]
    check(name, begin + first + second, "", [A, B])
    check(name, f"{begin}\n{first} \n {second}\n{end}", "", [A, B])
    check(name, section.replace(A[1], A[1] + "}"), "", [A, B])
    # Without the marks behind the objects, and cut off in one of them.
    bare = [each[: each.index(call[1]) + len(call[1])] for each, call in ((first, A), (second, B))]
    check(name, begin + "".join(bare), "", [A, B])
    check(name, f"{begin}{bare[0]}{end}So.", "So.", [A])
    check(
        name, begin + first + second[: -len(second) + second.index("}")], "", [A, ("g.h-1", "{\n")]
    )
    for num_chars in range(1, len(first + end) - first.index(A[1]) - len(A[1])):
        assert read(name, (begin + first + end)[:-num_chars]) == ("", [A])


@EACH
def test_text_that_is_no_call_is_content(name: str) -> None:
    section = written_section(name, [A])
    [call] = bare_calls(name, [A])
    begin = section[: section.index(call)]
    texts = [
        f"a {begin[:-1]}",
        f"a\n\n{begin} I say {{x}}",
        f"{begin}{begin}",
        begin + "long " * 200 + "{}",
        section.replace(A[1], "[]"),
        section.replace("f", "two words", 1),
        call,
        begin + call[: call.index(A[1])],
    ]
    for text in texts:
        check(name, text, text, [])
    check(name, begin, "", [])
    check(name, f"{begin}{begin}{call}", begin, [A])


def test_the_calls_of_deepseek_v3_may_lack_the_fence() -> None:
    text = written_section("deepseek_v3", [A])
    check("deepseek_v3", text.replace("```json", "```"), "", [A])
    check("deepseek_v3", text.replace("\n```json\n", "").replace("\n```", ""), "", [A])


def test_an_id_of_the_model_is_the_calls_unless_another_has_it() -> None:
    message = AnswerMessage(MessageOptions(calls=FORMATS["kimi_k2"]))
    text = written_section("kimi_k2", [A, B, A, A]).replace(":3", ":0").replace(":2", ":12")
    message.push(text, is_last=True)
    *own, other = [call.id for call in message.calls]
    assert own == ["functions.f:0", "functions.g.h-1:1", "functions.f:12"]
    assert re.fullmatch("call_[0-9a-f]{24}", other)
    for head, name in (("f:0", "f"), ("functions.f", "f"), ("functions.a:b:1", "a:b")):
        message = AnswerMessage(MessageOptions(calls=FORMATS["kimi_k2"]))
        message.push(text.replace("functions.f:0", head), is_last=True)
        assert (message.calls[0].id, message.calls[0].name) == (head, name)


@EACH
def test_the_object_is_passed_on_as_it_comes(name: str) -> None:
    message = AnswerMessage(MessageOptions(calls=FORMATS[name]))
    head, _, _ = written_section(name, [A]).partition(A[1])
    assert message.push(head) == []
    [begun, arguments] = message.push('{"a')
    assert isinstance(begun, CallBegin)
    assert arguments == CallArguments(0, '{"a')
    assert message.push('": {') == [CallArguments(0, '": {')]


@EACH
def test_marks_that_are_special_tokens_are_shown_to_the_parser(name: str) -> None:
    marks = re.findall(r"<[^<>]*>", written_section(name, [("f", "{}")]))
    assert set(marks) <= set(FORMATS[name].markers)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    arguments=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), min_size=1, max_size=3),
    indent=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_arguments_come_back_to_the_letter(
    name: str, arguments: list[dict[str, object]], indent: int | None, data: st.DataObject
) -> None:
    calls = [("f", json.dumps(each, ensure_ascii=False, indent=indent)) for each in arguments]
    written = f"Well.\n\n{written_section(name, calls)}"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(written) - 1), max_size=8)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert read(name, *pieces) == ("Well.", calls)
    assert read(name, *written) == ("Well.", calls)


PIECES = sorted(
    {
        piece
        for name in NAMES
        for piece in (*FORMATS[name].markers, "functions.f:0", "f", '{"a": "}"}', *'{}]"`\n x')
    }
)


@settings(max_examples=75)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    name=st.sampled_from(NAMES),
    data=st.data(),
)
def test_any_text_gives_the_same_however_it_is_cut(
    text: str, name: str, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(text)))
    whole = read(name, text)
    assert read(name, *text) == whole
    assert read(name, text[:cut], text[cut:]) == whole
