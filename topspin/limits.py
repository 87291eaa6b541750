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


def check_copies(redundant_experts: int, num_nodes: int, num_experts: int) -> None:
    """Check the second copies against what the expert nodes can hold."""
    most = num_experts * (num_nodes - 1) if num_nodes else 0
    if redundant_experts > most:
        raise ConfigError(
            f"--redundant-experts {redundant_experts}: {num_nodes} expert nodes hold "
            f"{most} second copies of {num_experts} experts at most, never two on one node"
        )
