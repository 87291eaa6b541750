"""Calls whose arguments stand in tags: texts of strings, JSON of all else, however they are cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.gateway.parsing.call_formats import FORMATS
from server.gateway.parsing.message import AnswerMessage, MessageOptions
from tests.server.gateway.parsing.answers import Calls, checking, reading
from tests.server.gateway.tagged import NAMES, written_call

SCHEMA: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "colour": {"$ref": "#/$defs/Colour"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer", "object"]},
        "loop": {"$ref": "#/properties/loop"},
    },
    "$defs": {"Colour": {"enum": ["red", "5"]}},
}
TOOLS = {"f": SCHEMA, "g": {"additionalProperties": {"type": "string"}}}
EACH = pytest.mark.parametrize("name", NAMES)
read = reading(lambda name: MessageOptions(calls=FORMATS[name], tools=TOOLS))
check = checking(read)


@EACH
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", ' "a\\\n\n\té" <b> </parameter ', ' "a\\\n\n\té" <b> </parameter '),
        ("text", "", ""),
        ("text", "\n", "\n"),
        ("colour", "5", "5"),
        ("number", "5", 5),
        ("number", "5.5", 5.5),
        ("number", "five", "five"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("list", ' [1,\n "</arg_value></parameter>"] ', [1, "</arg_value></parameter>"]),
        ("list", '["5" wide"]', '["5" wide"]'),
        ("list", "[" * 10_000, "[" * 10_000),
        ("name", "5", "5"),
        ("name", "null", None),
        ("name", "None", None),
        ("name", '"Ann"', "Ann"),
        ("name", "Ann", "Ann"),
        ("either", "5", 5),
        ("either", "5.5", "5.5"),
        ("either", '{"a": [1]}', {"a": [1]}),
        ("loop", "true", True),
        ("other", "5", 5),
        ("other", "True", "True"),
        ("other", "so ", "so "),
    ],
)
def test_a_value_is_text_or_json_as_its_schema_says(
    name: str, key: str, written: str, value: object
) -> None:
    arguments = [(key, written), ("last", "so")]
    [(_, read_as)] = read(name, written_call(name, "f", arguments))[1]
    assert json.loads(read_as) == {key: value, "last": "so"}


@EACH
def test_schemas_without_names_and_unknown_functions(name: str) -> None:
    for function, value in (("g", "5"), ("unknown", 5)):
        [(called, arguments)] = read(name, written_call(name, function, [("a", "5")]))[1]
        assert (called, json.loads(arguments)) == (function, {"a": value})


def test_tags_that_are_special_tokens_are_shown_to_the_parser() -> None:
    tags = re.findall("</?[a-z_]+>", written_call("glm45", "f", [("a", "5")]))
    assert set(FORMATS["glm45"].markers) == set(tags)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.lists(
    st.text(max_size=5)
    | st.sampled_from(["\n", "<", "</", '"', "\\", "</arg_value", "<parameter=a>", "</para", "👍"]),
    max_size=6,
).map("".join)


@settings(max_examples=75)
@given(
    name=st.sampled_from(NAMES),
    arguments=st.lists(
        st.fixed_dictionaries({}, optional={"text": TEXTS, "list": st.lists(VALUES)}),
        min_size=1,
        max_size=2,
    ),
    indent=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_arguments_come_back_however_the_text_is_cut(
    name: str, arguments: list[dict[str, Any]], indent: int | None, data: st.DataObject
) -> None:
    written = "Well.\n\n" + "\n".join(
        written_call(
            name,
            "f",
            [
                (key, value if key == "text" else json.dumps(value, indent=indent))
                for key, value in each.items()
            ],
        )
        for each in arguments
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, len(written) - 1), max_size=8)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    content, calls = read(name, *pieces)
    assert content == "Well."
    assert [json.loads(each) for _, each in calls] == arguments
    assert read(name, *written) == (content, calls)


def test_a_string_is_passed_on_as_it_comes_and_other_values_once_they_are_whole() -> None:
    message = AnswerMessage(MessageOptions(calls=FORMATS["qwen3_coder"], tools=TOOLS))

    def push(text: str) -> str:
        return "".join(part[-1] for part in message.push(text))

    assert push("<tool_call>\n<function=f>") == "f"
    assert push("<parameter=text>\n") == '{"text": "'
    assert push('a "') == 'a \\"'
    assert push("b\n</par") == "b"
    assert push("k\n") == "\\n</park"
    assert push("\n</parameter><parameter=list>[1") == '\\n", "list": '
    assert push(", 2]</parameter>") == "[1, 2]"
    assert push("</function>") == "}"


G: Calls = [("g", "{}")]
A: Calls = [("f", '{"text": "a"}')]
QWEN_A = "<function=f>\n<parameter=text>\na\n</parameter>\n</function>"
MINIMAX_A = '<invoke name="f">\n<parameter name="text">a</parameter>\n</invoke>'
GLM_A = "<arg_key>text</arg_key><arg_value>a</arg_value>"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # Several calls, with text around them.
        ("glm47", f"So.\n<tool_call>f{GLM_A}</tool_call><tool_call>g</tool_call> Done.",
         "So.Done.", A + G),
        ("minimax_m2", f'<minimax:tool_call>\n{MINIMAX_A}\n<invoke name="g">\n</invoke>\n'
         "</minimax:tool_call>\nDone.", "Done.", A + G),
        ("qwen3_coder", f"<tool_call>\n{QWEN_A}\n</tool_call>\n<tool_call>\n<function=g>\n"
         "</function>\n</tool_call>", "", A + G),
        # Tags that models forget: of a block, its end, a call's end.
        ("qwen3_coder", f"So.\n\n{QWEN_A}\n</tool_call>", "So.", A),
        ("qwen3_coder", f"{QWEN_A}\n<function=g></function>Done.", "Done.", A + G),
        ("qwen3_coder", f"<tool_call>{QWEN_A.removesuffix('</function>')}</tool_call>", "", A),
        ("qwen3_coder", f"<tool_call>{QWEN_A.removesuffix('</function>')}<tool_call>"
         "<function=g></function>", "", A + G),
        ("qwen3_coder", "<tool_call><function=g>", "", G),
        ("glm45", f"<tool_call>f\n{GLM_A}\n<tool_call>g\n</tool_call>", "", A + G),
        ("glm45", f"<tool_call>\nf\n{GLM_A}\n", "", A),
        ("minimax_m2", f"<minimax:tool_call>{MINIMAX_A}", "", A),
        # Arguments whose names cannot be read, and text between tags, are passed over.
        ("qwen3_coder", QWEN_A.replace("<para", "<parameter=ids: [1]\n</parameter><para"), "", A),
        ("qwen3_coder", QWEN_A.replace("<para", "<parameter=>1</parameter>so <b><para"), "", A),
        ("glm47", f"<tool_call>f<arg_key>a</arg_key>so{GLM_A}</tool_call>", "", A),
        # Cut off behind a name: what has come of the arguments.
        ("qwen3_coder", "<function=f><parameter=text>\na</para", "", [("f", '{"text": "a')]),
        ("qwen3_coder", QWEN_A[:-3], "", [("f", '{"text": "a"')]),
        ("glm47", "<tool_call>f<arg_key>number</arg_key><arg_value>5", "",
         [("f", '{"number": ')]),
        # Text without a call.
        ("glm45", "a <tool_call> tag", "a <tool_call> tag", []),
        ("glm45", "<tool_call>f\n<arg_", "<tool_call>f\n<arg_", []),
        ("glm47", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>',
         []),
        ("qwen3_coder", "a\n<tool_call>\n<tool_call>\n<function=f g>",
         "a\n<tool_call>\n<tool_call>\n<function=f g>", []),
        ("qwen3_coder", "see <function=f", "see <function=f", []),
        ("minimax_m2", '<minimax:tool_call><invoke name="f', '<minimax:tool_call><invoke name="f',
         []),
        ("minimax_m2", MINIMAX_A, MINIMAX_A, []),
    ],
)  # fmt: skip
def test_forgotten_tags_and_text_that_is_no_call(
    name: str, text: str, content: str, calls: Calls
) -> None:
    check(name, text, content, calls)
