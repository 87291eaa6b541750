"""Grammars of calls that mark each argument by tags.

Owns their Lark, and the refusal of schemas that it cannot follow: a string's text ends at the first
closing tag, and has its `enum` or any form; other values are JSON that follows its schema. The tags
and what is read of them are server.gateway.parsing.tagged_calls'. Called by
server.gateway.dialects.chat.tools. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

from server.gateway.dialects.chat.request import FunctionDefinition
from server.gateway.errors import truncated
from server.gateway.grammars.json_schemas import TEXT, closed, required_names, resolved
from server.gateway.grammars.structured_outputs import WHITESPACE, Terminal, in_turn, quoted
from server.gateway.parsing.tagged_calls import CallTags, is_key, parameter_types
from topspin.errors import InvalidRequest

# What the schema of a strict function may have: as a whole, and of an argument that is text.
_NOTES: Final = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_DEFINITIONS: Final = ("$defs", "definitions")
_FOLLOWED: Final = _NOTES.union(
    ("type", "properties", "required", "additionalProperties", "$schema", "$id"), _DEFINITIONS
)
_FOLLOWED_BY_TEXT: Final = _NOTES.union(("type", "enum", "const"))
_ANY_KEY: Final = r'/[^<>" \t\r\n]+/'


class TaggedGrammar:
    """The rules of calls in these tags; `terminal` gives the Lark of a marker."""

    def __init__(self, tags: CallTags, terminal: Terminal) -> None:
        self._tags = tags
        self._terminal = terminal
        self._sequence = partial(in_turn, terminal)

    def block(self, *, only_one: bool) -> list[str]:
        """Return the rules around `call`; `rest` follows the last tag that begins a call in text.

        `any_text`: a value of any text, with the tag behind it.
        """
        tags = self._tags
        before = [part for tag in tags.begins[:-1] for part in (tag, tags.between)]
        # The name's tag has been read where it begins a call in text.
        first = tags.between if tags.name[0] and not before else ""
        several = "call" if only_one or not tags.holds_several else "call+"
        one = self._sequence(*before, tags.begins[-1])
        more = "" if only_one or tags.holds_several else f"({self._sequence(tags.between)} one)*"
        close = self._terminal(tags.value[1])
        lazy = "" if close.startswith("<[") else "[lazy]"
        return [
            f"any_text{lazy}: /(.|\\n)*/ {close}",
            f"rest: {self._sequence(first)} {several} {self._sequence(tags.end)}",
            f"one: {one} rest",
            f"calls: one {more}",
        ]

    def call(self, rule: str, function: FunctionDefinition) -> list[str]:
        """Return the rules of a call: the arguments that the schema names, in its order.

        A schema that names none allows any, unless it says otherwise. Raises InvalidRequest for
        arguments that tags cannot mark, and for a strict function whose schema is not followed.
        """
        tags, schema = self._tags, closed(function.parameters or {})
        named, required = schema.get("properties"), required_names(schema)
        rules, arguments = [], []
        if function.strict:
            _refuse(function, schema.keys() - _FOLLOWED)
        if isinstance(named, dict):
            missing = dict.fromkeys((each for each in required if each not in named), True)
            for idx, (name, part) in enumerate({**named, **missing}.items()):
                _refuse(function, () if is_key(name) else (name,))
                if parameter_types(schema, name) == TEXT:
                    value = self._text(function, resolved(schema, part))
                else:
                    value = self._value(f"{rule}_{idx}")
                    rules.append(f"{rule}_{idx}: %json {_json_schema(function, part, schema)}")
                optional = "" if name in required else "?"
                arguments.append(f"({self._argument(quoted(name), value)}){optional}")
        elif (others := schema.get("additionalProperties", True)) is not False:
            if function.strict and others is not True:
                _refuse(function, ("additionalProperties",))
            arguments.append(f"({self._argument(_ANY_KEY, 'any_text')})*")
        begin = tags.name[0] if tags.name[0] != tags.begins[-1] else ""
        head = self._sequence(begin, function.name, tags.name[1], tags.between)
        end = self._sequence(tags.call_end, tags.between if tags.call_end else "")
        return [*rules, f"{rule}: {head} {' '.join(arguments)} {end}"]

    def _argument(self, key: str, value: str) -> str:
        """Return the Lark of an argument by that of its name, and of its value up to its end."""
        tags = self._tags
        between = tags.between if tags.value[0] else ""
        opened = self._sequence(tags.key[1], between, tags.value[0])
        return (
            f"{self._sequence(tags.key[0])} {key} {opened} {value} {self._sequence(tags.between)}"
        )

    def _value(self, lark: str) -> str:
        line_break = self._tags.value_break
        end = self._sequence(line_break, self._tags.value[1])
        return f"{self._sequence(line_break)} {lark} {end}"

    def _text(self, function: FunctionDefinition, schema: Mapping[str, Any]) -> str:
        """Return the Lark of a string's text; raises InvalidRequest as `call`."""
        if function.strict:
            _refuse(function, schema.keys() - _FOLLOWED_BY_TEXT)
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        texts = [quoted(each) for each in allowed or () if isinstance(each, str)]
        return self._value(f"({' | '.join(texts)})") if texts else "any_text"


def _json_schema(function: FunctionDefinition, part: object, root: Mapping[str, Any]) -> str:
    """Return the JSON of an argument's schema, with what it refers to in that of all."""
    schema: dict[str, Any] = part if isinstance(part, dict) else {}
    if '"$ref"' in json.dumps(schema):
        schema = {**{name: root[name] for name in _DEFINITIONS if name in root}, **schema}
    options = {"lenient": not function.strict, "whitespace_pattern": WHITESPACE}
    return json.dumps({**schema, "x-guidance": options})


def _refuse(function: FunctionDefinition, names: Collection[str]) -> None:
    if names:
        raise InvalidRequest(
            f"`tools`: the form of the model's calls has no place for "
            f"`{truncated(min(names), 64)}` in the schema of `{function.name}`",
            param="tools",
        )
