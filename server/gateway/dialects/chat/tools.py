"""The tools of a chat request: checks, and their form in the prompt.

Owns the rules between `tools`, `tool_choice` and the formats that the served model writes, and the
canonical order of a tool's JSON: clients that send the keys of the same schema in another order
share the cached prefix. Knows no tokens; the text of calls is server.gateway.parsing's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from models.text.chat_template import ChatTemplate
from server.gateway.bodies.decoding import check_depth
from server.gateway.dialects.chat.request import ChatBody, NamedToolChoice, Tool
from server.gateway.errors import truncated
from server.gateway.parsing.formats import MessageFormats
from topspin.errors import InvalidRequest

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
    def names(self) -> Collection[str]:
        """Return the names of all tools."""
        return {tool.function.name for tool in self.tools}

    def for_template(self) -> list[Mapping[str, object]] | None:
        """Return the tools as templates expect them, None if there are none.

        Raises InvalidRequest for a schema that is nested too deeply.
        """
        return [_plain_tool(tool, idx) for idx, tool in enumerate(self.tools)] or None


def tool_use(body: ChatBody, *, template: ChatTemplate, formats: MessageFormats) -> ToolUse:
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
    if not template.mentions("tools"):
        raise InvalidRequest("the model's chat template shows no tools", param="tools")
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
