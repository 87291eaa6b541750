"""Checks of one number of the settings each, with the message that names its flag.

Pure. Called by topspin.config when it validates.
"""

from __future__ import annotations

import math

from topspin.errors import ConfigError


def in_range(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{option} {value}: must be between {low} and {high}")


def not_negative(option: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{option} {value}: must be a number, not negative")


def positive(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option} {value}: must be a positive number")
