"""Texts sampled at temperature 1 from random logits are valid for the schemas that made them."""

from __future__ import annotations

import json
import random
import re
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from server.gateway.bodies.decoding import decode
from server.gateway.bodies.fields import MAX_TOOLS
from server.gateway.bodies.generation import MAX_STRUCTURED_CHOICES
from server.gateway.dialects.chat.request import FunctionDefinition, Tool
from server.gateway.dialects.chat.tools import ToolUse, constrained
from server.gateway.dialects.completions.request import CompletionBody
from server.gateway.grammars.structured_outputs import grammar_of, json_grammar, marker_terminal
from server.gateway.parsing.call_formats import HERMES
from tests.attention_nodes.constrained import Bench, Checkpoint, params
from tests.attention_nodes.schemas import REFUSED, Schema, all_schemas
from tests.pairwise import few
from topspin.errors import InvalidRequest
from topspin.grammars import MAX_GRAMMAR_BYTES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("tokenizer"))


# Those of the formats that the library checks only with packages of others.
FORMATS = FormatChecker(formats=Draft202012Validator.FORMAT_CHECKER.checkers)


@FORMATS.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    # The standard has leap seconds, Python has not.
    return not isinstance(value, str) or bool(
        datetime.fromisoformat(value.upper().replace(":60", ":59"))
    )


@FORMATS.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or _is_date_time(f"2000-01-01T{value}")


@FORMATS.checks("duration")
def _is_duration(value: object) -> bool:
    parts = r"P(?!$)(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?!$)(\d+H)?(\d+M)?(\d+S)?)?"
    return not isinstance(value, str) or bool(re.fullmatch(parts, value))


def validator(schema: Schema) -> jsonschema.protocols.Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=FORMATS)


@pytest.mark.parametrize("every", few([4, 1], 4))
def test_texts_follow_their_schemas(checkpoint: Checkpoint, every: int) -> None:
    schemas = list(all_schemas())[::every]
    assert len(schemas) > 120 // every
    grammars = [json_grammar(schema, param="schema") for _, schema in schemas]
    asked = [params(grammar=each) for each in grammars]
    bench = Bench(checkpoint, *asked)
    bench.run(range(len(asked)))
    assert bench.refused == {}
    wrong = []
    different = set()
    for idx, (name, schema) in enumerate(schemas):
        text = bench.text(idx)
        different.add(text)
        try:
            validator(schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append((name, text, str(error).splitlines()[0]))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(different) > len(schemas) // 2


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(checkpoint: Checkpoint, reason: str) -> None:
    """By the gateway, or by the node, whose reason the gateway then gives with the field."""
    schemas = [REFUSED[reason]]
    if reason != "x-guidance":  # options are those of the whole schema
        schemas.append({"type": "object", "properties": {"a": REFUSED[reason]}, "required": ["a"]})
    for schema in schemas:
        refusal = refusal_of(checkpoint, schema)
        assert reason in refusal


def refusal_of(checkpoint: Checkpoint, schema: Schema) -> str:
    try:
        grammar = json_grammar(schema, param="the.schema")
    except InvalidRequest as error:
        return f"{error.param}: {error}" if (error.param or "").startswith("the.schema") else ""
    (refusal,) = checkpoint.compile(grammar).values()
    return refusal


def test_blanks_are_bounded(checkpoint: Checkpoint) -> None:
    """However likely a model finds them."""
    grammar = json_grammar({"type": "array", "items": {"type": "null"}, "maxItems": 2}, param="s")
    blanks = checkpoint.tokens(" \n\t")
    for seed in range(10):
        bench = Bench(checkpoint, params(grammar=grammar, logit_bias=dict.fromkeys(blanks, 20.0)))
        bench.run([0], seed=seed)
        text = bench.text(0)
        assert json.loads(text) in ([], [None], [None, None])
        assert len(text) <= len("[null,null]") + 6 * 25


def asked_of(**outputs: Any) -> str:
    body = {"model": "m", "prompt": "p", "structured_outputs": outputs}
    return grammar_of(decode(json.dumps(body).encode(), CompletionBody)).text


PATTERNS = [
    r"[0-9]{2,4}",
    r"(yes|no|maybe)!?",
    r"[0-9]+(\.[0-9]{1,2})? (EUR|USD)",
    r"[^a-z\n]{3}",
    r"a?b*c+",
    r"(?i)hello",
    r'"[^"]*"',
    r"/[a-z]+/",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regex(checkpoint: Checkpoint, pattern: str) -> None:
    grammar = asked_of(regex=pattern)
    bench = Bench(checkpoint, *(params(grammar=grammar, seed=seed) for seed in range(8)))
    bench.run(range(8))
    for seq_id in range(8):
        assert re.fullmatch(pattern, bench.text(seq_id)), bench.text(seq_id)


def test_choice(checkpoint: Checkpoint) -> None:
    rng = random.Random(0)
    letters = 'ab"\\\n\t/ {}[]|()*+?.^$üé€😀\u2028'
    choices = ["".join(rng.choices(letters, k=rng.randrange(1, 6))) for _ in range(40)]
    grammar = asked_of(choice=choices)
    bench = Bench(checkpoint, *(params(grammar=grammar, seed=seed) for seed in range(80)))
    bench.run(range(80), closing=0.0)
    found = {bench.text(seq_id) for seq_id in range(80)}
    assert found <= set(choices)
    assert len(found) > 15


LARK = """
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)?
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]?/
"""
EBNF = """
root ::= product (("+" | "-") product)*
product ::= atom ("*" atom)?
atom ::= number | "(" root ")"
number ::= [1-9] [0-9]?
"""


@pytest.mark.parametrize("grammar", [LARK, EBNF], ids=["lark", "ebnf"])
def test_grammars_of_clients(checkpoint: Checkpoint, grammar: str) -> None:
    """Python evaluates what they make."""
    asked = asked_of(grammar=grammar)
    bench = Bench(checkpoint, *(params(grammar=asked, seed=seed) for seed in range(30)))
    bench.run(range(30), closing=3.0)
    texts = [bench.text(seq_id) for seq_id in range(30)]
    for text in texts:
        assert isinstance(eval(text, {"__builtins__": {}}), int), text
    assert any("(" in text for text in texts)
    assert any("*" in text for text in texts)


@pytest.mark.slow
def test_choices_members_and_tools_reach_their_limits(checkpoint: Checkpoint) -> None:
    choices = [f"choice {idx}" for idx in range(MAX_STRUCTURED_CHOICES)]
    properties = {f"p{idx}": {"type": "integer"} for idx in range(1000)}
    use = ToolUse(tools=tuple(tool(idx) for idx in range(MAX_TOOLS)), may_call=True)
    terminal = marker_terminal(lambda _: None, frozenset())
    grammars = [
        asked_of(choice=choices),
        asked_of(json={"type": "object", "properties": properties}),
        constrained(
            "", use, calls=HERMES, terminal=terminal, reasons=False, is_inside_reasoning=False
        ),
    ]
    last = f'<tool_call>\n{{"name": "t{MAX_TOOLS - 1}", "arguments": {{}}}}\n</tool_call>'
    for grammar, text in zip(grammars, [choices[-1], '{"p0": 1, "p999": 2}', last], strict=True):
        matcher = checkpoint.matcher(grammar)
        for token in checkpoint.tokens(text):
            matcher.compute_bitmask()
            assert matcher.consume_token(token), matcher.get_error()
        assert matcher.is_accepting()
    with pytest.raises(InvalidRequest, match=r"`structured_outputs.choice`.* <= 4096"):
        asked_of(choice=[*choices, "one more"])


def tool(idx: int) -> Tool:
    return Tool(function=FunctionDefinition(name=f"t{idx}", parameters={}, strict=True))


@pytest.mark.parametrize(
    ("field", "written"),
    [
        ("regex", "{}".format),
        ("json", lambda text: {"description": text}),
        ("grammar", 'start: "b" // {}'.format),
    ],
)
def test_the_size_of_what_nodes_compile_is_limited(field: str, written: Any) -> None:
    around = len(asked_of(**{field: written("a")})) - 1
    text = "a" * (MAX_GRAMMAR_BYTES - around)
    assert len(asked_of(**{field: written(text)})) == MAX_GRAMMAR_BYTES
    with pytest.raises(
        InvalidRequest, match=f"`structured_outputs.{field}` has {MAX_GRAMMAR_BYTES + 1}"
    ):
        asked_of(**{field: written(text + "a")})
