"""Answers in channels: the same message however the text is cut, and all other text as it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.gateway.parsing.call_formats import OPENAI
from server.gateway.parsing.channels import MARKS, begun_answer
from server.gateway.parsing.message import AnswerMessage, MessageOptions, MessageText
from tests.server.gateway.channels import CALL, FINAL, NEXT, THOUGHT

Items = list[tuple[str, str]]
ADD = ("add", '{"a": 1}')


def options_of(*, begun: str = "", calls: bool = True, reasons: bool = True) -> MessageOptions:
    return MessageOptions(
        calls=OPENAI if calls else None,
        tools={"add": {}},
        reasons=reasons,
        has_channels=True,
        begun=begun,
    )


def read(*pieces: str, options: MessageOptions | None = None) -> Items:
    """Return kind (of a call: its name) and text of the message's items."""
    message = AnswerMessage(options or options_of())
    for piece in pieces:
        assert all(part[-1] for part in message.push(piece)), "no part is empty"
    assert all(part[-1] for part in message.push("", is_last=True))
    return [
        (item.kind, str(item)) if isinstance(item, MessageText) else (item.name, item.arguments)
        for item in message.items
    ]


def check(text: str, wanted: Items, options: MessageOptions | None = None) -> None:
    """Assert that `text` is read so, as a whole and cut at each place."""
    assert read(text, options=options) == wanted
    assert read(*text, options=options) == wanted
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:], options=options) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}", [("reasoning", "hm"), ("content", "Yes.")]),
        (f"{FINAL}<|return|>", [("content", "Yes.")]),
        ("<|channel|>final <|constrain|>json<|message|>[1]", [("content", "[1]")]),
        (f"{THOUGHT}{NEXT}{CALL}<|call|>", [("reasoning", "hm"), ADD]),
        (
            f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I add.{NEXT}{THOUGHT}{NEXT}{CALL}",
            [("reasoning", "hm"), ("content", "I add."), ("reasoning", "\n\nhm"), ADD],
        ),
        # Other places of the recipient, and of what it gets.
        (' to=functions.add<|channel|>commentary json<|message|> {"a": 1} ', [ADD]),
        (f'{THOUGHT}<|start|>assistant to=add<|channel|>analysis<|message|>{{"a": 1}}}}', [
            ("reasoning", "hm"), ADD
        ]),
        (f"{CALL}{NEXT}{CALL}{NEXT}{FINAL}", [ADD, ADD, ("content", "Yes.")]),
        ("<|channel|>commentary to=functions.add<|message|>", [("add", "{}")]),
        (f"<|channel|>commentary to=functions.add<|message|>{NEXT}{FINAL}", [
            ("add", "{}"), ("content", "Yes.")
        ]),
        # Marks that a string quotes, and one that ends a call in its middle.
        (
            CALL.replace("1", '"\\"<|end|><|start|>\\\\<|call|>"'),
            [("add", '{"a": "\\"<|end|><|start|>\\\\<|call|>"}')],
        ),
        (f"{CALL[:-1]}{NEXT}{FINAL}", [("add", '{"a": 1'), ("content", "Yes.")]),
        (CALL[:-1], [("add", '{"a": 1')]),
        (CALL.replace("add", "unknown"), [("unknown", '{"a": 1}')]),
        # A mark without a header is a word.
        (f"{THOUGHT} <|end|> of <|start|>, so{NEXT}{FINAL}", [
            ("reasoning", "hm <|end|> of <|start|>, so"), ("content", "Yes.")
        ]),
        # Cut off in a header, which says nothing yet.
        (f"{THOUGHT}{NEXT}<|channel|>final", [("reasoning", "hm")]),
        (f"{THOUGHT}{NEXT}<|channel|>comm", [("reasoning", "hm")]),
        ("<|channel|>", []),
        ("", []),
    ],
)  # fmt: skip
def test_each_channel_has_its_place(text: str, wanted: Items) -> None:
    check(text, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "No channel.",
        " \n",
        " to be",
        "<",
        "<|channel|>thoughts<|message|>hm",
        "<|channel|>final The answer is 4.",
        "<|channel|>analysis The answer is 4." + "!" * 300,
        "<|start|>user<|message|>hi",
        "<|channel|>commentary to=python<|message|>1 + 1",
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>a: 1",
        "<|message|>hm",
        "hm<|mess",
        "<|channel|>commentary to=functions.ad",
    ],
)
def test_text_without_the_form_is_the_content(text: str) -> None:
    check(text, [("content", text)])
    if text.startswith(("<|channel", "<|start")):
        check(f"{THOUGHT}<|end|>{text}", [("reasoning", "hm"), ("content", text)])


def test_what_is_not_read_is_content() -> None:
    check(CALL, [("content", CALL)], options_of(calls=False))
    check(f"{THOUGHT}{NEXT}{FINAL}", [("content", "hm\n\nYes.")], options_of(reasons=False))


@pytest.mark.parametrize(
    ("prompt", "text", "wanted"),
    [
        ("", FINAL, [("content", "Yes.")]),
        (f"<|start|>user<|message|>hi{NEXT}", FINAL, [("content", "Yes.")]),
        (f"{NEXT}{FINAL}<|end|>", f"<|start|>assistant{FINAL}", [("content", "Yes.")]),
        (f"{NEXT}{THOUGHT}<|end|>", "No.", [("content", "No.")]),
        (f"{NEXT}{FINAL[:-1]} <", "b>", [("content", "b>")]),
        (f"{NEXT}{THOUGHT}", f", so{NEXT}{FINAL}", [("reasoning", ", so"), ("content", "Yes.")]),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(prompt: str, text: str, wanted: Items) -> None:
    check(text, wanted, options_of(begun=begun_answer(prompt)))


PIECES = [*MARKS, "assistant", "analysis", "commentary", "final", " to=functions.add", " to=x",
          "json", '{"a": "', '"}', "hm", *' \n{}"\\<|']  # fmt: skip


@settings(max_examples=80)
@given(
    text=st.lists(st.sampled_from([*PIECES, THOUGHT, NEXT, FINAL, CALL]), max_size=12).map("".join),
    begun=st.sampled_from(["", THOUGHT, FINAL, FINAL + "<|end|>"]),
    data=st.data(),
)
def test_any_text_gives_the_same_message_however_it_is_cut(
    text: str, begun: str, data: st.DataObject
) -> None:
    options = options_of(begun=begun)
    whole = read(text, options=options)
    assert read(*text, options=options) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read(text[:cut], text[cut:], options=options) == whole


JSON = st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(MARKS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(arguments=st.dictionaries(st.text(), JSON, max_size=3), data=st.data())
def test_arguments_are_passed_on_to_the_letter(
    arguments: dict[str, object], data: st.DataObject
) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    text = CALL.replace('{"a": 1}', written)
    cut = data.draw(st.integers(0, len(text)))
    assert read(text[:cut], text[cut:]) == [("add", written)]
