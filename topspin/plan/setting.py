"""The record that describes one setting of a configuration section.

Owns the record (Setting) that topspin.plan.settings attaches to every field by Annotated, the name
of a setting in messages, and the check of its range. Knows no
particular setting. app.cli.flags derives the command line from the same records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from topspin.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """The meaning of a field of a section, its range, and its flag.

    `flag` is the flag with the name of its value ("--port PORT"); None: it is only in an
    engine plan. Numbers are between the two of `within`, inclusive (None: no such bound), and
    larger than `above`. `parse` reads the flag's text (None: by the field's type) and raises
    ConfigError. A flag with a `constant` takes no text and sets that value. `none` is the word for
    None, where that is a value.
    """

    help: str
    flag: str | None = None
    within: tuple[float | None, float | None] = (None, None)
    above: float | None = None
    parse: Callable[[str], object] | None = None
    constant: object = None
    none: str = AUTO


class Field(NamedTuple):
    """A setting in its place. `type` is the field's, without its annotation."""

    section: str
    name: str
    type: Any
    default: Any
    setting: Setting

    @property
    def key(self) -> str:
        """Return its path in a configuration: `section.field`."""
        return f"{self.section}.{self.name}"

    @property
    def shown_name(self) -> str:
        """Return the name by which a user knows it: the flag, else the key."""
        return (self.setting.flag or self.key).split()[0]


def fields_of(config: type[msgspec.Struct]) -> Iterator[Field]:
    """Yield the settings of all sections of `config`, a struct, in their order."""
    for section in msgspec.structs.fields(config):
        if not (isinstance(section.type, type) and issubclass(section.type, msgspec.Struct)):
            continue
        for field in msgspec.structs.fields(section.type):
            if get_origin(field.type) is not Annotated:
                continue
            plain, setting = get_args(field.type)
            if isinstance(setting, Setting):
                yield Field(section.name, field.name, plain, field.default, setting)


def check_ranges(config: msgspec.Struct, *, by_flag: bool = True) -> None:
    """Raise ConfigError for the first number of `config` that is out of range.

    It is named by its flag, if it has one, or by its key.
    """
    for field in fields_of(type(config)):
        value = getattr(getattr(config, field.section), field.name)
        if isinstance(value, int | float) and not _is_within(value, field.setting):
            shown = format(value, "g") if isinstance(value, float) else value
            name = field.shown_name if by_flag else field.key
            raise ConfigError(f"{name} {shown}: must be {_range(field.setting)}")


def _is_within(value: float, setting: Setting) -> bool:
    low, high = setting.within
    return (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (setting.above is None or value > setting.above)
    )


def _range(setting: Setting) -> str:
    low, high = setting.within
    if low is not None and high is not None:
        return f"between {low} and {high}"
    bounds = [
        f"{words} {bound:g}"
        for words, bound in (
            ("at least", low),
            ("above", setting.above),
            ("at most", high),
        )
        if bound is not None
    ]
    return " and ".join(["a finite number", *bounds])
