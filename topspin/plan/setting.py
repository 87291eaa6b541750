"""The record that describes a setting with a flag, attached to the field that the flag writes.

Owns the record (Setting), a field with it (Field), and the check of a value by the field's type and
range, which are the field's own. Knows no particular setting: topspin.plan.flags has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import inspect

from topspin.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """The meaning of a field, and its flag.

    `flag` has the name of its value too ("--port PORT"), and `group` is the part of the help that
    shows it (None: that of the field's struct). `unset` is the word that says the same as no flag,
    where the field's default says it otherwise. `parse` reads the flag's text (None: by the
    field's type) and raises ConfigError. A flag with a `constant` takes no text and sets that
    value. `name`: the setting's in topspin.plan.from_flags (None: the field's).
    """

    help: str
    flag: str
    unset: str | None = None
    parse: Callable[[str], object] | None = None
    constant: object = None
    name: str | None = None
    group: str | None = None


class Field(NamedTuple):
    """A field of a struct, and its setting if it has a flag. `type` has its range."""

    name: str
    type: Any
    default: Any
    group: str
    setting: Setting | None

    @property
    def shown_name(self) -> str:
        """Return the name by which a user knows it: the flag, else the field's."""
        return self.name if self.setting is None else self.setting.flag.split()[0]

    @property
    def unset(self) -> str | None:
        """Return the word that sets nothing; None: there is none."""
        return None if self.setting is None else self.setting.unset

    @property
    def kind(self) -> inspect.Type:
        """Return the type of a value that is not None."""
        found = inspect.type_info(self.type)
        kinds = found.types if isinstance(found, inspect.UnionType) else (found,)
        return next(kind for kind in kinds if not isinstance(kind, inspect.NoneType))

    def check(self, value: object) -> None:
        """Raise ConfigError naming the setting, its value and its range if it is none of these."""
        try:
            msgspec.convert(value, self.type)
        except msgspec.ValidationError as error:
            shown, reason, kind = value, str(error), self.kind
            if isinstance(value, float):
                shown = format(value, "g")
            if isinstance(kind, inspect.IntType | inspect.FloatType):
                low = f"between {kind.ge}" if kind.gt is None else f"above {kind.gt}"
                reason = f"must be {low} and {'' if kind.gt is None else 'at most '}{kind.le}"
            raise ConfigError(f"{self.shown_name} {shown}: {reason}") from error


def fields_of(kind: type[msgspec.Struct], group: str) -> Iterator[Field]:
    """Yield the fields of the struct `kind` in their order."""
    for field in msgspec.structs.fields(kind):
        notes = get_args(field.type) if get_origin(field.type) is Annotated else ()
        setting = next((note for note in notes if isinstance(note, Setting)), None)
        name = setting.name if setting is not None and setting.name else field.name
        shown = setting.group if setting is not None and setting.group else group
        yield Field(name, field.type, field.default, shown, setting)
