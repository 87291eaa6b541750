"""Tools for models whose chat template shows none: a generic prompt, and calls as plain text.

Owns the prompt's words, and the text of calls and results in earlier messages. The form of calls is
Hermes', which such models have seen most. Templates that show calls but no tools, as DeepSeek's,
keep their own form, and write earlier calls and results. Knows no tokens; called before the
template is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from models.text.chat_template import ChatTemplate
from server.gateway.dialects.chat.request import ChatBody, ChatMessage, ContentPart
from server.gateway.dialects.chat.tools import ToolUse
from server.gateway.parsing.call_formats import CallFormat, HermesCalls
from topspin.errors import InvalidRequest

_PROMPT = """\
You can call these functions. Each line is one of them, with the JSON schema of its arguments:
{tools}

To call one, write only this, with the function's name and its arguments as a JSON object:
{call}
{results}Call functions only where they help, and otherwise answer in words."""
_CALL = f"""\
{HermesCalls.begin}
{{"name": "...", "arguments": {{...}}}}
{HermesCalls.end}"""
_RESULTS = "The result of a call comes back between <tool_response> and </tool_response>.\n"


class ShownChat(NamedTuple):
    """Messages and tools as the template gets them; `is_generic`: tools are in the messages."""

    messages: Sequence[ChatMessage]
    tools: ToolUse
    is_generic: bool


def shown_chat(
    body: ChatBody,
    messages: Sequence[ChatMessage],
    tools: ToolUse,
    template: ChatTemplate,
    *,
    calls: CallFormat | None,
) -> ShownChat:
    """Return a chat as the template gets it, which may show no tools; `calls`: the model's form.

    Raises InvalidRequest for a report of where messages stand in a prompt that has them otherwise.
    """
    marks = calls.marks if calls and template.mentions("tool_calls") else None
    has_tools = tools.tools or (
        marks is None and any(each.tool_calls or each.role == "tool" for each in messages)
    )
    if template.mentions("tools") or not has_tools:
        return ShownChat(messages, tools, is_generic=False)
    if body.report_prefix_cache:
        raise InvalidRequest(
            "`report_prefix_cache`: the model's chat template shows no tools, so that messages do "
            "not stand in the prompt as they are",
            param="report_prefix_cache",
        )
    if marks is not None:
        shown = _with_tools(messages, tools, marks.written("NAME", "{...}"), "")
    else:
        shown = _with_tools(list(_without_roles(messages)), tools, _CALL, _RESULTS)
    return ShownChat(shown, ToolUse(), is_generic=True)


def _with_tools(
    shown: Sequence[ChatMessage], tools: ToolUse, call: str, results: str
) -> Sequence[ChatMessage]:
    """Return the messages with tools, behind the first system message or in one of their own.

    `call` is the text of one, `results` says what those are.
    """
    described = tools.for_template()
    if described is None:
        return shown
    prompt = _PROMPT.format(
        tools="\n".join(json.dumps(each["function"], ensure_ascii=False) for each in described),
        call=call,
        results=results,
    )
    if shown and shown[0].role in ("system", "developer"):
        return [_with_text(shown[0], f"\n\n{prompt}"), *shown[1:]]
    return [ChatMessage(role="system", content=prompt), *shown]


def _without_roles(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages; an assistant's calls are its text, and results are the user's.

    Results that follow each other become one message, since templates may want turns that
    alternate.
    """
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{_text(message)}\n</tool_response>")
            continue
        if results:
            yield ChatMessage(role="user", content="\n".join(results))
            results = []
        if message.role == "assistant" and message.tool_calls:
            calls = (
                f'{HermesCalls.begin}\n{{"name": {json.dumps(each.function.name)}, '
                f'"arguments": {each.function.arguments.strip() or "{}"}}}\n{HermesCalls.end}'
                for each in message.tool_calls
            )
            text = "\n".join([*([said] if (said := _text(message)) else []), *calls])
            message = msgspec.structs.replace(message, content=text, tool_calls=None)
        yield message
    if results:
        yield ChatMessage(role="user", content="\n".join(results))


def _text(message: ChatMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "\n".join(part.text or "" for part in message.content)


def _with_text(message: ChatMessage, more: str) -> ChatMessage:
    content = message.content or ""
    if isinstance(content, str):
        return msgspec.structs.replace(message, content=content + more)
    part = ContentPart(type="text", text=more.lstrip())
    return msgspec.structs.replace(message, content=[*content, part])
