"""A model's text as a message: the same parts however the text was cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.gateway.parsing.call_formats import FORMATS
from server.gateway.parsing.message import AnswerMessage, MessageOptions
from tests.server.gateway.named import written_section

TOOLS: dict[str, dict[str, Any]] = {"get_weather": {}, "add": {}}
HERMES_CALL = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "}\\"{<tool_call>"}}\n</tool_call>'
)
Shape = tuple[str, str, list[tuple[str, str]]]


def read(pieces: list[str], options: MessageOptions) -> Shape:
    """Return reasoning, content and (name, arguments) of calls; parts and message must agree."""
    message = AnswerMessage(options)
    parts = [
        part
        for idx, piece in enumerate(pieces)
        for part in message.push(piece, is_last=idx == len(pieces) - 1)
    ]
    assert all(part[-1] for part in parts), "no part is empty"
    assert len({call.id for call in message.calls}) == len(message.calls)
    calls = [(call.name, call.arguments) for call in message.calls]
    return message.reasoning, message.content, calls


def options_of(name: str, **others: bool) -> MessageOptions:
    return MessageOptions(calls=FORMATS[name], tools=TOOLS, **others)


Calls = list[tuple[str, str]]
HERMES_ADD = ("add", '{"a": 1, "b": "}\\"{<tool_call>"}')
ADD, BARE, WEATHER = ("add", '{"a": 1}'), ("add", "{}"), ("get_weather", "{}")
# Of each format: a text, and its content and calls.
CASES: dict[str, list[tuple[str, str, Calls]]] = {
    "hermes": [
        (HERMES_CALL, "", [HERMES_ADD]),
        (
            f'I look.\n\n{HERMES_CALL}\n<tool_call>{{"arguments": {{}}, "name": "get_weather"}}',
            *("I look.", [HERMES_ADD, WEATHER]),
        ),
        ('<tool_call>{"name": "add"}</tool_call>', "", [BARE]),
        (
            '<tool_call>{"name": "add", "id": [1, "]"], "arguments": "{\\"a\\": 1}"}</tool_call>',
            *("", [ADD]),
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
        (
            '<tool_call>{"name": "add"}\n<tool_call>{"name": "get_weather"}</tool_call> Done.',
            *("Done.", [BARE, WEATHER]),
        ),
        (
            '<tool_call>{"name": "add", "name": "del", "parameters": null, '
            '"arguments": {"a": 1}, "parameters": {"c": 3}}</tool_call>',
            *("", [ADD]),
        ),
        # One brace too many.
        (HERMES_CALL.replace("}\n</", "}}\n</"), "", [HERMES_ADD]),
        ('<tool_call>{"name": "add"} }', "", [BARE]),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, '
            '{"name": "add", "arguments": {}}]',
            *("", [ADD, BARE]),
        ),
        (
            'Well. [TOOL_CALLS]add[ARGS]{"a": "["}[TOOL_CALLS]get_weather{}',
            *("Well.", [("add", '{"a": "["}'), WEATHER]),
        ),
        (
            '[TOOL_CALLS] [{"name": "add"}]\n\nThanks. [TOOL_CALLS] [{"name": "get_weather"}] So.',
            *("Thanks.So.", [BARE, WEATHER]),
        ),
        ('[TOOL_CALLS]add{"a": 1} Then I say {x}.', "Then I say {x}.", [ADD]),
        ('a [TOOL_CALLS] [{"x": 1}', 'a [TOOL_CALLS]{"x": 1}', []),
        # One brace too many.
        ('[TOOL_CALLS]add{"a": 1}}[TOOL_CALLS]add{}} So.', "So.", [ADD, BARE]),
        ('[TOOL_CALLS] [{"name": "add"}}, {"name": "add"}]]', "", [BARE, BARE]),
        # Ids, as Mistral Small 3.2 writes them.
        ('So. [TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', "So.", [ADD]),
        ("[TOOL_CALLS]add[CALL_ID]1[ARGS] {}[TOOL_CALLS]add[CALL_ID]2{}", "", [BARE, BARE]),
    ],
    "llama3_json": [
        (
            '{"name": "add", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
            *("", [ADD, WEATHER]),
        ),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        ('{"name": "add"}}; {"name": "add"}}', "", [BARE, BARE]),
    ],
}
# Texts that have no call, and are the content as they are; some have blanks before what looks like
# a call.
TEXTS = {
    "hermes": [
        *("plain text <b>", "<tool_call>oops</tool_call> end", '<tool_call>{"na', "a < b <tool"),
        *('<tool_call>{"name": "add", ]', "a <tool_call> tag", "a\n\n<tool_call>\nno"),
        *('a <tool_call>{"x": 1}.', " <tool_call> \n<tool_call> x"),
    ],
    "mistral": [
        *(
            "[TOOL_CALLS]I say {x}",
            "see [1] and [TOOL",
            "[TOOL_CALLS]add",
            "a \n[TOOL_CALLS] is it",
        ),
        *('a [TOOL_CALLS]{"x', "a [TOOL_CALLS]add[CALL_ID]1"),
    ],
    "llama3_json": [
        *(
            '{"name": "Bob", "age": 3}',
            '{"a": [1]} or so',
            "no, <|python",
            ",",
            ' <|python_tag|>{"x',
        ),
        ' \n{"x": [1]} or so',
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    plain: list[tuple[str, str, Calls]] = [(text, text, []) for text in TEXTS[name]]
    for text, content, calls in CASES[name] + plain:
        wanted = ("", content, calls)
        assert read(list(text), options_of(name)) == wanted
        for cut in range(len(text)):
            assert read([text[:cut], text[cut:]], options_of(name)) == wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    arguments=st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=3),
    name=st.sampled_from(["hermes", "mistral", "llama3_json"]),
    indent=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_arguments_are_passed_on_to_the_letter(
    arguments: list[dict[str, object]], name: str, indent: int | None, data: st.DataObject
) -> None:
    texts = [json.dumps(each, ensure_ascii=False, indent=indent) for each in arguments]
    key = "parameters" if name == "llama3_json" else "arguments"
    objects = [f'{{"name": "add", "{key}": {text}}}' for text in texts]
    written = {
        "hermes": "".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in objects),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects)}]",
        "llama3_json": ";".join(objects),
    }[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(written) - 1), max_size=6)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert read(pieces, options_of(name)) == ("", "", [("add", text) for text in texts])


PIECES = (
    '{"name": "add", "arguments": {',
    '"name": "add"',
    '"arguments": {"a": "}"}',
    '"parameters": null',
    '"parameters"',
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    *("<function=add>", "<parameter=a>", "<parameter=", "</parameter>", "</function>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *('<invoke name="add">', '<parameter name="a">', "</invoke>"),
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    "<think>",
    "</think>",
    "add",
    *'{}[]",:; \n\\x1',
)


@settings(max_examples=120)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(),
    name=st.sampled_from(sorted(FORMATS)),
)
def test_any_text_gives_the_same_message_however_it_is_cut(text: str, name: str) -> None:
    whole = read([text], options_of(name, reasons=True))
    assert read([*text, ""], options_of(name, reasons=True)) == whole


@pytest.mark.parametrize(
    ("text", "is_inside", "reasoning", "content"),
    [
        ("<think>\nhm\n\nhm</think>\n\nYes.", False, "hm\n\nhm", "Yes."),
        ("\n<think></think>Yes.", False, "", "Yes."),
        ("so\n</think>\nYes </think>", True, "so", "Yes </think>"),
        ("so </thin", True, "so </thin", ""),
        ("<thin", False, "", "<thin"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
    ],
)
def test_reasoning_is_split_from_the_answer(
    text: str, is_inside: bool, reasoning: str, content: str
) -> None:
    options = MessageOptions(reasons=True, is_inside_reasoning=is_inside)
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]], options) == (reasoning, content, [])
    assert read(list(text), options) == (reasoning, content, [])


def test_a_call_behind_reasoning_is_found_and_one_inside_is_not() -> None:
    text = f"<think>{HERMES_CALL}</think>{HERMES_CALL}"
    reasoning, content, calls = read(list(text), options_of("hermes", reasons=True))
    assert (reasoning, content) == (HERMES_CALL, "")
    assert [name for name, _ in calls] == ["add"]


def test_a_call_of_kimi_may_end_the_reasoning() -> None:
    call = written_section("kimi_k2", [("add", "{}")])
    for text, is_inside in ((f"so\n{call}", True), (f"<think>so\n{call}</think>", False)):
        options = options_of("kimi_k2", reasons=True, is_inside_reasoning=is_inside)
        wanted = ("so", "" if is_inside else "</think>", [("add", "{}")])
        for cut in range(len(text)):
            assert read([text[:cut], text[cut:]], options) == wanted
    text = written_section("deepseek_v31", [("add", "{}")])
    options = options_of("deepseek_v31", reasons=True, is_inside_reasoning=True)
    assert read([text], options) == (text, "", [])
    untold = MessageOptions(reasons=True, is_inside_reasoning=True)
    assert read([call], untold) == (call, "", [])


def test_only_the_first_call_is_shown_if_one_was_asked_for() -> None:
    options = options_of("hermes", only_one_call=True)
    assert len(read([HERMES_CALL + HERMES_CALL], options)[2]) == 1


def test_reasoning_tokens_are_counted() -> None:
    message = AnswerMessage(MessageOptions(reasons=True, is_inside_reasoning=True))
    for token in ("so", " it", " is", "</think>", "Yes", "."):
        message.push(token, num_tokens=1)
    assert message.num_reasoning_tokens == 4
