"""The tools of a chat request: checks, their form in the prompt, and grammars that force calls.

Owns the rules between `tools`, `tool_choice` and the formats that the served model writes, and the
canonical order of a tool's JSON: clients that send the keys of the same schema in another order
share the cached prefix.

Owns the translation of tools to llguidance's Lark, in each format of calls: `tool_choice` required
or named makes the answer calls and nothing else; functions that are `strict` get arguments that
follow their schemas, if the model decides to call them; an answer with a grammar of its own is
either that or calls. Reasoning before the answer is left free. The grammar is checked by
server.gateway.grammars.structured_outputs. Pure; the text of calls is server.gateway.parsing's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from server.gateway.bodies.decoding import check_depth
from server.gateway.dialects.chat.request import ChatBody, NamedToolChoice, Tool
from server.gateway.dialects.chat.tagged_grammar import TaggedGrammar
from server.gateway.errors import truncated
from server.gateway.grammars.json_schemas import closed
from server.gateway.grammars.structured_outputs import (
    WHITESPACE,
    Terminal,
    checked_grammar,
    in_turn,
    quoted,
)
from server.gateway.parsing.call_formats import HERMES, LLAMA3, CallFormat
from server.gateway.parsing.formats import MessageFormats
from server.gateway.parsing.named_calls import CallMarks
from server.gateway.parsing.reasoning import BEGIN, END
from topspin.errors import InvalidRequest

# A larger budget bounds nothing: an answer is cut by its length before.
MAX_THOUGHT_TOKENS = 2**15
# Keys of a schema that models read best first; the others follow in alphabetical order.
_FIRST_KEYS = ("type", "title", "description", "enum", "const", "properties", "required", "items")
_NAME_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """The tools of a request that may be called.

    `called` are those of which one must be called; empty: the model decides.
    """

    tools: tuple[Tool, ...] = ()
    called: tuple[Tool, ...] = ()
    is_named: bool = False
    may_call: bool = False
    only_one: bool = False

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the JSON schemas of all tools' arguments, by the tools' names."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    def for_template(self) -> list[Mapping[str, object]] | None:
        """Return the tools as templates expect them, None if there are none.

        Raises InvalidRequest for a schema that is nested too deeply.
        """
        return [_plain_tool(tool, idx) for idx, tool in enumerate(self.tools)] or None


def tool_use(body: ChatBody, *, formats: MessageFormats) -> ToolUse:
    """Return the tools of a request; raises InvalidRequest for what cannot be done with them."""
    tools, choice = tuple(body.tools or ()), body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("`tool_choice` needs `tools`", param="tool_choice")
        return ToolUse()
    names = [tool.function.name for tool in tools]
    for idx, name in enumerate(names):
        if name in names[:idx]:
            raise InvalidRequest(f"two `tools` are called `{name}`", param=f"tools[{idx}]")
    if choice != "none" and formats.calls is None:
        raise InvalidRequest(
            "this server does not know the format in which the model calls tools; "
            "--tool-call-parser names it",
            param="tools",
        )
    if choice in (None, "auto") and not formats.chooses:
        raise InvalidRequest(
            "`tool_choice`: this server was started with --no-enable-auto-tool-choice, so that "
            "only none, required or a named function are served",
            param="tool_choice",
        )
    called: tuple[Tool, ...] = tools if choice == "required" else ()
    if isinstance(choice, NamedToolChoice):
        called = tuple(tool for tool in tools if tool.function.name == choice.function.name)
        if not called:
            raise InvalidRequest(
                f"`tool_choice`: no tool is called `{truncated(choice.function.name, 64)}`",
                param="tool_choice",
            )
    return ToolUse(
        tools=tools,
        called=called,
        is_named=isinstance(choice, NamedToolChoice),
        may_call=choice != "none",
        only_one=body.parallel_tool_calls is False or isinstance(choice, NamedToolChoice),
    )


def _plain_tool(tool: Tool, idx: int) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    if tool.function.parameters is not None:
        check_depth(tool.function.parameters, param=f"tools[{idx}].function.parameters")
        function["parameters"] = canonical_schema(tool.function.parameters)
    return {"type": "function", "function": function}


def canonical_schema(value: Any, *, is_name_map: bool = False) -> Any:
    """Return a JSON schema with its keys in an order that depends on the schema alone.

    `is_name_map`: the keys are names that the client chose. A list keeps its order, apart from the
    names in `required`.
    """
    if isinstance(value, dict):
        keys = sorted(value)
        if not is_name_map:
            keys = [key for key in _FIRST_KEYS if key in value]
            keys += sorted(set(value) - set(_FIRST_KEYS))
        return {
            key: _canonical_required(value[key])
            if key == "required" and not is_name_map
            else canonical_schema(value[key], is_name_map=key in _NAME_MAPS and not is_name_map)
            for key in keys
        }
    if isinstance(value, list):
        return [canonical_schema(item) for item in value]
    return value


def _canonical_required(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return sorted(value)
    return value


class ThoughtBudget(NamedTuple):
    """The most tokens of reasoning, and the tokens that begin and end it."""

    num_tokens: int
    begin_id: int
    end_id: int

    @classmethod
    def of(
        cls,
        asked: int | None,
        formats: MessageFormats,
        token_id: Callable[[str], int | None],
        *,
        is_wish: bool,
    ) -> ThoughtBudget | None:
        """Return what `thinking_token_budget` asks for, None if nothing.

        Raises InvalidRequest if no grammar can keep it, unless it `is_wish`: some clients send one
        to any model.
        """
        if asked in (None, -1) or asked is None or not formats.reasons:
            return None
        begin_id, end_id = token_id(BEGIN), token_id(END)
        if formats.has_channels or begin_id is None or end_id is None:
            if is_wish:
                return None
            reason = "in channels" if formats.has_channels else "in marks of several tokens"
            raise InvalidRequest(
                f"`thinking_token_budget`: this model reasons {reason}, which no grammar bounds",
                param="thinking_token_budget",
            )
        if asked > MAX_THOUGHT_TOKENS:
            return None
        return cls(asked, begin_id, end_id)


def constrained(
    grammar: str,
    use: ToolUse,
    *,
    calls: CallFormat | None,
    terminal: Terminal,
    reasons: bool,
    is_inside_reasoning: bool,
    is_behind_reasoning: bool = False,
    budget: ThoughtBudget | None = None,
) -> str:
    """Return the grammar of an answer with these tools, empty if it may be any text.

    `grammar` is that of the answer's text, empty if any text will do. `terminal` gives the Lark of
    a marker, which may be a special token. `reasons`: the model may reason before it answers,
    unless `is_behind_reasoning`: it has, or is told not to; `budget` bounds its reasoning. Raises
    InvalidRequest for schemas that cannot be served.
    """
    rules: list[str] = []
    is_answer = reasons and is_behind_reasoning
    reasons = reasons and not is_behind_reasoning
    must_call = bool(use.called)
    is_strict = any(tool.function.strict for tool in use.tools)
    if calls is not None and use.may_call and (must_call or is_strict or grammar):
        rules = _calls(calls, use, terminal)
        if must_call:
            rules.append("answer: calls")
        elif grammar:
            rules.append("answer: calls | @text")
        else:
            rules += _text_and_calls(calls, terminal, is_answer=is_answer)
    elif grammar:
        rules.append("answer: @text")
    elif budget is not None and reasons:
        rules.append(f"answer: <[^{budget.begin_id}]>*")  # whatever it is, no more reasoning
    else:
        return ""
    if not reasons and rules == ["answer: @text"]:
        return grammar
    rules += _beginning(terminal, reasons=reasons, is_inside=is_inside_reasoning, budget=budget)
    top = {"name": "top", "lark_grammar": "\n".join(rules)}
    text = [] if must_call or not grammar else [named_text(grammar)]
    return checked_grammar(json.dumps({"grammars": [top, *text]}), param="tools")


def _beginning(
    terminal: Terminal, *, reasons: bool, is_inside: bool, budget: ThoughtBudget | None
) -> list[str]:
    if not reasons:
        return ["start: answer"]
    # A lazy rule ends at its first possible end: reasoning cannot contain its own end mark.
    thought = ["thought[lazy]: /(.|\\n)*/ " + terminal(END), "blank: /\\n{0,2}/"]
    if terminal(END).startswith("<["):
        thought[0] = f"thought: /(.|\\n)*/ {terminal(END)}"
    if budget is not None:
        free = f"<[^{budget.end_id}]>{{0,{budget.num_tokens}}}" if budget.num_tokens else ""
        thought[0] = f"thought: {free} <[{budget.end_id}]>"
    if is_inside:
        return [*thought, "start: thought blank answer"]
    opened = f"start: blank {terminal(BEGIN)} thought blank answer | answer"
    return [*thought, opened]


def _calls(calls: CallFormat, use: ToolUse, terminal: Terminal) -> list[str]:
    """Return the rules of `calls`: one call or more of the tools that may be called."""
    tools: Sequence[Tool] = use.called or use.tools
    names = [f"call_{idx}" for idx in range(len(tools))]
    rules = [f"call: {' | '.join(names)}"]
    if calls.tags is not None:
        tagged = TaggedGrammar(calls.tags, terminal)
        for name, tool in zip(names, tools, strict=True):
            rules += tagged.call(name, tool.function)
        return [*rules, *tagged.block(only_one=use.only_one)]
    for name, tool in zip(names, tools, strict=True):
        rules.append(f"{name}: {_call(calls, tool, f'{name}_arguments', terminal)}")
        rules.append(f"{name}_arguments: %json {json.dumps(call_schema(tool))}")
    if calls is HERMES:
        rest, more = f'"\\n" call "\\n" {terminal(calls.end)}', '("\\n" one)*'
    elif calls is LLAMA3:
        rest, more = "call", '("; " one)*'
    elif calls.marks is not None:
        rest, more = _section(calls.marks, terminal, only_one=use.only_one)
    else:
        several = "call" if use.only_one else 'call (", " call)*'
        rest, more = f'" [" {several} "]"', ""
    begin = "" if calls is LLAMA3 else terminal(calls.begin)
    last = "" if use.only_one else more
    return [*rules, f"rest: {rest}", f"one: {begin} rest", f"calls: one {last}"]


def _section(marks: CallMarks, terminal: Terminal, *, only_one: bool) -> tuple[str, str]:
    """Return the Lark of what follows the mark of a section, and of more sections."""
    if not marks.holds_several:
        return "call", "one*"
    more = "" if only_one else f"({in_turn(terminal, marks.between)} call)*"
    return f"call {more} {in_turn(terminal, marks.section[1])}", ""


def _call(calls: CallFormat, tool: Tool, arguments: str, terminal: Terminal) -> str:
    name, marks = tool.function.name, calls.marks
    if marks is not None:
        number = "/:[0-9]{1,4}/" if marks.is_numbered else ""
        if marks.id_mark:
            number = f"({terminal(marks.id_mark)} /[a-zA-Z0-9]{{9}}/)?"
        head, tail = in_turn(terminal, *marks.before, name), in_turn(terminal, *marks.behind)
        return f"{head} {number} {in_turn(terminal, *marks.after)} {arguments} {tail}"
    key = "parameters" if calls is LLAMA3 else "arguments"
    head = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{quoted(head)} {arguments} "}}"'


def _text_and_calls(calls: CallFormat, terminal: Terminal, *, is_answer: bool) -> list[str]:
    """Return the rules of an answer of text and calls, where the model decides.

    `is_answer`: its text does not begin as reasoning.
    """
    limit = f" & ~/\\s*{BEGIN}(.|\\n)*/" if is_answer else ""
    if calls is LLAMA3:
        # Its calls have no marker: an answer that begins as an object is a call.
        return ["answer: calls | OTHER", f"OTHER: /[^{{](.|\\n)*/{limit}"]
    begin = terminal(calls.tags.begins[-1] if calls.tags else calls.begin)
    texts = [f"FIRST: /(.|\\n)*/{limit}", "text: /(.|\\n)*/"]
    if begin.startswith("<["):
        return [*texts, f"answer: FIRST ({begin} rest text)*"]
    opened = [f"first[lazy]: FIRST {begin}", f"opened[lazy]: /(.|\\n)*/ {begin}"]
    return [*texts, *opened, "answer: FIRST | first rest (opened rest)* text"]


def call_schema(tool: Tool) -> dict[str, Any]:
    """Return a tool's schema; keywords that no grammar has are left out unless it is `strict`."""
    options = {"lenient": not tool.function.strict, "whitespace_pattern": WHITESPACE}
    parameters = closed(tool.function.parameters or {})
    return {**parameters, "type": "object", "x-guidance": options}


def named_text(grammar: str) -> dict[str, Any]:
    """Return the grammar of the answer's text as one that others name `@text`."""
    try:
        [inner] = json.loads(grammar)["grammars"]
    except ValueError:
        inner = {"lark_grammar": grammar}
    return {**inner, "name": "text"}
