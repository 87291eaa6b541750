"""JSON schemas before they become grammars: where they have schemas, and closed objects.

Owns the table of keywords whose values are schemas, the decision which objects have only the
members that a schema names, and the types that a value may have. Other values (`const`, `default`,
`enum`, `examples`) are never read as schemas. Pure, and without recursion; knows no grammar. Called
by server.gateway.grammars.structured_outputs, server.gateway.dialects.chat.tools and
server.gateway.parsing.tagged_calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby, permutations
from operator import itemgetter
from typing import Any, Final
from urllib.parse import unquote

from topspin.errors import InvalidRequest

Schema = dict[str, Any]

# Of the same value as the schema that has them: their meanings join.
_SAME: Final = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
)
_PARTS: Final = frozenset(("properties", "patternProperties", "additionalProperties")).union(
    ("unevaluatedProperties", "propertyNames", "items", "prefixItems", "additionalItems"),
    ("unevaluatedItems", "contains", "contentSchema"),
)
_DEFINITIONS: Final = frozenset(("$defs", "definitions"))
_BY_NAME: Final = _DEFINITIONS.union(
    ("properties", "patternProperties", "dependentSchemas", "dependencies")
)
_REFERENCES: Final = frozenset(("$ref", "$dynamicRef", "$recursiveRef"))
_NAMING: Final = _SAME | _PARTS | _REFERENCES
_SAYS_MORE: Final = _REFERENCES - {"$ref"} | {"unevaluatedProperties"}
_MAX_BRANCHES: Final = 64
"""Of a `oneOf` whose objects are closed: each is compared with each other."""
_TYPES: Final = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
ANY_TYPE: Final = frozenset(_TYPES.values())
TEXT: Final = frozenset(("string",))
# Closed here, the whole would fit more, or they join with other schemas.
_OPEN: Final = _SAME - {"allOf", "anyOf", "oneOf"} | {"contains"}


def subschemas(schema: Schema) -> Iterator[Schema]:
    """Yield `schema` and every schema in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += (child for _, child in _children(part))


def closed(schema: Any) -> Any:
    """Return a schema whose objects have only the members that it names, unless it says more.

    JSON Schema allows others, which small models would write without end; other servers close
    objects too. Objects whose other members are named elsewhere (`allOf`, beside `anyOf` or `$ref`
    and so on) or required by name, or that need more members than they name, stay open.
    """
    if not isinstance(schema, dict):
        return schema
    result = json.loads(json.dumps(schema))
    open_ids = _open_ids(result)
    for part in subschemas(result):
        if open_ids is not None and id(part) not in open_ids and _names_all_members(part):
            part.setdefault("additionalProperties", False)
    return result


def value_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a value of `schema`, a part of `root`, may have, as far as it tells."""
    types: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        given = part if isinstance(part, dict) else {}
        if "type" in given:
            names = given["type"] if isinstance(given["type"], list) else [given["type"]]
            types.update(name for name in names if isinstance(name, str))
        elif "const" in given:
            types.add(type_of(given["const"]))
        elif isinstance(given.get("enum"), list):
            types.update(type_of(value) for value in given["enum"])
        elif "$ref" in given:
            waiting.append(_target(root, given["$ref"]))  # None, if it leads nowhere: any type
        elif isinstance(given.get("allOf"), list):
            waiting += given["allOf"][:1]  # all of them fit, so that the first one tells enough
        else:
            branches = given.get("anyOf", given.get("oneOf"))
            if not isinstance(branches, list):
                return ANY_TYPE
            waiting += branches
    if "number" in types:
        types.add("integer")
    return frozenset(types) or ANY_TYPE


def type_of(value: object) -> str:
    """Return the type that JSON Schema gives a decoded value."""
    return _TYPES[type(value)]


def required_names(schema: Schema) -> list[str]:
    """Return the members that an object needs."""
    required = schema.get("required")
    return (
        [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
    )


def resolved(root: Mapping[str, Any], schema: Schema) -> Schema:
    """Return the schema that one is a reference to, or itself."""
    return _target(root, schema["$ref"]) or schema if "$ref" in schema else schema


def check_counts(schema: Schema, *, param: str) -> None:
    """Raise InvalidRequest for objects that need several members of any name.

    A grammar does not see that two members have the same name, and so count once.
    """
    for part in subschemas(schema):
        least, required = part.get("minProperties"), part.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
        if isinstance(least, int) and least > max(1, num_required) and not is_closed:
            raise InvalidRequest(
                f"`{param}`: `minProperties` above 1 is served only where all members are required "
                "or named, and no others are allowed",
                param=param,
            )


def _children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly in one, each with its keyword."""
    for keyword, value in schema.items():
        if keyword in _BY_NAME:
            values = list(value.values()) if isinstance(value, dict) else []
        elif keyword in _SAME or keyword in _PARTS:
            values = value if isinstance(value, list) else [value]
        else:
            continue
        yield from ((keyword, each) for each in values if isinstance(each, dict))


def _open_ids(root: Schema) -> set[int] | None:
    """Return the ids of the schemas in `root` that are to stay as they are; None: all are."""
    open_ids: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    waiting = [(root, False)]
    while waiting:
        schema, is_open = waiting.pop()
        if (id(schema), is_open) in seen:
            continue
        seen.add((id(schema), is_open))
        children = list(_children(schema))
        if "$ref" in schema:
            target = _target(root, schema["$ref"])
            if target is not None:
                children.append(("$ref", target))
            elif is_open or _is_joined(schema, "$ref", []):
                return None  # any of them may be meant
        same = [(keyword, child) for keyword, child in children if not _is_of_parts(keyword)]
        is_named_elsewhere = any(_adds_to(schema, child) for _, child in same)
        if is_open or is_named_elsewhere:
            open_ids.add(id(schema))
        joined = {
            keyword: _is_joined(schema, keyword, [resolved(root, each) for _, each in group])
            for keyword, group in groupby(same, key=itemgetter(0))
        }
        for keyword, child in children:
            is_child_open = is_open or joined.get(keyword, is_named_elsewhere) or keyword in _OPEN
            waiting.append((child, is_child_open and keyword not in _DEFINITIONS))
    return open_ids


def _is_of_parts(keyword: str) -> bool:
    return keyword in _PARTS or keyword in _DEFINITIONS


def _adds_to(schema: Schema, child: Schema) -> bool:
    """Return whether `child`, of the same value, says of its members more than which it needs."""
    named = _named(schema)
    return bool(_NAMING & child.keys()) or any(name not in named for name in required_names(child))


def _is_joined(schema: Schema, keyword: str, branches: list[Schema]) -> bool:
    """Return whether a value may have to fit more than one of `keyword`'s schemas and `schema`."""
    if keyword in _OPEN or (_NAMING | {"required"}).difference((keyword,)) & schema.keys():
        return True
    if keyword == "oneOf":
        pairs = permutations(branches, 2) if len(branches) <= _MAX_BRANCHES else [({}, {})]
        return not all(_excludes(one, other) for one, other in pairs)
    return keyword == "allOf" and len(branches) > 1


def _excludes(one: Schema, other: Schema) -> bool:
    """Return whether what fits `one` and has no other members never fits `other`."""
    types = {each["type"] for each in (one, other) if isinstance(each.get("type"), str)}
    if len(types) == 2 and types != {"integer", "number"}:
        return True
    if not _names_all_members(one) or one.get("additionalProperties"):
        return False
    return any(
        name not in _named(one) or _differ(_named(one)[name], _named(other).get(name))
        for name in required_names(other)
    )


def _differ(one: object, other: object) -> bool:
    """Return whether two schemas have constants that differ."""
    values = [each.get("const") for each in (one, other) if isinstance(each, dict)]
    return len(values) == 2 and None not in values and values[0] != values[1]


def _names_all_members(schema: Schema) -> bool:
    named, least = schema.get("properties"), schema.get("minProperties", 0)
    if not isinstance(named, dict) or not _SAYS_MORE.isdisjoint(schema):
        return False
    is_enough = isinstance(least, int) and least <= len(named)
    return is_enough and all(name in named for name in required_names(schema))


def _named(schema: Schema) -> dict[str, Any]:
    named = schema.get("properties")
    return named if isinstance(named, dict) else {}


def _target(root: Mapping[str, Any], reference: object) -> Schema | None:
    """Return what a reference into the same schema leads to."""
    if not isinstance(reference, str) or reference[:2] not in ("#", "#/"):
        return None
    part: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            is_index = len(name) < 7 and name.isdecimal() and int(name) < len(part)
            part = part[int(name)] if is_index else None
        else:
            part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, dict) else None
