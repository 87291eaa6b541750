"""Closed objects in JSON schemas, against jsonschema, and where schemas are looked for."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from server.gateway.grammars.json_schemas import ANY_TYPE, closed, subschemas, value_types
from server.gateway.grammars.structured_outputs import json_grammar
from tests.pairwise import few

Schema = dict[str, Any]
NAMES = "abcd"
VOCABULARIES = ("core", "applicator", "unevaluated", "content")


def members(names: str, required: str = "", **rest: Any) -> Schema:
    properties = {name: {"type": "integer"} for name in names}
    return {"type": "object", "properties": properties, "required": list(required), **rest}


def keywords() -> dict[str, str]:
    """Return the keywords with schemas in drafts 7 and 2020-12, and the form of their values."""
    address = "https://json-schema.org/draft/2020-12/meta/"
    drafts = [REGISTRY.contents(address + name) for name in VOCABULARIES]
    found = {}
    for draft in [Draft7Validator.META_SCHEMA, *drafts]:
        for name, value in draft["properties"].items():
            text = str(value)
            if "#meta" in text or "{'$ref': '#'}" in text or "schemaArray" in text:
                is_named = "additionalProperties" in text
                found[name] = "named" if is_named else "list" if "rray" in text else "one"
    return found


def placed(keyword: str, form: str, schema: Schema) -> Schema:
    return {keyword: {"x": schema} if form == "named" else [schema] if form == "list" else schema}


def test_schemas_are_found_under_every_keyword_that_has_them() -> None:
    found = keywords()
    assert len(found) > 20
    for keyword, form in found.items():
        inner = members("a")
        assert inner in subschemas(placed(keyword, form, inner)), keyword
        inner = placed("properties", "named", members("a", "b"))
        assert members("a", "b") in subschemas(placed(keyword, form, inner)), keyword


@pytest.mark.parametrize("keyword", ["const", "default", "enum", "examples", "title"])
def test_other_values_are_no_schemas(keyword: str) -> None:
    value = {"minProperties": 3, "properties": {"a": {}}}
    schema = members("a") | {keyword: [value] if keyword[-1] in "ms" else value}
    assert list(subschemas(schema)) == [schema, schema["properties"]["a"]]
    assert closed(schema) == {**schema, "additionalProperties": False}
    if keyword != "title":
        assert json_grammar(schema, param="s")


# Whatever the rest says, a value there has to fit only that one schema, and may be closed.
NOT_CLOSED = {"not", "if", "then", "else", "contains", "dependentSchemas", "dependencies"}


@pytest.mark.parametrize("keyword", sorted(keywords()))
def test_objects_are_closed_in_every_place_where_that_only_forbids(keyword: str) -> None:
    for inner in (members("a"), {"items": members("a")}, {"anyOf": [members("a"), {}]}):
        (part,) = (
            each
            for each in subschemas(closed(placed(keyword, keywords()[keyword], inner)))
            if each.get("required") == []
        )
        assert ("additionalProperties" in part) is (keyword not in NOT_CLOSED), part


REF = {"$ref": "#/$defs/x"}
# Schemas, whose `$defs` have `x` with the member "a", and what objects with members 1 they allow.
JOINED: list[tuple[Schema, str]] = [
    (REF, ",a"),
    (REF | members("b"), ",a,b,ab,c,abc"),
    ({"allOf": [REF]}, ",a"),
    ({"allOf": [REF, members("b")]}, ",a,b,ab,abc"),
    ({"allOf": [REF, {"required": ["b"]}]}, "b,ab"),
    ({"anyOf": [REF, members("b", "b")]}, ",a,b"),
    ({"anyOf": [REF, members("b", "b")], "required": ["c"]}, "c,ac,abc"),
    ({"oneOf": [REF, {"type": "null"}]}, ",a"),
    ({"oneOf": [members("a", "a"), members("b", "b")]}, "a,b"),
    (members("ab", anyOf=[{"required": ["a"]}, {"required": ["b"]}]), "a,b,ab"),
    (members("ab", anyOf=[{"required": ["c"]}, {"required": ["b"]}]), "b,ac,abd"),
    ({"$ref": "#/$defs/y", "$defs": {"y": {"allOf": [{"$ref": "#/$defs/x"}]}}}, ",a"),
    ({"$ref": "#/$defs/y~1z", "$defs": {"y/z": members("b")}}, ",b"),
    ({"allOf": [{"$ref": "#an"}, members("b")], "$defs": {"an": members("a", **{"$anchor": "an"})}},
     ",a,b,ab"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "allowed"), JOINED)
def test_members_that_are_named_elsewhere_are_allowed(schema: Schema, allowed: str) -> None:
    """At the top, and in a part that several schemas name."""
    whole = schema | {"$defs": {"x": members("a")} | schema.get("$defs", {})}
    result, num_members = closed(whole), 0
    objects = [dict.fromkeys(each, 1) for each in ["", *NAMES, "ab", "ac", "abc", "abd"]]
    for each in objects:
        is_valid = Draft202012Validator(result).is_valid(each)
        if "".join(each) in allowed.split(","):
            assert is_valid, (each, result)
        assert not is_valid or Draft202012Validator(whole).is_valid(each), (each, result)
        num_members += is_valid
    if allowed.count(",") < 3:
        assert num_members <= allowed.count(",") + 4


def test_parts_that_several_schemas_name_stay_open() -> None:
    one, other = ({"properties": {"p": members(name)}} for name in "ab")
    for joined in ({"allOf": [one, other]}, one | {"anyOf": [other]}, one | {"$ref": "#/$defs/y"}):
        schema = {**joined, "$defs": {"y": other}}
        assert Draft202012Validator(closed(schema)).is_valid({"p": {"a": 1, "b": 1}})


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    names = rng.sample(NAMES, rng.randrange(3))
    schema = members("", "".join(rng.sample(NAMES, rng.choice([0, 0, 1]))))
    schema["properties"] = {name: {"type": "integer"} for name in names}
    if rng.random() < 0.3 and names:
        schema["properties"][names[0]] = {"const": rng.randrange(2)}
    for keyword in rng.sample(sorted(keywords()), rng.randrange(4)) if depth else ():
        form = keywords()[keyword]
        if form == "list":
            schema[keyword] = [random_schema(rng, depth - 1) for _ in range(2)]
        elif form == "named":
            schema[keyword] = {rng.choice(NAMES): random_schema(rng, depth - 1)}
        else:
            schema[keyword] = random_schema(rng, depth - 1)
    if rng.random() < 0.4:
        del schema[rng.choice(["properties", "required"])]
    return schema


@pytest.mark.parametrize("seed", few(range(2), 0))
def test_what_fits_a_closed_schema_fits_the_schema(seed: int) -> None:
    rng = random.Random(seed)
    names = ["".join(each) for num in range(4) for each in itertools.combinations(NAMES, num)]
    flat: list[Any] = [dict.fromkeys(each, value) for each in names for value in (0, 1)]
    objects = flat + [{"a": each, "b": 1} for each in flat[::3]] + [[each] for each in flat[::3]]
    num_stricter = 0
    for _ in range(80):
        schema = random_schema(rng)
        if rng.random() < 0.3:
            schema = {"$defs": {"x": schema}, "allOf": [REF, random_schema(rng, 1)]}
        before, after = Draft202012Validator(schema), Draft202012Validator(closed(schema))
        fits = [(before.is_valid(each), after.is_valid(each)) for each in objects]
        assert (False, True) not in fits, schema
        num_stricter += (True, False) in fits
    assert num_stricter > 10


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"const": True}, {"boolean"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "array"}]}]}, {"string", "array"}),
        ({"anyOf": [{"type": "string"}, {}]}, ANY_TYPE),
        ({"allOf": [{"$ref": "#/$defs/A"}, {"description": "x"}]}, {"string"}),
        ({"$ref": "#/$defs/Self"}, ANY_TYPE),
        ({"$ref": "elsewhere"}, ANY_TYPE),
        *((odd, ANY_TYPE) for odd in (True, None, 5, {"anyOf": 5}, {"type": 5}, {"enum": "a"})),
    ],
)
def test_the_types_of_a_value_are_those_that_its_schema_tells(
    schema: object, types: set[str] | frozenset[str]
) -> None:
    definitions = {"A": {"enum": ["a"]}, "Self": {"$ref": "#/$defs/Self"}}
    assert value_types(schema, {"$defs": definitions}) == types
