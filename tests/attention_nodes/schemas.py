"""A few hundred JSON schemas, made from a table of features and of ways to combine them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def text(**rest: Any) -> Schema:
    return {"type": "string", **rest}


def whole(**rest: Any) -> Schema:
    return {"type": "integer", **rest}


def number(**rest: Any) -> Schema:
    return {"type": "number", **rest}


def items(each: Any, **rest: Any) -> Schema:
    return {"type": "array", "items": each, **rest}


def members(required: str = "", /, *, closed: bool = True, **properties: Any) -> Schema:
    """An object with these properties, `required` or not, and no others if `closed`."""
    schema = {"type": "object", "properties": properties, "required": required.split()}
    return schema | ({"additionalProperties": False} if closed else {})


BOOL, NULL = {"type": "boolean"}, {"type": "null"}
SHORT = text(maxLength=5)

SCALARS: dict[str, Schema] = {
    "string": text(),
    "short": text(maxLength=3),
    "long": text(minLength=20),
    "letters": text(pattern="^[a-z]+$"),
    "unanchored": text(pattern="[ab]b"),
    "alternatives": text(pattern="^(red|green|blue)$"),
    "classes": text(pattern=r"^\d{3}-\w\s?$"),
    "quotes": text(pattern='^["\\\\]{2}$'),
    "pattern and length": text(pattern="^[a-z ]*$", minLength=3, maxLength=6),
    "date": text(format="date"),
    "time": text(format="time"),
    "date-time": text(format="date-time"),
    "duration": text(format="duration"),
    "email": text(format="email"),
    "ipv4": text(format="ipv4"),
    "uuid": text(format="uuid"),
    "integer": whole(),
    "positive": whole(minimum=1),
    "range": whole(minimum=-5, maximum=17),
    "one integer": whole(minimum=7, maximum=7),
    "multiple in range": whole(multipleOf=5, minimum=3, maximum=44),
    "number": number(),
    "number range": number(minimum=-1.5, maximum=2.25),
    "open number": number(exclusiveMinimum=0),
    "boolean": BOOL,
    "null": NULL,
    "const text": {"const": "fixed"},
    "const object": {"const": {"a": [1, None]}},
    "enum texts": {"enum": ["a", "bb", 'c"c', "\\", "ü", "\n"]},
    "enum mixed": {"enum": [1, "1", True, None, 2.5, [1, 2], {"x": 0}]},
    "types": {"type": ["integer", "null"]},
    "annotated": text(title="t", description="d", default="x", examples=["y"], maxLength=2),
}

BRANCHES: dict[str, Schema] = {
    "anyOf": {"anyOf": [whole(minimum=0, maximum=9), SHORT]},
    "anyOf objects": {"anyOf": [members("a", a=whole()), members("b", b=SHORT)]},
    "anyOf beside": {"type": "object", "anyOf": [members("a", a=BOOL), members("b", b=BOOL)]},
    "oneOf types": {"oneOf": [whole(), SHORT, NULL]},
    "oneOf tagged": {
        "oneOf": [
            members("kind r", kind={"const": "circle"}, r=number(minimum=0)),
            members("kind w", kind={"const": "square"}, w=number(minimum=0)),
        ]
    },
    "allOf": {"allOf": [members("a", closed=False, a=whole()), {"required": ["a"]}]},
    "allOf numbers": {"allOf": [whole(minimum=2), whole(maximum=5)]},
    "allOf texts": {"allOf": [text(minLength=2), text(maxLength=4), text(pattern="^[ab]*$")]},
    "ref": {"$ref": "#/$defs/size", "$defs": {"size": whole(minimum=1, maximum=3)}},
    "definitions": {"$ref": "#/definitions/x", "definitions": {"x": SHORT}},
    "ref chain": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": ["end"]}},
    },
    "list": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": members("value", value=whole(), next={"$ref": "#/$defs/node"}),
        },
    },
    "tree": members("name children", name=SHORT, children=items({"$ref": "#"}, maxItems=2)),
    "expression": {
        "$defs": {
            "expr": {
                "anyOf": [
                    whole(minimum=0, maximum=99),
                    members(
                        "op left right",
                        op={"enum": ["+", "*"]},
                        left={"$ref": "#/$defs/expr"},
                        right={"$ref": "#/$defs/expr"},
                    ),
                ]
            }
        },
        "$ref": "#/$defs/expr",
    },
}

ARRAYS: dict[str, Schema] = {
    "any items": {"type": "array", "maxItems": 3},
    "no items": {"type": "array", "maxItems": 0},
    "at least": items(whole(), minItems=3),
    "between": items(BOOL, minItems=2, maxItems=4),
    "exactly": items(SHORT, minItems=3, maxItems=3),
    "tuple": {"type": "array", "prefixItems": [whole(), SHORT], "items": False, "minItems": 2},
    "tuple and rest": {"type": "array", "prefixItems": [BOOL], "items": whole(), "maxItems": 4},
    "matrix": items(items(whole(minimum=0, maximum=9), minItems=2, maxItems=2), maxItems=3),
    "records": items(members("id", id=whole(), tag=SHORT), minItems=1, maxItems=3),
}

OBJECTS: dict[str, Schema] = {
    "empty": members(),
    "any": {"type": "object"},
    "required": members("a b", a=whole(), b=SHORT),
    "optional": members(a=whole(), b=SHORT, c=BOOL),
    "some required": members("b d", a=whole(), b=SHORT, c=NULL, d=BOOL),
    "open": members("a", closed=False, a=whole()),
    "typed rest": {**members("a", closed=False, a=whole()), "additionalProperties": BOOL},
    "map": {"type": "object", "additionalProperties": whole()},
    "map of at most 2": {"type": "object", "additionalProperties": SHORT, "maxProperties": 2},
    "map of at least 1": {"type": "object", "additionalProperties": SHORT, "minProperties": 1},
    "at most one of": members(a=whole(), b=SHORT) | {"maxProperties": 1},
    "at least one of": members(a=whole(), b=SHORT) | {"minProperties": 1},
    "patterns": {
        "type": "object",
        "patternProperties": {"^n_[a-z]+$": whole(), "^s_[a-z]+$": SHORT},
        "additionalProperties": False,
    },
    "names": members('a-b c"d e\\f ü', **{"a-b": BOOL, 'c"d': BOOL, "e\\f": BOOL, "ü": BOOL}),
    "nested": members("a", a=members("b", b=members("c", c=members("d", d=BOOL)))),
    "person": members(
        "name age mails",
        name=text(minLength=1, maxLength=12),
        age=whole(minimum=0, maximum=130),
        mails=items(text(format="email"), maxItems=2),
        home=members("city", city=SHORT, zip=text(pattern="^[0-9]{5}$")),
    ),
    "call": members(
        "name arguments", name={"const": "look_up"}, arguments=members("query", query=SHORT)
    ),
}


def all_schemas() -> Iterator[tuple[str, Schema]]:
    """Yield names and schemas: each of the tables alone, and in one of the combinations in turn."""
    whole_table = {**SCALARS, **BRANCHES, **ARRAYS, **OBJECTS}
    yield from whole_table.items()
    # References count from the root, and who has one of several may have none besides.
    parts = [(n, s) for n, s in whole_table.items() if "#" not in str(s) and "oneOf" not in s]
    for idx, (name, each) in enumerate(parts):
        match idx % 3:
            case 0:
                yield f"member: {name}", members("last", it=each, last=NULL)
            case 1:
                yield f"item: {name}", items(each, minItems=1, maxItems=2)
            case _:
                yield f"or null: {name}", {"anyOf": [each, NULL]}


REFUSED: dict[str, Schema] = {
    "uniqueItems": items(whole(), uniqueItems=True),
    "contains": {"type": "array", "contains": whole()},
    "not": {"not": SHORT},
    "if": {"if": SHORT, "then": text(minLength=2)},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {}}},
    "propertyNames": {"type": "object", "propertyNames": SHORT},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "oneOf": {"oneOf": [whole(), number()]},
    "regex-like": text(format="regex-like"),
    "http://elsewhere/schema": {"$ref": "http://elsewhere/schema"},
    "look-ahead": text(pattern="(?=a)b"),
    "backreferences": text(pattern=r"(a)\1"),
    "nsatisfiable": whole(minimum=5, maximum=3),
    "maxProperties": members(a=whole(), b=BOOL) | {"maxProperties": 2},
    "minProperties": {"type": "object", "additionalProperties": SHORT, "minProperties": 2},
    "x-guidance": {"type": "string", "x-guidance": {"lenient": True}},
    "Invalid type": {"type": "text"},
}
"""By a word of the reason: what cannot be kept."""
