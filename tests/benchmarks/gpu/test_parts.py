"""The parts of `make gpu`: their shares of the time, and what is said of missing packages."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from benchmarks.gpu_parts import (
    PARTS,
    PURPOSES,
    SERVER,
    TOTAL_SECONDS,
    advice,
    choose_parts,
    find_missing,
    seconds_for,
)

ROOT = Path(__file__).parents[3]


def test_what_a_part_leaves_goes_to_the_parts_after_it() -> None:
    left = 100.0
    first, second, *others = PARTS
    given = seconds_for(first, PARTS[1:], left)
    assert given == pytest.approx(100 * first.seconds / sum(part.seconds for part in PARTS))
    # It took a second: the next one's share is of all that is left.
    share = second.seconds / sum(part.seconds for part in PARTS[1:])
    assert seconds_for(second, others, left - 1) == pytest.approx(99 * share)
    assert seconds_for(PARTS[-1], [], 7.0) == 7.0
    assert seconds_for(first, PARTS[1:], -1.0) == 0.0


def test_the_shares_are_under_eight_minutes() -> None:
    assert sum(part.seconds for part in PARTS) <= TOTAL_SECONDS <= 480


def test_parts_run_in_their_own_order() -> None:
    assert choose_parts(None) == list(PARTS)
    assert [part.name for part in choose_parts(["decode", "tests"])] == ["tests", "decode"]
    with pytest.raises(ValueError, match="no part speed; there are: tests, rooflines"):
        choose_parts(["tests", "speed"])


def test_missing_packages_are_named_with_what_waits_for_them() -> None:
    there = {"torch", "triton", "numpy", "pytest", "numba", *SERVER} - {"fastapi", "rich"}
    missing = find_missing(PARTS, there.__contains__)
    assert {m.package: (m.parts, m.partly) for m in missing} == {
        "msgspec": (("decode",), ("tests",)),
        "transformers": (("transformers",), ("tests",)),
        **dict.fromkeys(("zmq", "fastapi", "rich"), ((), ("tests",))),
    }
    text = advice(missing, "3.12.1")
    assert (
        "msgspec is missing (for the configuration and the plans of a step): "
        "decode will not run; some of tests will not run" in text
    )
    assert "pip download" in text
    assert "--python-version 3.12.1" in text
    assert "fastapi, rich are missing (for the server in front of them): some of tests" in text
    # pip knows it by another name.
    assert "-d wheels msgspec transformers pyzmq fastapi rich" in text
    assert find_missing(choose_parts(["rooflines"]), there.__contains__) == []


def test_no_wheel_of_torch_is_asked_for() -> None:
    missing = find_missing(choose_parts(["rooflines"]), {"numpy"}.__contains__)
    assert [m.package for m in missing] == ["torch", "triton"]
    assert "download" not in advice(missing, "3.12.1")


def test_every_package_has_a_purpose_and_every_part_a_module() -> None:
    named = {package for part in PARTS for package in (*part.packages, *part.some_need)}
    assert named == set(PURPOSES)
    for part in PARTS:
        assert importlib.util.find_spec(part.module) is not None


@pytest.mark.parametrize("name", ["gpu", "gpu_parts", "gpu_run", "gpu_records", "gpu_report"])
def test_the_command_itself_needs_nothing_that_may_be_missing(name: str) -> None:
    """It has to run to say what is missing."""
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())
    tops = {
        alias.name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {node.module.split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not tops & {*PURPOSES, "kernels", "models", "rich"}
