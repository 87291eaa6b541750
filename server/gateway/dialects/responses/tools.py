"""The tools of POST /v1/responses: functions, namespaces of them, and those that only others have.

Owns their fields, and the names by which the model sees the functions of a namespace. Knows no
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from server.gateway.bodies.decoding import decode
from server.gateway.bodies.fields import (
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    SCHEMA_REF,
    BodyFields,
    BodyReader,
    Ignored,
    ToolName,
)
from server.gateway.dialects.chat.request import FunctionDefinition, Tool
from topspin.errors import InvalidRequest


class FunctionTool(BodyFields, kw_only=True, frozen=True, tag="function"):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Ignored[bool] = None


class NamespaceTool(BodyFields, kw_only=True, frozen=True, tag="namespace"):
    """Functions with a name in common, as Codex gives them; the model sees `NAME__FUNCTION`."""

    name: ToolName
    description: Ignored[str] = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


class ToolKind(msgspec.Struct, frozen=True):
    """What is looked at first in a tool."""

    type: str


# Tools that a server would run, or that are no functions; left out where the model may do without.
BUILT_IN_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
_ToolList = Annotated[list[Raw], Meta(max_length=MAX_TOOLS)]
NAMESPACE_MARK = "__"
"""Between a namespace and a function's name, as the model sees them."""


ServedTool = FunctionTool | NamespaceTool
_SERVED: Any = ServedTool
TOOLS = (FunctionTool, NamespaceTool)
TOOLS_SCHEMA: dict[str, object] = {
    "anyOf": [
        {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "anyOf": [
                    *({"$ref": SCHEMA_REF.format(name=each.__name__)} for each in TOOLS),
                    {
                        "type": "object",
                        "properties": {"type": {"enum": sorted(BUILT_IN_TOOLS)}},
                        "required": ["type"],
                    },
                ]
            },
        },
        {"type": "null"},
    ]
}


def served_tools(data: Raw, reader: BodyReader, *, may_choose: bool) -> list[ServedTool]:
    """Return the functions in `data`, a list or null; raises InvalidRequest.

    Other tools are named as ignored where the model `may_choose` to do without.
    """
    given = [] if bytes(data) == b"null" else decode(data, _ToolList, param="tools")
    kept: list[ServedTool] = []
    for idx, tool in enumerate(given):
        kind = decode(tool, ToolKind, param=f"tools[{idx}]").type
        if kind in BUILT_IN_TOOLS and may_choose:
            reader.ignored[f"tools.{kind}"] = None
        elif kind in BUILT_IN_TOOLS:
            raise InvalidRequest(
                f"`tools[{idx}]`: this server runs no `{kind}`; it is ignored where `tool_choice` "
                "is auto",
                param=f"tools[{idx}].type",
            )
        else:
            kept.append(reader.read(tool, _SERVED, param=f"tools[{idx}]", shown="tools."))
    return kept


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it; raises InvalidRequest if it is long."""
    flat = name if namespace is None else f"{namespace}{NAMESPACE_MARK}{name}"
    if len(flat) > MAX_TOOL_NAME_CHARS:
        raise InvalidRequest(
            f"`tools`: a function has at most {MAX_TOOL_NAME_CHARS} characters in its name, with "
            f"that of its namespace and `{NAMESPACE_MARK}` between them",
            param="tools",
        )
    return flat


def places_of(tools: Sequence[ServedTool]) -> dict[str, tuple[str, str]]:
    """Return the namespaces and names of functions by the names that the model sees."""
    return {
        flat_name(tool.name, each.name): (tool.name, each.name)
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for each in tool.tools
    }


def functions_of(tool: ServedTool) -> list[Tool]:
    """Return the functions of a tool, under the names that the model sees."""
    namespace, functions = None, [tool] if isinstance(tool, FunctionTool) else tool.tools
    if isinstance(tool, NamespaceTool):
        namespace = tool.name
    return [
        Tool(
            function=FunctionDefinition(
                name=flat_name(namespace, each.name),
                description=each.description,
                parameters=each.parameters,
                strict=each.strict,
            )
        )
        for each in functions
    ]
