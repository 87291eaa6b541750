"""Text in which some marks begin what must have a form: vLLM's `structural_tag` to a grammar.

Owns both of its forms, the older with `structures` and `triggers` and the newer with `format`, of
which it takes tags behind triggers. The grammar's own form is llguidance's. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from llguidance import StructTag
from msgspec import Meta, Raw

from server.gateway.bodies.decoding import decode
from server.gateway.bodies.fields import BodyFields
from server.gateway.grammars.json_schemas import check_counts, closed
from topspin.errors import InvalidRequest

_Mark = Annotated[str, Meta(min_length=1, max_length=256)]
_End = Annotated[str, Meta(max_length=256)]
_MAX_TAGS = 256


class Structure(BodyFields, kw_only=True, frozen=True):
    """What stands between two marks: JSON of a schema."""

    begin: _Mark
    schema: dict[str, Any]
    end: _End = ""


class SchemaContent(BodyFields, kw_only=True, frozen=True):
    """The same in the newer form."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class Tag(BodyFields, kw_only=True, frozen=True):
    """The same in the newer form."""

    begin: _Mark
    content: SchemaContent
    end: _End | list[_End] = ""
    type: Literal["tag"] = "tag"


class TriggeredTags(BodyFields, kw_only=True, frozen=True):
    """Tags in text, in the newer form."""

    type: Literal["triggered_tags"]
    triggers: Annotated[list[_Mark], Meta(min_length=1, max_length=_MAX_TAGS)]
    tags: Annotated[list[Tag], Meta(min_length=1, max_length=_MAX_TAGS)]


class StructuralTag(BodyFields, kw_only=True, frozen=True):
    """`structures` and `triggers`, or a `format`."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Structure], Meta(min_length=1, max_length=_MAX_TAGS)] | None = None
    triggers: Annotated[list[_Mark], Meta(min_length=1, max_length=_MAX_TAGS)] | None = None
    format: TriggeredTags | None = None


def tag_grammar(data: Raw, *, param: str, whitespace: str) -> str:
    """Return the grammar of a `structural_tag`, an object or JSON text of one.

    `whitespace` is the regular expression of what may stand between two parts of JSON. Raises
    InvalidRequest naming the field.
    """
    text = decode(data, str, param=param).encode() if bytes(data)[:1] == b'"' else data
    given = decode(text, StructuralTag, param=param)
    structures, triggers = given.structures, given.triggers
    if given.format is not None and structures is None and triggers is None:
        triggers = given.format.triggers
        structures = [_structure(tag, param=param) for tag in given.format.tags]
    elif given.format is not None or structures is None or triggers is None:
        raise InvalidRequest(
            f"`{param}` needs `structures` and `triggers`, or a `format` alone", param=param
        )
    tags = [_tag(each, triggers, param=param, whitespace=whitespace) for each in structures]
    return StructTag.to_grammar(tags, assume_special=False)


def _structure(tag: Tag, *, param: str) -> Structure:
    ends = tag.end if isinstance(tag.end, list) else [tag.end]
    if len(ends) != 1:
        raise InvalidRequest(f"`{param}`: a tag has one `end` here", param=f"{param}.format")
    return Structure(begin=tag.begin, schema=tag.content.json_schema, end=ends[0])


def _tag(
    structure: Structure, triggers: Sequence[str], *, param: str, whitespace: str
) -> StructTag:
    trigger = max((each for each in triggers if structure.begin.startswith(each)), default=None)
    if trigger is None:
        begin = json.dumps(structure.begin)
        raise InvalidRequest(f"`{param}`: no trigger begins {begin}", param=param)
    check_counts(structure.schema, param=param)
    schema: Mapping[str, Any] = closed(structure.schema)
    options = {"lenient": False, "whitespace_pattern": whitespace}
    grammar = msgspec.json.encode({**schema, "x-guidance": options}).decode()
    return StructTag(trigger=trigger, begin=structure.begin, grammar=grammar, end=structure.end)
