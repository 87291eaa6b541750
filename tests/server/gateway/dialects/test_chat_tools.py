"""Grammars of tool calls: texts that they allow are read as the calls asked for, others not."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from server.gateway.dialects.chat.request import FunctionDefinition, Tool
from server.gateway.dialects.chat.tools import ToolUse, constrained
from server.gateway.grammars.structured_outputs import json_grammar, marker_terminal
from server.gateway.parsing.call_formats import (
    DEEPSEEK_V3,
    FORMATS,
    GLM45,
    GLM47,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_LIST,
    QWEN3_CODER,
    CallFormat,
)
from server.gateway.parsing.message import AnswerMessage, MessageOptions
from tests.server.gateway import named
from tests.server.gateway.fakes import backend
from tests.server.gateway.tagged import NAMES, written_call
from topspin.errors import InvalidRequest

SPECIAL = "<|im_start|>"


def tool(name: str, *, strict: bool | None = None, **extra: Any) -> Tool:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
        **extra,
    }
    return Tool(function=FunctionDefinition(name=name, parameters=schema, strict=strict))


ADD, SUB = tool("add"), tool("sub")
TAGGED = [FORMATS[name] for name in NAMES]
NAMED = [FORMATS[name] for name in named.NAMES]
WRITTEN = {
    HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    MISTRAL: '[TOOL_CALLS]add[ARGS]{"a": 1}',
    MISTRAL_LIST: '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    LLAMA3: '{"name": "add", "parameters": {"a": 1}}',
    **{tagged: written_call(tagged.name, "add", [("a", "1")]) for tagged in TAGGED},
    **{each: named.written_section(each.name, [("add", '{"a": 1}')]) for each in NAMED},
}
TWO = {
    HERMES: WRITTEN[HERMES] + "\n" + WRITTEN[HERMES],
    MISTRAL: WRITTEN[MISTRAL] * 2,
    MISTRAL_LIST: (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, '
        '{"name": "add", "arguments": {"a": 1}}]'
    ),
    LLAMA3: WRITTEN[LLAMA3] + "; " + WRITTEN[LLAMA3],
    GLM45: WRITTEN[GLM45] + "\n" + WRITTEN[GLM45],
    GLM47: WRITTEN[GLM47] * 2,
    QWEN3_CODER: WRITTEN[QWEN3_CODER] + "\n" + WRITTEN[QWEN3_CODER],
    MINIMAX_M2: re.sub("<invoke(.|\n)*</invoke>\n", r"\g<0>\g<0>", WRITTEN[MINIMAX_M2]),
    **{each: named.written_section(each.name, [("add", '{"a": 1}')] * 2) for each in NAMED},
}
EACH = pytest.mark.parametrize("calls", list(WRITTEN), ids=lambda each: each.name)


def grammar_of(calls: CallFormat, use: ToolUse, text: str = "", **reasoning: bool) -> str:
    tokens = backend()
    special = frozenset(tokens.encode(SPECIAL, add_special_tokens=False).ids)
    given = {"reasons": False, "is_inside_reasoning": False, **reasoning}
    return constrained(
        text, use, calls=calls, terminal=marker_terminal(tokens.token_to_id, special), **given
    )


@cache
def ll_tokenizer() -> LLTokenizer:
    return LLTokenizer(backend().to_str(), eos_token=backend().token_to_id(SPECIAL))


def allows(grammar: str, text: str) -> bool:
    """Return whether the grammar allows `text` as a whole answer."""
    tokenizer = ll_tokenizer()
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@EACH
def test_a_required_call_is_all_that_is_allowed(calls: CallFormat) -> None:
    grammar = grammar_of(calls, ToolUse(tools=(ADD, SUB), called=(ADD, SUB), may_call=True))
    assert allows(grammar, WRITTEN[calls])
    assert allows(grammar, WRITTEN[calls].replace("add", "sub"))
    assert allows(grammar, TWO[calls])
    for wrong in (
        "hello",
        "hello " + WRITTEN[calls],
        WRITTEN[calls].replace("add", "mul"),
        WRITTEN[calls].replace("1", '"x"'),
        re.sub('(?<=[">=])a(?=["<>])', "b", WRITTEN[calls]),
    ):
        assert not allows(grammar, wrong)
    message = AnswerMessage(MessageOptions(calls=calls, tools={"add": {}}))
    message.push(TWO[calls], is_last=True)
    assert [(call.name, call.arguments) for call in message.calls] == [("add", '{"a": 1}')] * 2
    assert message.content == ""


def test_a_forced_call_may_have_an_id_where_its_format_has_one() -> None:
    grammar = grammar_of(MISTRAL, ToolUse(tools=(ADD,), called=(ADD,), may_call=True))
    assert allows(grammar, '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}')
    assert not allows(grammar, '[TOOL_CALLS]add[CALL_ID]"[ARGS]{"a": 1}')


def test_a_forced_call_has_the_id_of_its_format_and_marks_that_are_special_tokens_by_id() -> None:
    use = ToolUse(tools=(ADD,), called=(ADD,), may_call=True)
    grammar = grammar_of(KIMI_K2, use)
    assert allows(grammar, WRITTEN[KIMI_K2].replace(":0", ":1234"))
    for wrong in ("", ":", ":x", ":12345"):
        assert not allows(grammar, WRITTEN[KIMI_K2].replace(":0", wrong))
    marks = re.findall("<[^<>]*>", WRITTEN[DEEPSEEK_V3])
    special = {mark: idx for idx, mark in enumerate(marks)}
    terminal = marker_terminal(special.get, frozenset(special.values()))
    made = constrained(
        *("", use), calls=DEEPSEEK_V3, terminal=terminal, reasons=False, is_inside_reasoning=False
    )
    rules = json.loads(made)["grammars"][0]["lark_grammar"]
    assert [int(each) for each in re.findall(r"<\[([0-9]+)\]>", rules)] == [1, 2, 3, 4, 0]


@EACH
def test_a_named_call_is_one_of_that_function(calls: CallFormat) -> None:
    use = ToolUse(tools=(ADD, SUB), called=(ADD,), is_named=True, may_call=True, only_one=True)
    grammar = grammar_of(calls, use)
    assert allows(grammar, WRITTEN[calls])
    assert not allows(grammar, WRITTEN[calls].replace("add", "sub"))
    assert not allows(grammar, TWO[calls])


@EACH
def test_where_the_model_decides_only_strict_tools_are_constrained(calls: CallFormat) -> None:
    assert grammar_of(calls, ToolUse(tools=(ADD,), may_call=True)) == ""
    use = ToolUse(tools=(tool("add", strict=True),), may_call=True)
    grammar = grammar_of(calls, use)
    assert allows(grammar, "hello")
    assert allows(grammar, WRITTEN[calls])
    if calls is not LLAMA3:
        assert allows(grammar, "So: " + WRITTEN[calls])
    wrong = WRITTEN[calls].replace("1", '"x"')
    assert not allows(grammar, wrong)
    assert grammar_of(calls, ToolUse(tools=use.tools)) == ""


@EACH
def test_an_answer_with_a_schema_is_that_or_a_call(calls: CallFormat) -> None:
    text = json_grammar({"type": "array", "items": {"type": "integer"}}, param="x")
    grammar = grammar_of(calls, ToolUse(tools=(ADD,), may_call=True), text)
    assert allows(grammar, "[1,2]")
    assert allows(grammar, WRITTEN[calls])
    assert not allows(grammar, "hello")
    forced = grammar_of(calls, ToolUse(tools=(ADD,), called=(ADD,), may_call=True), text)
    assert not allows(forced, "[1,2]")
    assert grammar_of(calls, ToolUse(), text) == text


@pytest.mark.parametrize("inner", ["start: /[0-9]+/", ""], ids=["text", "call"])
def test_reasoning_comes_before_what_is_constrained(inner: str) -> None:
    use = ToolUse() if inner else ToolUse(tools=(ADD,), called=(ADD,), may_call=True)
    answer = "42" if inner else WRITTEN[HERMES]
    opened = grammar_of(HERMES, use, inner, reasons=True, is_inside_reasoning=True)
    assert allows(opened, f"so {{\n so</think>\n\n{answer}")
    assert not allows(opened, answer)
    assert not allows(opened, f"so</think>{answer} and more")
    free = grammar_of(HERMES, use, inner, reasons=True)
    assert allows(free, answer)
    assert allows(free, f"<think>\nso</think>{answer}")
    assert not allows(free, f"so {answer}")


def test_arguments_that_the_schema_does_not_name_are_not_written_unless_it_allows_them() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner}}
    written = '<tool_call>\n{"name": "f", "arguments": {"a": {"x": 1}MORE}}\n</tool_call>'
    for extra, more, allowed in (
        ({}, "", True),
        ({}, ', "b": 1', False),
        ({"additionalProperties": True}, ', "b": 1', True),
    ):
        made = Tool(function=FunctionDefinition(name="f", parameters={**schema, **extra}))
        grammar = grammar_of(HERMES, ToolUse(tools=(made,), called=(made,), may_call=True))
        assert allows(grammar, written.replace("MORE", more)) is allowed
        assert not allows(grammar, written.replace("1}MORE", '1, "y": 2}'))


def test_markers_that_are_special_tokens_are_named_by_id() -> None:
    special = backend().token_to_id(SPECIAL)
    terminal = marker_terminal(backend().token_to_id, frozenset([special]))
    assert terminal(SPECIAL) == f"<[{special}]>"
    assert terminal('a"b') == json.dumps('a"b')


def test_a_strict_schema_that_no_grammar_has_is_refused_and_another_is_served() -> None:
    odd = {"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": {"type": "string"}}
    lenient = ToolUse(tools=(tool("add", **odd),), called=(tool("add", **odd),), may_call=True)
    assert allows(grammar_of(HERMES, lenient), WRITTEN[HERMES])
    strict = tool("add", strict=True, **odd)
    grammar = grammar_of(HERMES, ToolUse(tools=(strict,), called=(strict,), may_call=True))
    assert "unevaluatedProperties" in LLMatcher.validate_grammar(grammar)


PARAMETERS: dict[str, Any] = {
    "text": {"type": "string", "description": "any"},
    "colour": {"$ref": "#/$defs/Colour"},
    "unit": {"const": "cm"},
    "number": {"type": "number", "minimum": 0},
    "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
}
DEFINITIONS = {
    "Colour": {"type": "string", "enum": ["red", 'a "b"\n', "</b>"]},
    "Item": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
}
TEXTS = st.text(max_size=4) | st.sampled_from(["\n", "</", "</arg_value>", "</parameter>", '"\\'])


@settings(max_examples=30)
@example(calls=TAGGED[0], arguments={"text": "a", "number": 0, "name": "\x7f"}, is_strict=False)
@given(
    calls=st.sampled_from(TAGGED),
    arguments=st.fixed_dictionaries(
        {"text": TEXTS.filter(lambda text: ">" not in text), "number": st.integers(0, 99)},
        optional={
            "colour": st.sampled_from(DEFINITIONS["Colour"]["enum"]),
            "unit": st.just("cm"),
            "name": st.none() | TEXTS,
            "items": st.lists(st.fixed_dictionaries({"x": TEXTS}), max_size=2),
        },
    ),
    is_strict=st.booleans(),
)
def test_arguments_in_tags_are_read_back_as_the_grammar_has_them(
    calls: CallFormat, arguments: dict[str, Any], is_strict: bool
) -> None:
    extra = {"properties": PARAMETERS, "required": ["number", "text"], "$defs": DEFINITIONS}
    made = tool("f", strict=is_strict, **extra)
    grammar = grammar_of(calls, ToolUse(tools=(made,), called=(made,), may_call=True))

    def as_json(value: object) -> str:
        # JSON allows U+007F as it is, llguidance's JSON strings have it only as an escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    def write(given: dict[str, Any]) -> str:
        texts = {"text", "colour", "unit"}
        pairs = [
            (key, given[key] if key in texts else as_json(given[key]))
            for key in PARAMETERS
            if key in given
        ]
        return written_call(calls.name, "f", pairs)

    text = write(arguments)
    assert allows(grammar, text)
    schemas = {"f": made.function.parameters or {}}
    message = AnswerMessage(MessageOptions(calls=calls, tools=schemas))
    message.push(text, is_last=True)
    assert [json.loads(call.arguments) for call in message.calls] == [arguments]
    assert message.content == ""
    for wrong in ({"colour": "green"}, {"number": -1}, {"name": 5}, {"items": [{"x": 1}]}):
        assert not allows(grammar, write(arguments | wrong))
    assert not allows(grammar, write({key: arguments[key] for key in arguments if key != "text"}))


@pytest.mark.parametrize("calls", TAGGED, ids=lambda each: each.name)
def test_a_strict_schema_that_tags_cannot_follow_is_refused_and_else_is_served(
    calls: CallFormat,
) -> None:
    for extra in (
        {"properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"anyOf": [{"required": ["a"]}]},
    ):
        lenient, strict = (tool("add", strict=is_strict, **extra) for is_strict in (False, True))
        use = ToolUse(tools=(lenient,), called=(lenient,), may_call=True)
        assert allows(grammar_of(calls, use), WRITTEN[calls])
        with pytest.raises(InvalidRequest, match=r"`(pattern|anyOf)` in the schema of `add`"):
            grammar_of(calls, ToolUse(tools=(strict,), may_call=True))
    odd = tool("add", properties={"a<b": {}})
    with pytest.raises(InvalidRequest, match="`a<b`"):
        grammar_of(calls, ToolUse(tools=(odd,), called=(odd,), may_call=True))


@pytest.mark.parametrize("calls", TAGGED, ids=lambda each: each.name)
def test_a_schema_that_names_no_arguments_allows_any_in_tags(calls: CallFormat) -> None:
    bare = written_call(calls.name, "add", [])
    for schema, is_allowed in (
        (None, True),
        ({"$ref": "#/$defs/A"}, True),
        ({"properties": {}}, False),
        ({"additionalProperties": False}, False),
    ):
        made = Tool(function=FunctionDefinition(name="add", parameters=schema))
        grammar = grammar_of(calls, ToolUse(tools=(made,), called=(made,), may_call=True))
        assert allows(grammar, bare)
        assert allows(grammar, WRITTEN[calls]) is is_allowed


def test_tags_that_are_special_tokens_are_named_by_id_and_a_forgotten_one_hides_no_call() -> None:
    strict = tool("add", strict=True)
    special = {"</arg_value>": 7, "<tool_call>": 8}
    grammar = constrained(
        "",
        ToolUse(tools=(strict,), may_call=True),
        calls=GLM45,
        terminal=marker_terminal(special.get, frozenset(special.values())),
        reasons=False,
        is_inside_reasoning=False,
    )
    rules = json.loads(grammar)["grammars"][0]["lark_grammar"]
    assert "any_text: /(.|\\n)*/ <[7]>" in rules
    assert "FIRST (<[8]> rest text)*" in rules
    bare = WRITTEN[QWEN3_CODER].removeprefix("<tool_call>\n")
    grammar = grammar_of(QWEN3_CODER, ToolUse(tools=(strict,), may_call=True))
    assert allows(grammar, f"So: {bare}")
    assert not allows(grammar, bare.replace("1", "x"))
