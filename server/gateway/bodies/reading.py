"""The reading of one request's body: checked values, and the names of what has no effect.

Owns what becomes of fields that no type here has: refused, or by the operator's wish
(--unknown-fields ignore) left out and named like those that are documented and ignored. Knows no
body by name; server.gateway.dialects calls it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from server.gateway.bodies.decoding import UnknownField, decode, decode_each, structs_in
from server.gateway.bodies.fields import BodyFields, check_fields

# Of names that a header may have; the others are told as their number.
_PLAIN: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
MAX_SHOWN: Final = 64
"""So many ignored fields are named."""
_Value = TypeVar("_Value")


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
