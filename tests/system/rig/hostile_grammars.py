"""Grammars as a stranger might send them: deep, wide, large, heavy, wrong, and ordinary ones.

Owns hypothesis strategies of a request's `structured_outputs`, and the schemas of JSON Schema's own
test suite (an npm package). Knows no server.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

SUITE_PACKAGE = "json-schema-test-suite@0.0.10"
# With room for the rest of a request, below the 256 KiB that a grammar may have.
MOST_CHARS = 240 * 1024

Schema = dict[str, Any] | bool
Outputs = dict[str, Any]

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 64, 997, 9973, 99_991, 1e-3, 0.01, 1.5, 2**31, 1e300, -5])
COUNTS = st.sampled_from([0, 1, 2, 17, 255, 4096, 100_000, 2**31, 2**63])
MANY = st.sampled_from([1, 2, 30, 300, 3000, 30_000])
WORDS = st.sampled_from(["a", "b", "name", "", "é", "$ref", "\0", "x" * 300])
ATOMS = st.sampled_from(
    ["a", ".", "[a-z]", r"\d", r"\w", "[^x]", "(?i)k", r"\p{L}", "(?=a)", "^", "$"]
)
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,99}", "{1000}", "{0,50000}"])


def _times(part: object, count: int) -> int:
    """Return how many times a part may be there, if it is to be there `count` times."""
    size = len(part if isinstance(part, str) else json.dumps(part))
    return min(count, MOST_CHARS // (size + 1))


def _schema(kind: str, **fields: Any) -> Schema:
    return {"type": kind, **fields}


def _combined(kind: str, parts: list[Schema]) -> Schema:
    return {kind: parts}


def _object(members: dict[str, Schema], required: list[str]) -> Schema:
    return {"type": "object", "properties": members, "required": required}


def _wide(part: Schema, count: int) -> Schema:
    return {"type": "object", "properties": {f"p{idx}": part for idx in range(_times(part, count))}}


def _nested(part: Schema, count: int) -> Schema:
    for _ in range(min(count, 300)):  # Python writes no deeper JSON
        part = {"type": "array", "items": part}
    return part


def _chained(part: Schema, count: int) -> Schema:
    """Return a chain of references, which is as deep as it is long."""
    chain: dict[str, Schema] = {
        f"d{idx}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{idx + 1}"}}}
        for idx in range(count)
    }
    return {"$defs": {**chain, f"d{count}": part}, "$ref": "#/$defs/d0"}


def _parts(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    lists = st.lists(inner, min_size=1, max_size=4)
    return st.one_of(
        st.builds(_object, st.dictionaries(WORDS, inner, max_size=4), st.lists(WORDS, max_size=3)),
        st.builds(_schema, st.just("array"), items=inner, minItems=COUNTS, maxItems=COUNTS),
        st.builds(_combined, st.sampled_from(["anyOf", "allOf", "oneOf", "prefixItems"]), lists),
        st.builds(lambda part: {"not": part}, inner),
        st.builds(lambda part: {"type": "object", "additionalProperties": part}, inner),
        *(st.builds(make, inner, MANY) for make in (_wide, _nested, _chained)),
    )


PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({}){}".format, inner, REPEATS),
        st.builds("({}|{})".format, inner, inner),
        st.builds("{}{}".format, inner, inner),
        st.builds(lambda part, count: "(" * count + part[:MOST_CHARS] + ")" * count, inner, MANY),
        st.builds(lambda part, count: part * _times(part, count), inner, MANY),
    ),
    max_leaves=6,
).map(lambda text: text[:MOST_CHARS])
SCHEMAS = st.recursive(
    st.one_of(
        st.booleans(),
        st.builds(_schema, st.just("integer"), minimum=NUMBERS, maximum=NUMBERS),
        st.builds(_schema, st.sampled_from(["integer", "number"]), multipleOf=NUMBERS),
        st.builds(_schema, st.just("string"), pattern=PATTERNS),
        st.builds(_schema, st.just("string"), minLength=COUNTS, maxLength=COUNTS),
        st.builds(_schema, st.just("string"), format=st.sampled_from(["date-time", "uuid", "x"])),
        st.builds(lambda count: {"enum": list(range(count))}, MANY),
        st.builds(lambda name: {"$ref": name}, st.sampled_from(["#", "#/$defs/d1", "#/none"])),
    ),
    _parts,
    max_leaves=8,
)
RULES = st.recursive(
    st.one_of(
        st.sampled_from(['"a"', '"b" "c"', "[a-z]", "[^x]", "root", "rule", '""', "(", '"']),
        st.builds(
            lambda text, count: f'"{text * count}"', st.sampled_from(["x", "é", "\\n"]), MANY
        ),
    ),
    lambda inner: st.one_of(
        st.builds("({}){}".format, inner, REPEATS),
        st.builds("({} | {})".format, inner, inner),
        st.builds("{} {}".format, inner, inner),
        st.builds(lambda part, count: "(" * count + part[:MOST_CHARS] + ")" * count, inner, MANY),
        st.builds(lambda part, count: f"{part} " * _times(part, count), inner, MANY),
    ),
    max_leaves=6,
)
LARK = st.builds("start: {}\nrule: {}\nroot: {}".format, RULES, RULES, RULES)
EBNF = st.builds("root ::= {}\nrule ::= {}".format, RULES, RULES)


def _fits(outputs: Outputs) -> bool:
    return len(json.dumps(outputs)) <= MOST_CHARS


OUTPUTS: st.SearchStrategy[Outputs] = st.one_of(
    st.builds(lambda schema: {"json": schema}, SCHEMAS),
    st.builds(lambda pattern: {"regex": pattern}, PATTERNS),
    st.builds(lambda text: {"grammar": text[:MOST_CHARS]}, LARK),
    st.builds(lambda text: {"grammar": text[:MOST_CHARS]}, EBNF),
    st.builds(
        lambda word, count: {"choice": [f"{word}{idx}" for idx in range(count)]}, WORDS, MANY
    ),
).filter(_fits)


def suite_schemas(directory: Path) -> list[Schema]:
    """Fetch JSON Schema's test suite into `directory` and return its schemas.

    Raises OSError or subprocess.CalledProcessError where npm does not give it.
    """
    packed = subprocess.run(
        ["npm", "pack", "--silent", SUITE_PACKAGE],
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    schemas: list[Schema] = []
    with tarfile.open(directory / packed.stdout.strip()) as package:
        for member in package.getmembers():
            file = package.extractfile(member)
            if file is None or "/tests/" not in member.name or not member.name.endswith(".json"):
                continue
            schemas += [case["schema"] for case in json.load(file)]
    return schemas
