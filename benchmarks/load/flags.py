"""Settings whose fields are flags: one line says the flag, its default, its help and its bounds.

Owns the way from a field to the flag and back. Knows no setting. Called by the settings of the load
tester and by the commands that read them.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, TypeVar

from topspin.errors import ConfigError

T = TypeVar("T")


def flag(
    name: str,
    default: Any = None,
    text: str | None = None,
    *,
    least: float | None = None,
    above: float | None = None,
    **options: Any,
) -> Any:
    """Return a field that the flag `name` sets; `options` are argparse's.

    Values below `least`, or not above `above`, are refused.
    """
    settings = {"help": text, **options}
    metadata = {"flag": name, "options": settings, "least": least, "above": above}
    return dataclasses.field(default=default, metadata=metadata)


def number(
    name: str, default: float | None, text: str | None = None, *, kind: Any = float, **bounds: float
) -> Any:
    """Return a field that the flag `name` sets to a number, of `kind` and within the bounds."""
    return flag(name, default, text, type=kind, metavar="N", **bounds)


def add_flags(group: argparse._ActionsContainer, settings: type[Any]) -> None:
    """Add the flags of a settings class; those that are not given are None."""
    for field in dataclasses.fields(settings):
        if "flag" in field.metadata:
            names = field.metadata["flag"].split()
            options = {"default": None, "dest": _name(names[0]), **field.metadata["options"]}
            group.add_argument(*names, **options)


def read_flags(settings: type[T], parsed: argparse.Namespace, **others: Any) -> T:
    """Return the settings of the flags that were given, and `others`.

    Raises ConfigError naming a flag whose value is out of its bounds.
    """
    return settings(**given(settings, parsed), **others)


def given(settings: type[Any], parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the fields whose flags were given, in order."""
    found = {
        field.name: getattr(parsed, _name(field.metadata["flag"].split()[0]), None)
        for field in dataclasses.fields(settings)
        if "flag" in field.metadata
    }
    return {name: value for name, value in found.items() if value is not None}


def check_bounds(settings: Any) -> None:
    """Raise ConfigError naming the first flag whose value is out of its bounds."""
    for field in dataclasses.fields(settings):
        value, least = getattr(settings, field.name), field.metadata.get("least")
        above = field.metadata.get("above")
        if value is None:
            continue
        named = f"{field.metadata.get('flag', '').split(' ')[0]} is {value}"
        if least is not None and not value >= least:
            raise ConfigError(f"{named}; it must be {least:g} or more")
        if above is not None and not value > above:
            raise ConfigError(f"{named}; it must be above {above:g}")


def flag_of(settings: type[Any], name: str) -> str:
    """Return the flag of a field."""
    found: str = settings.__dataclass_fields__[name].metadata["flag"].split()[0]
    return found


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
