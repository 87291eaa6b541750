"""The classes of fields that a request body has, and their check.

The structs of bodies are the one table of fields. A field that is listed plainly is implemented;
one listed as `Ignored` is documented by OpenAI, Anthropic, vLLM or llama.cpp and does not affect
the answer here, so it is accepted and reported; one listed as `Refused` would affect the answer
and is not implemented, so that only its neutral values pass. Any other field is unknown. Null
always means "not given". Knows no body by name; docs/api.md explains their fields (a test compares
it with the structs).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw

from server.sampling_limits import MAX_COUNT, MAX_LOGPROBS
from topspin.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_NAME_CHARS = 256
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_TOOL_NAME_CHARS = 128
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
