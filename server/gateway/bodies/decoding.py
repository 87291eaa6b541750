"""JSON to checked values, with errors that name the field; long lists piece by piece.

Owns the messages of these errors. A call of msgspec holds the interpreter's lock, and with it the
event loop, until it returns: what may be long is read as Raw first, which is fast, and then in
parts. Knows no fields; server.gateway.bodies.fields and the dialects call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Raw

from server.gateway.errors import truncated
from topspin.errors import InvalidRequest

# Some 10,000 token ids, which take under a millisecond.
PIECE_BYTES = 64 * 1024
# Of objects and lists in each other where a client chooses them (schemas, arguments of calls).
# llguidance's own limit is 128, and Python's recursion has one.
MAX_DEPTH = 120

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_FIELD = re.compile(
    r"Object (?:contains unknown|missing required) field `(.*?)`(?: - at `\$|$)", re.DOTALL
)
# A pair of surrogates, or as group 1 one alone, or another escape.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_Value = TypeVar("_Value")


class UnknownField(InvalidRequest):
    """The object has a field that its type does not have."""


def decode(data: bytes | Raw, kind: type[_Value], *, param: str = "") -> _Value:
    """Return the value in `data`; raises InvalidRequest for a part of the field `param`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except _ERRORS as error:
        raise _invalid(error, param, data, kind) from None


def decode_each(items: Sequence[Raw], kind: type[_Value], *, param: str) -> list[_Value]:
    """Return the values of the list `param`, item by item; raises as decode."""
    decoder = msgspec.json.Decoder(kind)
    values: list[_Value] = []
    for item in items:
        try:
            values.append(decoder.decode(item))
        except _ERRORS as error:
            raise _invalid(error, f"{param}[{len(values)}]", item, kind) from None
    return values


def decode_pieces(data: bytes, kind: type[list[_Value]], *, param: str) -> Iterator[list[_Value]]:
    """Yield the numbers in a JSON list of nothing else, some 10,000 at a time; raises as decode."""
    start, num_before = 1, 0
    while start < len(data):
        end = data.find(b",", start + PIECE_BYTES)
        end = len(data) - 1 if end < 0 else end
        where = f"{param}[{num_before}:]" if num_before else param
        piece = decode(b"[%b]" % data[start:end], kind, param=where)
        yield piece
        start = end + 1
        num_before += len(piece)


def check_depth(value: object, *, param: str) -> None:
    """Raise InvalidRequest for a JSON value nested more deeply than MAX_DEPTH."""
    level, depth = [value], 0
    while level := [child for parent in level for child in _children(parent)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep(param)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep(param: str) -> InvalidRequest:
    where = f"`{param}`" if param else "the request body"
    return InvalidRequest(f"{where} is nested too deeply", param=param or None)


@cache
def structs_in(kind: Any) -> tuple[type[msgspec.Struct], ...]:
    """Return the structs that a value of the type `kind`, or of its items, may be."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return (kind,)
    return tuple(dict.fromkeys(each for part in get_args(kind) for each in structs_in(part)))


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of `kind`, and of the structs in them."""
    names: dict[str, None] = {}
    for struct in structs_in(kind):
        for field in msgspec.structs.fields(struct):
            names[field.name] = None
            names |= dict.fromkeys(_field_names(field.type))
    return tuple(names)


def _invalid(error: Exception, prefix: str, data: bytes | Raw, kind: Any) -> InvalidRequest:
    """Return an InvalidRequest for msgspec's error; `prefix` and the path become `param`."""
    if isinstance(error, RecursionError):
        return _too_deep(prefix)
    if not isinstance(error, msgspec.ValidationError):
        where = f"`{prefix}`" if prefix else "the request body"
        if lone := next((each[1] for each in _ESCAPE.finditer(data) if each[1]), None):
            return InvalidRequest(
                f"{where} is not valid Unicode: it has the lone surrogate \\{lone.decode()}",
                param=prefix or None,
            )
        return InvalidRequest(f"{where} is not valid JSON: {error}", param=prefix or None)
    message = str(error)
    found = _PATH.search(message)
    path = found.group(1).removesuffix("[...]") if found else ""
    if prefix:
        path = f"{prefix}.{path}" if path and not path.startswith("[") else prefix + path
    reason = message[: found.start()] if found else message
    named = _FIELD.match(message)
    if named is None:
        param = truncated(path, 128)
        return InvalidRequest(
            f"`{param}`: {reason}" if param else f"the request body: {reason}", param=param or None
        )
    field = truncated(named.group(1), 64)
    param = f"{path}.{field}" if path else field
    if "missing required" in message[:24]:
        return InvalidRequest(f"missing required field `{param}`", param=param)
    near = get_close_matches(field, _field_names(kind), n=1, cutoff=0.75)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return UnknownField(f"unknown or unsupported field `{param}`{hint}", param=param)
