"""Tools for models whose chat template shows none: a generic prompt, and calls as plain text.

Owns the prompt's words, and the text of calls and results in earlier messages. The form of calls is
Hermes', which such models have seen most. Knows no tokens; called before the template is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from models.text.chat_template import ChatTemplate
from server.gateway.dialects.chat.request import ChatBody, ChatMessage, ContentPart
from server.gateway.dialects.chat.tools import ToolUse
from server.gateway.parsing.call_formats import HermesCalls
from topspin.errors import InvalidRequest

_PROMPT = """\
You can call these functions. Each line is one of them, with the JSON schema of its arguments:
{tools}

To call one, write only this, with the function's name and its arguments as a JSON object:
{begin}
{{"name": "...", "arguments": {{...}}}}
{end}
The result of a call comes back between <tool_response> and </tool_response>. Call functions only
where they help, and otherwise answer in words."""


class ShownChat(NamedTuple):
    """Messages and tools as the template gets them; `is_generic`: tools are in the messages."""

    messages: Sequence[ChatMessage]
    tools: ToolUse
    is_generic: bool


def shown_chat(
    body: ChatBody, messages: Sequence[ChatMessage], tools: ToolUse, template: ChatTemplate
) -> ShownChat:
    """Return a chat as the template gets it, which may show no tools.

    Raises InvalidRequest for a report of where messages stand in a prompt that has them otherwise.
    """
    has_tools = tools.tools or any(each.tool_calls or each.role == "tool" for each in messages)
    if template.mentions("tools") or not has_tools:
        return ShownChat(messages, tools, is_generic=False)
    if body.report_prefix_cache:
        raise InvalidRequest(
            "`report_prefix_cache`: the model's chat template shows no tools, so that messages do "
            "not stand in the prompt as they are",
            param="report_prefix_cache",
        )
    return ShownChat(_as_text(messages, tools), ToolUse(), is_generic=True)


def _as_text(messages: Sequence[ChatMessage], tools: ToolUse) -> list[ChatMessage]:
    """Return the messages with tools, calls and results written into contents.

    The tools stand behind the first system message, or in one of their own. Results that follow
    each other become one message of the user, since templates may want turns that alternate.
    """
    shown = list(_without_roles(messages))
    described = tools.for_template()
    if described is None:
        return shown
    prompt = _PROMPT.format(
        tools="\n".join(json.dumps(each["function"], ensure_ascii=False) for each in described),
        begin=HermesCalls.begin,
        end=HermesCalls.end,
    )
    if shown and shown[0].role in ("system", "developer"):
        return [_with_text(shown[0], f"\n\n{prompt}"), *shown[1:]]
    return [ChatMessage(role="system", content=prompt), *shown]


def _without_roles(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages; an assistant's calls are its text, and results are the user's."""
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
