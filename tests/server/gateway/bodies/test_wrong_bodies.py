"""Every field of every body with every kind of wrong value: a 4xx that names the field.

The description of the API is the oracle: what its schemas do not allow is refused. Beside tests of
the rules between fields (test_errors.py), and of any bytes (test_any_body.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import jsonschema
import pytest

from server.gateway.dialects.anthropic.dialect import AnthropicDialect
from server.gateway.dialects.chat.batch import BatchDialect
from server.gateway.dialects.chat.dialect import ChatDialect
from server.gateway.dialects.completions.dialect import CompletionDialect
from server.gateway.dialects.responses.dialect import ResponsesDialect
from server.gateway.dialects.tokenization import detokenize, tokenize
from server.gateway.engine_client import EngineClient
from server.gateway.errors import describe
from tests.pairwise import few
from tests.server.gateway.calls import CHAT, PLAIN
from tests.server.gateway.fakes import FakeEngine, served_model
from tests.server.gateway.openapi.test_document import EXAMPLES, described
from topspin.errors import RequestError

UNHEARD = "unheard_of"
# Some of each JSON type.
ANYTHING: list[Any] = [None, True, 0, -1, 7, 1.5, 10**40, "", "x", [], [None], {}, {UNHEARD: 1}]
MAX_ITEMS = 100_000  # a longer list takes jsonschema seconds


class Mutant(NamedTuple):
    """A value in which one part is wrong, and where that part is."""

    value: Any
    place: str

    def inside(self, outer: Any, name: str) -> Mutant:
        dot = "" if not self.place or self.place.startswith("[") else "."
        return Mutant(outer, f"{name}{dot}{self.place}")


def options(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas of which a value follows one, with references resolved."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return options(described()["components"]["schemas"][name])
    inner = schema.get("anyOf") or schema.get("oneOf")
    return [each for option in inner for each in options(option)] if inner else [schema]


@cache
def validator_of(schema: str) -> jsonschema.Draft202012Validator:
    whole = {**json.loads(schema), "components": described()["components"]}
    return jsonschema.Draft202012Validator(whole)


def is_allowed(schema: dict[str, Any], value: Any) -> bool:
    return bool(validator_of(json.dumps(schema)).is_valid(value))


def sample(schema: dict[str, Any]) -> Any:
    """Return a value that `schema` allows."""
    [first, *_] = options(schema)
    if "enum" in first:
        return first["enum"][-1]
    if "const" in first:
        return first["const"]
    match first.get("type"):
        case "object":
            required = first.get("required", ())
            return {name: sample(first["properties"][name]) for name in required}
        case "array":
            return [sample(first["items"])] * first.get("minItems", 0)
        case "integer" | "number":
            return first.get("minimum", first.get("maximum", 0))
        case "boolean":
            return False
        case "string" | None:
            return "a"
    return None


def beyond(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield values just outside of the limits of `schema`."""
    step = 1 if schema.get("type") == "integer" else 0.01
    for name, sign in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
        if name in schema:
            yield schema[name] + sign * step
    if "maxLength" in schema:
        yield "a" * (schema["maxLength"] + 1)
    if "pattern" in schema:
        yield "a\nb"
    if schema.get("maxItems", MAX_ITEMS) < MAX_ITEMS:
        yield [sample(schema["items"])] * (schema["maxItems"] + 1)
    if "maxProperties" in schema:
        names = range(schema["maxProperties"] + 1)
        yield {str(name): sample(schema["additionalProperties"]) for name in names}


def mutants(schema: dict[str, Any], above: tuple[Any, ...] = ()) -> Iterator[Mutant]:
    """Yield wrong values of `schema`, and right ones with something wrong inside.

    `above` are the schemas around it, whose insides are looked at once.
    """
    kinds = options(schema)
    for wrong in (*ANYTHING, *(each for kind in kinds for each in beyond(kind))):
        # In Python, true and false equal numbers, and so they do where one value is accepted.
        if not is_allowed(schema, wrong) and wrong not in schema.get("enum", ()):
            yield Mutant(wrong, "")
    for kind in kinds:
        if kind not in above and "properties" in kind:
            yield from inside_object(kind, (*above, kind))
        elif kind.get("type") == "array":
            for inner in mutants(kind["items"], above):
                if not is_allowed(schema, [inner.value]):  # by another of the kinds
                    yield inner.inside([inner.value], "[0]")


def inside_object(kind: dict[str, Any], above: tuple[Any, ...]) -> Iterator[Mutant]:
    right = sample(kind)
    yield Mutant({**right, UNHEARD: 1}, UNHEARD)
    for name, schema in kind["properties"].items():
        is_tag = len(schema.get("enum", ())) == 1  # may be left out where there is one kind only
        if name in right and not is_tag:
            yield Mutant({key: right[key] for key in right if key != name}, name)
        for inner in mutants(schema, above):
            yield inner.inside({**right, name: inner.value}, name)


MODEL = served_model()
ENGINE = EngineClient(FakeEngine())
READERS: dict[str, Callable[..., object]] = {
    CHAT: ChatDialect(MODEL).prepare,
    PLAIN: CompletionDialect(MODEL).prepare,
    f"{CHAT}/batch": BatchDialect(MODEL).prepare,
    "/v1/responses": ResponsesDialect(MODEL).prepare,
    "/v1/responses/input_tokens": ResponsesDialect(MODEL).prepare_count,
    "/v1/messages": AnthropicDialect(MODEL).prepare,
    "/v1/messages/count_tokens": AnthropicDialect(MODEL).prepare_count,
    "/tokenize": lambda data, **_: tokenize(data, MODEL.reader(), model=MODEL, engine=ENGINE),
    "/detokenize": lambda data, **_: detokenize(data, MODEL.reader(), model=MODEL),
}


# Every route is asked by test_any_body.py, and of misspelt fields by test_other_servers.py.
BY_DEFAULT = (CHAT, PLAIN, "/detokenize")


@pytest.mark.parametrize("path", few(EXAMPLES, *BY_DEFAULT))
def test_a_wrong_field_is_refused_by_name(path: str) -> None:
    operation = described()["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    [body] = options(schema)
    good = {**EXAMPLES[path], "model": "tiny"}
    found = [each for each in mutants(body) if isinstance(each.value, dict) and each.place]
    for wrong, place in found:
        field = place.partition(".")[0].partition("[")[0]
        content = json.dumps({**good, **wrong} if field in wrong else wrong).encode()
        with pytest.raises(RequestError) as refused:
            READERS[path](content, max_tokens=100, tenant="")
        failure, is_anthropic = describe(refused.value), path.startswith("/v1/messages")
        error = json.loads(failure.body(to_anthropic=is_anthropic))["error"]
        said = error["message"] if is_anthropic else error["param"]
        assert field in said, (place, str(wrong)[:300])
        assert 400 <= failure.status < 500
        assert 0 < len(error["message"]) <= 700
    assert len(found) > 20
