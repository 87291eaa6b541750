"""Typed access to a JSON object of unknown origin.

Owns turning a missing or ill-typed value of a checkpoint's JSON files into a ConfigError
that names the file, the option and the value. Knows nothing about models; models.description.config
and models.description.rope_config call it. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from topspin.errors import ConfigError

MAX_INT: Final = 2**31 - 1


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in `path`; ConfigError if missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; is this a HuggingFace checkpoint?") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, not a JSON object")
    return value


class ConfigFields:
    """One JSON object and its file; errors of every reader name the file and the option."""

    def __init__(
        self,
        raw: Mapping[str, object],
        *,
        source: str,
        defaults: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Wrap `raw`; an option that it lacks has its value in `defaults`, null is a value."""
        self.raw = {**defaults, **raw}
        self.source = source
        self._given = frozenset(raw)
        self._defaults = defaults

    def is_default(self, option: str) -> bool:
        """Return whether the object itself lacks the option."""
        return option not in self._given

    def default(self, option: str) -> object:
        """Return the option's value in the defaults, {} if it has none."""
        return self._defaults.get(option, {})

    def error(self, option: str, reason: str) -> ConfigError:
        """Return the error for `option`: its value and the `reason`."""
        return ConfigError(f"{self.source}: {option} = {self.raw.get(option)!r}: {reason}")

    def missing(self, option: str) -> ConfigError:
        """Return the error for a required option that is missing."""
        return ConfigError(f"{self.source}: {option} is missing")

    def optional_int(self, option: str) -> int | None:
        """Return an integer, or None when the option is absent or null."""
        value = self.raw.get(option)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(option, "must be an integer")
        if abs(value) > MAX_INT:
            raise self.error(option, f"must be {MAX_INT} at most")
        return value

    def positive_int(self, option: str, *, default: int | None = None, most: int = MAX_INT) -> int:
        """Return an integer from 1 to `most`; required unless `default` is given."""
        value = self.optional_int(option)
        if value is None:
            if default is None:
                raise self.missing(option)
            return default
        if value <= 0:
            raise self.error(option, "must be positive")
        if value > most:
            raise self.error(option, f"must be {most} at most")
        return value

    def aliased_int(self, *options: str, least: int = 0) -> int:
        """Return the integer, at least 0 or 1, given by `options`, which must not disagree."""
        values = {option: self.optional_int(option) for option in options}
        given = {option: value for option, value in values.items() if value is not None}
        if not given:
            raise self.missing(" or ".join(options))
        if len(set(given.values())) > 1:
            raise ConfigError(f"{self.source}: {given} name one thing and disagree")
        option, value = next(iter(given.items()))
        if value < least:
            raise self.error(option, "must be positive" if least else "must not be negative")
        return value

    def number(self, option: str, *, default: float | None = None) -> float:
        """Return a float (or an integer as one); required unless `default` is given."""
        value = self.raw.get(option)
        if value is None:
            if default is None:
                raise self.missing(option)
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(option, "must be a number")
        return float(value)

    def optional_number(self, option: str) -> float | None:
        """Return a float, or None when the option is absent or null."""
        return None if self.raw.get(option) is None else self.number(option)

    def flag(self, option: str, *, default: bool) -> bool:
        """Return a boolean; `default` when absent or null."""
        value = self.raw.get(option)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(option, "must be true or false")
        return value

    def int_list(self, option: str) -> list[int]:
        """Return a list of integers; one integer counts as a list of one, null as empty."""
        value = self.raw.get(option)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
            raise self.error(option, "must be an integer or a list of integers")
        return list(values)

    def names(self, option: str) -> list[str]:
        """Return a list of strings; empty when the option is absent or null."""
        value = self.raw.get(option)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise self.error(option, "must be a list of names")
        return list(values)
