"""The form that an answer must have: `response_format`, `structured_outputs` to a grammar.

Owns the translation to llguidance's text, the Lark of texts and of markers in it, and what is
refused before anything compiles it. Whether it can be compiled is said by attention nodes, whose
reasons reach the client with the field's name: no gateway gives a stranger's grammar to native
code. Pure; may take tens of milliseconds for a large schema, so that server.gateway.handler calls
it in a thread where a body has one of GRAMMAR_FIELDS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from llguidance import LLMatcher
from msgspec import Raw

from server.gateway.bodies.decoding import check_depth, decode
from server.gateway.bodies.generation import (
    SAME_OUTPUTS,
    GenerationBody,
    ResponseFormat,
    StructuredOutputs,
)
from server.gateway.grammars.gbnf import is_gbnf, lark_of
from server.gateway.grammars.json_schemas import check_counts, closed
from server.gateway.grammars.structural_tags import tag_grammar
from topspin.errors import InvalidRequest
from topspin.grammars import MAX_GRAMMAR_BYTES, reason_of

# Between two parts of JSON: a space, or a line break and an indentation. Small models would
# write blanks for ever where any number is allowed.
WHITESPACE: Final = r" |\n[ \t]{0,24}"
# Gives the Lark of a marker.
Terminal = Callable[[str], str]
_ANY_OBJECT: Final = {"type": "object"}
_OPTIONS: Final = "x-guidance"
GRAMMAR_FIELDS: Final = (
    b'"response_format"',
    b'"structured_outputs"',
    b'"tools"',
    b'"format"',
    b'"output_format"',
    b'"thinking_token_budget"',
    *(f'"{name}"'.encode() for name in SAME_OUTPUTS),
)


def checked_grammar(text: str, *, param: str) -> str:
    """Return `text`, a grammar of llguidance (or of Lark, in its dialect).

    Raises InvalidRequest that names `param` if it is too long.
    """
    check_size(text.encode(errors="replace"), param=param, form=" as nodes compile it")
    return text


def _is_set(value: object) -> bool:
    """Return whether a field asks for something; `json_object: false` does not."""
    return bytes(value) != b"null" if isinstance(value, Raw) else value not in (None, False)


def check_size(data: bytes, *, param: str, form: str = "") -> None:
    """Raise InvalidRequest for a text that is too long to be looked at."""
    if len(data) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"`{param}` has {len(data)} bytes{form}, at most {MAX_GRAMMAR_BYTES} are served",
            param=param,
        )


class FieldGrammar(NamedTuple):
    """A grammar, and the field of the request that asks for it; both empty: none does."""

    text: str = ""
    field: str = ""


def grammar_of(body: GenerationBody) -> FieldGrammar:
    """Return the grammar of a request; raises InvalidRequest."""
    form, outputs = body.response_format, body.structured_outputs
    asked = (
        ("response_format", FieldGrammar() if form is None else _of_format(form)),
        ("structured_outputs", FieldGrammar() if outputs is None else _of_outputs(outputs)),
    )
    given = [(name, grammar) for name, grammar in asked if grammar.text]
    if len(given) > 1:
        raise InvalidRequest(
            "`response_format` and `structured_outputs` are given both; give one of them",
            param="structured_outputs",
        )
    if not given:
        return FieldGrammar()
    name, grammar = given[0]
    check_end(body, name)
    return grammar


def check_end(body: GenerationBody, name: str) -> None:
    """Raise InvalidRequest for fields that forbid the end of an answer with a grammar."""
    for other, is_set in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if is_set:
            raise InvalidRequest(
                f"`{other}` forbids the end that `{name}` needs; give one of them", param=other
            )


def _of_format(form: ResponseFormat) -> FieldGrammar:
    tags = {name: getattr(form, name) for name in ("format", "structures", "triggers")}
    tags = {name: value for name, value in tags.items() if _is_set(value)}
    if form.type == "structural_tag":
        return _of_tags(Raw(msgspec.json.encode(tags)), param="response_format")
    for name in tags:
        raise InvalidRequest(
            f"`response_format.{name}` needs `type` to be `structural_tag`",
            param=f"response_format.{name}",
        )
    param = "response_format.json_schema"
    if form.type != "json_schema":
        if form.json_schema is not None:
            raise InvalidRequest(f"`{param}` needs `type` to be `json_schema`", param=param)
        if form.type != "json_object":
            return FieldGrammar()
        param = "response_format"
        return FieldGrammar(json_grammar(_ANY_OBJECT, param=param), param)
    if form.json_schema is None:
        raise InvalidRequest(f"missing required field `{param}`", param=param)
    param += ".schema"
    schema = closed(_schema(form.json_schema.schema, param=param))
    return FieldGrammar(json_grammar(schema, param=param), param)


def _of_outputs(outputs: StructuredOutputs) -> FieldGrammar:
    given = [name for name in outputs.__struct_fields__ if _is_set(getattr(outputs, name))]
    if not given:
        return FieldGrammar()
    if len(given) > 1:
        names = ", ".join(f"`{name}`" for name in given)
        raise InvalidRequest(
            f"`structured_outputs` has {names}; give one of them", param="structured_outputs"
        )
    param = f"structured_outputs.{given[0]}"
    match given[0]:
        case "json":
            schema = closed(_schema(outputs.json, param=param))
            grammar = json_grammar(schema, param=param)
        case "structural_tag":
            return _of_tags(outputs.structural_tag, param=param)
        case "json_object":
            grammar = json_grammar(_ANY_OBJECT, param=param)
        case "regex":
            grammar = LLMatcher.grammar_from_regex(outputs.regex or "")
        case "choice":
            choices = " | ".join(
                json.dumps(each, ensure_ascii=False) for each in outputs.choice or ()
            )
            grammar = LLMatcher.grammar_from_lark(f"start: {choices}")
        case _:
            grammar = _of_text(outputs.grammar or "", param=param)
    return FieldGrammar(checked_grammar(grammar, param=param), param)


def _of_tags(data: Raw, *, param: str) -> FieldGrammar:
    check_size(bytes(data), param=param)
    grammar = tag_grammar(data, param=param, whitespace=WHITESPACE)
    return FieldGrammar(checked_grammar(grammar, param=param), param)


def json_grammar(schema: Mapping[str, Any], *, param: str) -> str:
    """Return the grammar of JSON texts that a JSON schema allows; raises InvalidRequest."""
    if _OPTIONS in schema:
        raise InvalidRequest(f"`{param}.{_OPTIONS}` is not supported", param=f"{param}.{_OPTIONS}")
    check_counts(dict(schema), param=param)
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            dict(schema), overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise InvalidRequest(f"`{param}`: {reason_of(str(error))}", param=param) from error
    return checked_grammar(grammar, param=param)


def _schema(given: Raw, *, param: str) -> dict[str, Any]:
    """Return a schema that is an object, or JSON text of one."""
    data = bytes(given)
    check_size(data, param=param)
    if data.startswith(b'"'):
        data = decode(data, str, param=param).encode(errors="replace")
    schema = decode(data, dict[str, Any], param=param)
    check_depth(schema, param=param)
    return schema


def _of_text(text: str, *, param: str) -> str:
    """Return the grammar in `text`: Lark, or EBNF as llama.cpp writes it."""
    check_size(text.encode(errors="replace"), param=param)
    if is_gbnf(text):
        try:
            text = lark_of(text)
        except ValueError as error:
            raise InvalidRequest(f"`{param}`: {reason_of(str(error))}", param=param) from error
    return LLMatcher.grammar_from_lark(text)


def quoted(text: str) -> str:
    """Return the Lark of `text`; it is not to be empty."""
    return json.dumps(text, ensure_ascii=False)


def marker_terminal(token_id: Callable[[str], int | None], special: frozenset[int]) -> Terminal:
    """Return the Lark of markers for a tokenizer: special tokens have no text in a grammar."""

    def terminal(marker: str) -> str:
        found = token_id(marker)
        return f"<[{found}]>" if found in special else quoted(marker)

    return terminal


def in_turn(terminal: Terminal, *texts: str) -> str:
    """Return the Lark of markers and texts, one after the other; empty ones are left out."""
    return " ".join(terminal(text) for text in texts if text)
