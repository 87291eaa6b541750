"""`topspin serve --print-plan`: the plan, or the refusal, of many sets of flags, as they once were.

print_plan.txt has a paragraph for each set: its flags, and then the lines by which its plan and its
settings of the HTTP side differ from those of the first set, which has none, or the message that
refuses it. `DENSE` in place of MOE is a dense model. Every flag has a set. After a wanted change
write the file anew with `python -m tests.app.cli.test_print_plan`, and read the difference.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from app.cli import serve as serve_command
from app.cli.flags import read_gateway
from app.cli.main import _parser, main
from tests.app.cli.checkpoint import MIXTRAL, write_checkpoint
from topspin.cores import LayoutChoice

GOLDEN = Path(__file__).with_name("print_plan.txt")
DENSE = {
    **{key: value for key, value in MIXTRAL.items() if "experts" not in key},
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
MEASURED = {
    "MEASURED-SPLIT": LayoutChoice("split", "tcp", None),
    "MEASURED-ALONE": LayoutChoice("shared", "local", 3),
}
"""Words that stand for a measured layout, as the last of a set."""


@pytest.fixture(autouse=True)
def host(tmp_path: Path) -> Iterator[None]:
    with _host(tmp_path):
        yield


@contextlib.contextmanager
def _host(directory: Path) -> Iterator[None]:
    """Have two checkpoints without weights in the current directory, and four cores."""
    write_checkpoint(directory / "MOE")
    write_checkpoint(directory / "DENSE", DENSE)
    with (
        contextlib.chdir(directory),
        mock.patch.object(os, "sched_getaffinity", return_value={0, 1, 2, 3}),
    ):
        yield


def printed(flags: str) -> list[str]:
    """Return the lines that a set prints on stdout, or the line that refuses it."""
    *words, last = ["MOE", *shlex.split(flags)]
    measured = MEASURED.get(last)
    if measured is None:
        words.append(last)
    if {"DENSE", "--plan"} & set(words):
        words.remove("MOE")
    out, error = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(serve_command, "choose_layout", return_value=measured),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        contextlib.suppress(SystemExit),
    ):
        main(["serve", *words, "--print-plan"])
    if out.getvalue():
        gateway = read_gateway(_parser(["serve"]).parse_args(["serve", *words]))
        names = gateway.__struct_fields__
        http = [f"gateway.{name} = {getattr(gateway, name)!r}" for name in names]
        return [*out.getvalue().splitlines(), *http]
    # Each version of argparse lists choices in its own way.
    return [error.getvalue().splitlines()[-1].partition(" (choose from ")[0]]


def golden() -> list[tuple[str, list[str]]]:
    """Return the sets, each with the lines below it."""
    paragraphs = GOLDEN.read_text(encoding="utf-8").strip("\n").split("\n\n")
    found = [paragraph.split("\n") for paragraph in paragraphs]
    return [(flags.removeprefix("$").strip(), lines) for flags, *lines in found]


def compared(first: list[str], lines: list[str]) -> list[str]:
    """Return the lines of a plan that are not in the first one, and those that are missing."""
    if first is lines or len(lines) == 1:
        return lines
    return [line for line in difflib.ndiff(first, lines) if line[:2] in ("- ", "+ ")] or ["(same)"]


def observed(sets: list[str]) -> list[tuple[str, list[str]]]:
    """Return the sets with what they print now."""
    first = printed("")
    return [(flags, compared(first, printed(flags) if flags else first)) for flags in sets]


def test_every_flag_writes_its_plan_or_is_refused_as_before() -> None:
    sets = golden()
    assert len(sets) > 40
    for (flags, want), (_, found) in zip(sets, observed([flags for flags, _ in sets]), strict=True):
        assert found == want, flags


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, _host(Path(folder)):
        rows = observed([flags for flags, _ in golden()])
    text = "\n\n".join("\n".join([f"$ {flags}".strip(), *lines]) for flags, lines in rows)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
