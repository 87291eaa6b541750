"""The grammars that make a model call tools as a request asks for.

Owns the translation of tools to llguidance's Lark, in each format of calls: `tool_choice` required
or named makes the answer calls and nothing else; functions that are `strict` get arguments that
follow their schemas, if the model decides to call them; an answer with a grammar of its own is
either that or calls. Reasoning before the answer is left free. Pure; the grammar is checked by
server.gateway.grammars.structured_outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from server.gateway.dialects.chat.request import Tool
from server.gateway.dialects.chat.tools import ToolUse
from server.gateway.grammars.json_schemas import closed
from server.gateway.grammars.structured_outputs import WHITESPACE, checked_grammar
from server.gateway.parsing.call_formats import HERMES, LLAMA3, CallFormat, MistralCalls
from server.gateway.parsing.reasoning import BEGIN, END

Terminal = Callable[[str], str]


def constrained(
    grammar: str,
    use: ToolUse,
    *,
    calls: CallFormat | None,
    terminal: Terminal,
    reasons: bool,
    is_inside_reasoning: bool,
    is_behind_reasoning: bool = False,
) -> str:
    """Return the grammar of an answer with these tools, empty if it may be any text.

    `grammar` is that of the answer's text, empty if any text will do. `terminal` gives the Lark of
    a marker, which may be a special token. `reasons`: the model may reason before it answers,
    unless `is_behind_reasoning`: it has, or is told not to. Raises InvalidRequest for schemas that
    cannot be served.
    """
    rules: list[str] = []
    must_call = bool(use.called)
    is_strict = any(tool.function.strict for tool in use.tools)
    if calls is not None and use.may_call and (must_call or is_strict or grammar):
        rules = _calls(calls, use, terminal)
        if must_call:
            rules.append("answer: calls")
        elif grammar:
            rules.append("answer: calls | @text")
        else:
            rules += _text_and_calls(calls, terminal, is_answer=reasons and is_behind_reasoning)
    elif grammar:
        rules.append("answer: @text")
    else:
        return ""
    reasons = reasons and not is_behind_reasoning
    if not reasons and rules == ["answer: @text"]:
        return grammar
    rules += _beginning(terminal, reasons=reasons, is_inside=is_inside_reasoning)
    top = {"name": "top", "lark_grammar": "\n".join(rules)}
    text = [] if must_call or not grammar else [_named_text(grammar)]
    return checked_grammar(json.dumps({"grammars": [top, *text]}), param="tools")


def marker_terminal(token_id: Callable[[str], int | None], special: frozenset[int]) -> Terminal:
    """Return the Lark of markers for a tokenizer: special tokens have no text in a grammar."""

    def terminal(marker: str) -> str:
        found = token_id(marker)
        return f"<[{found}]>" if found in special else _quoted(marker)

    return terminal


def _beginning(terminal: Terminal, *, reasons: bool, is_inside: bool) -> list[str]:
    if not reasons:
        return ["start: answer"]
    # A lazy rule ends at its first possible end: reasoning cannot contain its own end mark.
    thought = ["thought[lazy]: /(.|\\n)*/ " + terminal(END), "blank: /\\n{0,2}/"]
    if terminal(END).startswith("<["):
        thought[0] = f"thought: /(.|\\n)*/ {terminal(END)}"
    if is_inside:
        return [*thought, "start: thought blank answer"]
    opened = f"start: blank {terminal(BEGIN)} thought blank answer | answer"
    return [*thought, opened]


def _calls(calls: CallFormat, use: ToolUse, terminal: Terminal) -> list[str]:
    """Return the rules of `calls`: one call or more of the tools that may be called."""
    tools: Sequence[Tool] = use.called or use.tools
    names = [f"call_{idx}" for idx in range(len(tools))]
    rules = [f"call: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        rules.append(f"{name}: {_call(calls, tool, f'{name}_arguments', terminal)}")
        rules.append(f"{name}_arguments: %json {json.dumps(_schema(tool))}")
    if calls is HERMES:
        rest, more = f'"\\n" call "\\n" {terminal(calls.end)}', '("\\n" one)*'
    elif calls is LLAMA3:
        rest, more = "call", '("; " one)*'
    elif calls.writes_names:
        rest, more = "call", "one*"
    else:
        several = "call" if use.only_one else 'call (", " call)*'
        rest, more = f'" [" {several} "]"', ""
    begin = "" if calls is LLAMA3 else terminal(calls.begin)
    last = "" if use.only_one else more
    return [*rules, f"rest: {rest}", f"one: {begin} rest", f"calls: one {last}"]


def _call(calls: CallFormat, tool: Tool, arguments: str, terminal: Terminal) -> str:
    name = tool.function.name
    if calls.writes_names:
        call_id = f"({terminal(MistralCalls.id_marker)} /[a-zA-Z0-9]{{9}}/)?"
        return f"{_quoted(name)} {call_id} {terminal(MistralCalls.separator)} {arguments}"
    key = "parameters" if calls is LLAMA3 else "arguments"
    head = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{_quoted(head)} {arguments} "}}"'


def _text_and_calls(calls: CallFormat, terminal: Terminal, *, is_answer: bool) -> list[str]:
    """Return the rules of an answer of text and calls, where the model decides.

    `is_answer`: its text does not begin as reasoning.
    """
    limit = f" & ~/\\s*{BEGIN}(.|\\n)*/" if is_answer else ""
    if calls is LLAMA3:
        # Its calls have no marker: an answer that begins as an object is a call.
        return ["answer: calls | OTHER", f"OTHER: /[^{{](.|\\n)*/{limit}"]
    begin = terminal(calls.begin)
    texts = [f"FIRST: /(.|\\n)*/{limit}", "text: /(.|\\n)*/"]
    if begin.startswith("<["):
        return [*texts, f"answer: FIRST ({begin} rest text)*"]
    opened = [f"first[lazy]: FIRST {begin}", f"opened[lazy]: /(.|\\n)*/ {begin}"]
    return [*texts, *opened, "answer: FIRST | first rest (opened rest)* text"]


def _schema(tool: Tool) -> dict[str, Any]:
    """Return a tool's schema; keywords that no grammar has are left out unless it is `strict`."""
    options = {"lenient": not tool.function.strict, "whitespace_pattern": WHITESPACE}
    parameters = closed(tool.function.parameters or {})
    return {**parameters, "type": "object", "x-guidance": options}


def _named_text(grammar: str) -> dict[str, Any]:
    """Return the grammar of the answer's text as one that others name `@text`."""
    try:
        [inner] = json.loads(grammar)["grammars"]
    except ValueError:
        inner = {"lark_grammar": grammar}
    return {**inner, "name": "text"}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
