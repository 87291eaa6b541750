"""The classes of fields that a request body has, and the reading of a body by them.

The structs of bodies are the one table of fields. A field that is listed plainly is implemented;
one listed as `Ignored` is documented by OpenAI, Anthropic, vLLM or llama.cpp and does not affect
the answer here, so it is accepted and reported; one listed as `Refused` would affect the answer
and is not implemented, so that only its neutral values pass. Any other field is unknown: refused,
or by the operator's wish (--unknown-fields ignore) left out and reported too. Null always means
"not given". Knows no body by name; docs/api.md explains their fields (a test compares it with the
structs).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw

from server.gateway.bodies.decoding import UnknownField, decode, decode_each, structs_in
from server.sampling_limits import MAX_COUNT, MAX_LOGPROBS
from topspin.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_NAME_CHARS = 256
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_TOOL_NAME_CHARS = 128
MAX_SHOWN: Final = 64
"""So many ignored fields are named."""
# Of names that a header may have; the others are told as their number.
_PLAIN: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
# How the OpenAPI document names a schema.
SCHEMA_REF = "#/components/schemas/{name}"
MESSAGE_LIST_SCHEMA: dict[str, object] = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES}
_Value = TypeVar("_Value")
_IGNORED = Meta(extra={"is_ignored": True})
NOT_GIVEN = Raw(b"null")
# As a factory: msgspec cannot show a default of this type in a JSON schema.
ABSENT: Any = msgspec.field(default_factory=lambda: NOT_GIVEN)
# A field of this type is checked for its JSON type and has no effect on the answer.
Ignored = Annotated[_Value | None, _IGNORED]
Object = dict[str, Raw]
MessageList = Annotated[list[Raw], Meta(min_length=1, max_length=MAX_MESSAGES)]


def neutral(*values: object, why: str = "") -> Meta:
    """Mark a Raw field as refused unless it has one of `values`, which change nothing."""
    return Meta(extra={"neutral": values, "why": why})


def items_of(name: str, *, may_be_null: bool = False) -> Meta:
    """Describe a Raw field as a MessageList of the schema `name`, or of null."""
    schema = {**MESSAGE_LIST_SCHEMA, "items": {"$ref": SCHEMA_REF.format(name=name)}}
    return Meta(extra_json_schema={"anyOf": [schema, {"type": "null"}]} if may_be_null else schema)


# A field of one of these types is refused unless null, false, or an empty value.
Refused = Annotated[Raw, neutral()]
RefusedSwitch = Annotated[Raw, neutral(False)]
RefusedList = Annotated[Raw, neutral([])]
RefusedObject = Annotated[Raw, neutral({})]


class BodyFields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A JSON object of a request."""


ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]+$", max_length=MAX_TOOL_NAME_CHARS)]


class FieldClasses(NamedTuple):
    """The fields not implemented: ignored ones, and refused ones with their neutral values.

    `nested` are those that hold fields themselves, or lists of such objects; `reasons` say why some
    are refused.
    """

    ignored: tuple[str, ...]
    refused: dict[str, tuple[object, ...]]
    nested: tuple[str, ...]
    reasons: dict[str, str]


@cache
def field_classes(kind: type[BodyFields]) -> FieldClasses:
    """Return the fields of `kind` that are ignored or refused, and those that are nested."""
    fields = msgspec.structs.fields(kind)
    marks = [
        (field.name, meta.extra)
        for field in fields
        for meta in get_args(field.type)[1:]
        if isinstance(meta, Meta) and meta.extra
    ]
    return FieldClasses(
        ignored=tuple(name for name, mark in marks if "is_ignored" in mark),
        refused={name: mark["neutral"] for name, mark in marks if "neutral" in mark},
        nested=tuple(field.name for field in fields if _holds_fields(field.type)),
        reasons={name: mark["why"] for name, mark in marks if mark.get("why")},
    )


def _holds_fields(kind: object) -> bool:
    if isinstance(kind, type) and issubclass(kind, BodyFields):
        return True
    return any(_holds_fields(each) for each in get_args(kind))


def check_fields(fields: BodyFields, *, param: str = "", shown: str = "") -> dict[str, None]:
    """Return the ignored fields that are set here and in nested objects, as the keys of a dict.

    They are prefixed with `shown`. Raises InvalidRequest for a refused field, its name prefixed
    with `param`.
    """
    classes = field_classes(type(fields))
    for name, neutral_values in classes.refused.items():
        raw: Raw = getattr(fields, name)
        if raw is not NOT_GIVEN:
            why = classes.reasons.get(name, "")
            _refuse_set(raw, param=f"{param}{name}", neutral_values=neutral_values, why=why)
    found = {shown + name: None for name in classes.ignored if getattr(fields, name) is not None}
    for name in classes.nested:
        value = getattr(fields, name)
        if isinstance(value, BodyFields):
            found |= check_fields(value, param=f"{param}{name}.", shown=f"{shown}{name}.")
        elif isinstance(value, list):
            for idx, each in enumerate(value):
                found |= check_fields(each, param=f"{param}{name}[{idx}].", shown=f"{shown}{name}.")
    return found


def _refuse_set(raw: Raw, *, param: str, neutral_values: tuple[object, ...], why: str) -> None:
    """Raise InvalidRequest unless the field is null or has a value that changes nothing."""
    text = bytes(raw)
    if text == b"null":
        return
    # A value that is no short scalar or object cannot be neutral, and is not worth decoding.
    if len(text) > 64 or msgspec.json.decode(text) not in neutral_values:
        reason = f": {why}" if why else ""
        raise InvalidRequest(f"`{param}` is not supported by this server{reason}", param=param)


class BodyReader:
    """Reads the parts of one body, and collects the `ignored` fields that it has, in order.

    `keeps_on`: fields that no type has are among them, instead of being refused.
    """

    def __init__(self, *, keeps_on: bool = False) -> None:
        self.ignored: dict[str, None] = {}
        self._keeps_on = keeps_on

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the ignored fields, as a header may have them."""
        plain = [name for name in self.ignored if _PLAIN.fullmatch(name)][:MAX_SHOWN]
        num_others = len(self.ignored) - len(plain)
        return (*plain, *((f"and {num_others} more",) if num_others else ()))

    def read(
        self, data: bytes | Raw, kind: type[_Value], *, param: str = "", shown: str = ""
    ) -> _Value:
        """Return the object in `data`; raises InvalidRequest naming the field.

        It is the field `param`, whose ignored fields are named with `shown` before them.
        """
        try:
            value = decode(data, kind, param=param)
        except UnknownField:
            if not self._keeps_on:
                raise
            value = decode(self._known(data, kind, shown), kind, param=param)
        if isinstance(value, BodyFields):
            self.ignored |= check_fields(value, param=f"{param}." if param else "", shown=shown)
        return value

    def read_each(
        self,
        items: Sequence[Raw],
        kind: Any,
        *,
        param: str,
        check: Callable[[Any, str], None] = lambda value, place: None,
    ) -> list[Any]:
        """Return the objects of the list `param`; raises as `read`.

        `check` gets each and its place, and may refuse it with words of its own.
        """
        try:
            values = decode_each(items, kind, param=param)
        except UnknownField:
            if not self._keeps_on:
                raise
            known = [self._known(item, kind, f"{param}.") for item in items]
            values = decode_each(known, kind, param=param)
        for idx, value in enumerate(values):
            check(value, f"{param}[{idx}]")
            self.ignored |= check_fields(value, param=f"{param}[{idx}].", shown=f"{param}.")
        return values

    def _known(self, data: bytes | Raw, kind: Any, shown: str) -> Raw:
        """Return `data` without the fields that `kind` does not have, and name them.

        What is no object, or of no kind, stays as it is, to be refused.
        """
        if not structs_in(kind):
            return Raw(data)
        begin = bytes(data).lstrip()[:1]
        if begin == b"[":
            items = [self._known(each, kind, shown) for each in decode(data, list[Raw])]
            return Raw(msgspec.json.encode(items))
        given = decode(data, dict[str, Raw]) if begin == b"{" else {}
        struct = _struct_of(kind, given)
        if struct is None:
            return Raw(data)
        known: dict[str, Raw] = {}
        types = {field.name: field.type for field in msgspec.structs.fields(struct)}
        for name, value in given.items():
            if name in types:
                known[name] = self._known(value, types[name], f"{shown}{name}.")
            elif name == struct.__struct_config__.tag_field:
                known[name] = value
            else:
                self.ignored[shown + name] = None
        return Raw(msgspec.json.encode(known))


def _struct_of(kind: Any, given: dict[str, Raw]) -> type[msgspec.Struct] | None:
    """Return the struct of `kind` that an object is: of several the one of its tag."""
    structs = structs_in(kind)
    if len(structs) < 2:
        return structs[0] if structs and given else None
    for each in structs:
        tag = each.__struct_config__
        if tag.tag_field and bytes(given.get(tag.tag_field, b"")) == msgspec.json.encode(tag.tag):
            return each
    return None
