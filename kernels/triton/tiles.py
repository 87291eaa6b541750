"""Tile sizes per device and shape, as a tuner measured them; defaults where it did not.

Owns the files kernels/tuned/<device>.json, `{op: {shape: {field: number}}}`, each read once.
What an op's shape is called and which fields it has is the op's; a default is a frozen
dataclass whose fields an entry may replace. Knows neither triton nor a kernel. Called by
the Triton ops before a launch, and by the tuner for the name of the file.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from topspin.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Tiles = TypeVar("Tiles", bound=DataclassInstance)

FOLDER: Final = Path(__file__).parent / "tuned"

Table = dict[str, dict[str, dict[str, int]]]


def table_path(device_name: str) -> Path:
    """Name the file of a device called, for example, "NVIDIA H200"."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json")


@cache
def read_table(path: Path) -> Table:
    """Read a file of tiles; {} if there is none. Raises ConfigError for one that is no table."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    shapes = [s for by_shape in _values(path, table) for s in _values(path, by_shape)]
    if not all(type(number) is int for entry in shapes for number in _values(path, entry)):
        raise ConfigError(f"{path}: tile sizes are integers")
    found: Table = table
    return found


def _values(path: Path, table: object) -> list[object]:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected {{op: {{shape: {{field: number}}}}}}, found {table!r}")
    return list(table.values())


@cache
def _device_path(index: int | None) -> Path:
    return table_path(torch.cuda.get_device_name(index))


def tiles_for(op: str, shape: str, default: Tiles, device: torch.device) -> Tiles:
    """Give `default` with the fields that were tuned for this op, shape and device.

    Raises ConfigError for a table that has a field which the op does not know.
    """
    if device.type != "cuda":
        return default
    path = _device_path(device.index)
    return merged(read_table(path), op, shape, default, path)


def merged(table: Table, op: str, shape: str, default: Tiles, path: Path) -> Tiles:
    """Replace fields of `default` by a table's entry for the op and shape, if it has one."""
    entry = table.get(op, {}).get(shape, {})
    unknown = entry.keys() - {field.name for field in fields(default)}
    if unknown:
        raise ConfigError(f"{path}: {op} of {shape} has no tile size {', '.join(sorted(unknown))}")
    return replace(default, **entry)
