"""Reads a dataset's file, with errors that name file, line and reason.

Owns the checks of single values. Knows no dataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from topspin.errors import ConfigError


class DatasetPlace(NamedTuple):
    """A place in a file: a line, or an entry of a JSON list, from 1."""

    path: Path
    kind: str
    number: int

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path}: {self.kind} {self.number}: {reason}")


class DatasetEntry(NamedTuple):
    """One object of a file, with checks that name it when they fail."""

    place: DatasetPlace
    fields: Mapping[str, Any]

    def number(self, name: str, *, least: float) -> float:
        """Return field `name`, a number of at least `least`."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
            raise self.place.error(f"{name} must be a number of at least {least}, not {value!r}")
        return float(value)

    def whole(self, name: str, *, least: int) -> int:
        """Return field `name`, a whole number of at least `least`."""
        value = self.number(name, least=least)
        if not value.is_integer():
            raise self.place.error(f"{name} must be a whole number, not {value}")
        return int(value)

    def ids(self, name: str) -> list[int]:
        """Return field `name`, a list of whole numbers from 0."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(type(x) is int and x >= 0 for x in value):
            raise self.place.error(f"{name} must be a list of whole numbers from 0")
        return value


def read_text(path: Path) -> str:
    """Return the file's text. Raises ConfigError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def json_entries(path: Path) -> Iterator[DatasetEntry]:
    """Yield the objects of a file that holds one JSON list."""
    try:
        found = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DatasetPlace(path, "line", error.lineno).error(f"is not JSON: {error.msg}") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path}: must hold a JSON list, not a {type(found).__name__}")
    for number, value in enumerate(found, 1):
        yield _entry(DatasetPlace(path, "entry", number), value)


def jsonl_entries(path: Path) -> Iterator[DatasetEntry]:
    """Yield the objects of a file with one JSON object per line; empty lines are skipped."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        place = DatasetPlace(path, "line", number)
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise place.error(f"is not JSON: {error.msg}") from error
        yield _entry(place, value)


def _entry(place: DatasetPlace, value: Any) -> DatasetEntry:
    if not isinstance(value, dict):
        raise place.error(f"must be a JSON object, not a {type(value).__name__}")
    return DatasetEntry(place, value)
