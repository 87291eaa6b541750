"""Grammars of answers in channels: forced calls, strict arguments, and the form of the last text.

Owns their Lark. Reasoning before what is constrained stays free; an answer that the client has
begun goes on from there. The form and what is read of it are server.gateway.parsing.channels'.
Called by server.gateway.dialects.chat.dialect. Pure.
"""

from __future__ import annotations

import json

from server.gateway.dialects.chat.tools import ToolUse, call_schema, named_text
from server.gateway.grammars.structured_outputs import Terminal, checked_grammar, quoted
from server.gateway.parsing.channels import (
    ASSISTANT,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    START,
)
from server.gateway.parsing.message import AnswerMessage


def constrained_channels(
    grammar: str, use: ToolUse, begun: AnswerMessage, *, terminal: Terminal
) -> str:
    """Return the grammar of an answer with these tools, empty if it may be any text.

    `grammar` is that of the answer's text, empty if any text will do; `begun` the answer as far as
    the prompt has it. Raises InvalidRequest for schemas that cannot be served.
    """
    must_call, is_strict = bool(use.called), any(tool.function.strict for tool in use.tools)
    is_content = begun.place != "undecided" and not begun.is_inside_reasoning
    if must_call:
        grammar = ""
    elif grammar and is_content:
        return grammar
    has_calls = use.may_call and bool(must_call or is_strict or (grammar and use.tools))
    if not has_calls and not grammar:
        return ""
    if must_call or grammar:
        answers = [name for name, has in (("calls", has_calls), ("final", grammar)) if has]
        rules = [f"messages: (analysis next)* ({' | '.join(answers)})"]
    elif use.only_one:
        rules = ["messages: (free next)* (call | free)"]
    else:
        rules = ["messages: (either next)* either", "either: call | free"]
    if begun.place == "undecided":
        rules.append("start: messages")
    else:
        rules.append(f"start: TEXT next messages {'' if must_call or grammar else '| TEXT'}")
    channel, message = terminal(CHANNEL), terminal(MESSAGE)
    rules += [
        "TEXT: /(.|\\n)*/",
        f"next: {terminal(END)} {terminal(START)} {quoted(ASSISTANT)}",
        f'analysis: {channel} "analysis" {message} TEXT',
        f'free: {channel} ("analysis" | "commentary" | "final") form TEXT',
        f'form: (" "? {terminal(CONSTRAIN)} "json" | " json")? {message}',
        *(_calls(use, terminal) if has_calls else ()),
    ]
    texts = []
    if grammar:
        rules.append(f'final: {channel} "final" form @text')
        texts.append(named_text(grammar))
    top = {"name": "top", "lark_grammar": "\n".join(rules)}
    return checked_grammar(json.dumps({"grammars": [top, *texts]}), param="tools")


def _calls(use: ToolUse, terminal: Terminal) -> list[str]:
    """Return the rules of `call`, and of `calls`: as many as there may be."""
    rules, names = [], []
    for idx, tool in enumerate(use.called or use.tools):
        name = f"call_{idx}"
        names.append(name)
        recipient = quoted(f"commentary to={FUNCTIONS}{tool.function.name}")
        rules.append(f"{name}: {terminal(CHANNEL)} {recipient} form {name}_arguments")
        rules.append(f"{name}_arguments: %json {json.dumps(call_schema(tool))}")
    several = "" if use.only_one else "(next (analysis next)* call)*"
    return [*rules, f"call: {' | '.join(names)}", f"calls: call {several}"]
