"""docs/limits.md: its numbers are the code's."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Row(NamedTuple):
    """A limit: its number with its unit, and MODULE:NAME."""

    what: str
    limit: str
    name: str


def rows() -> list[Row]:
    """Return the rows of all tables that name a constant."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    assert all(len(each) == 4 for each in cells)
    return [Row(what, limit, name.strip("`")) for what, limit, name, _ in cells if "`" in name]


def test_the_page_has_limits_of_every_wire() -> None:
    names = [row.name for row in rows()]
    assert len(names) == len(set(names)) > 40
    for prefix in (
        "server.gateway.http.",
        "topspin.processes.channel:",
        "m2n_comm.",
        "topspin.processes.keys:",
    ):
        assert any(name.startswith(prefix) for name in names)


def said(row: Row) -> float:
    """Return the number on the page."""
    number, unit = re.fullmatch(r"([0-9,.]+) ?(\w*)", row.limit).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * UNITS.get(unit, 1)


def of_the_code(row: Row) -> Any:
    """Return the number of the constant."""
    module, _, path = row.name.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    if not isinstance(value, int | float):  # the default of a setting
        section = getattr(importlib.import_module(module), path.partition(".")[0])
        value = getattr(section(), path.partition(".")[2])
    return value


def test_the_numbers_are_the_codes() -> None:
    assert {row.name: said(row) for row in rows()} == {row.name: of_the_code(row) for row in rows()}
