"""How a part of `make gpu` says what it found: one JSON object per line on its output.

Owns the kinds of records and the flags that all parts have. A record is written at once, so
that what a part found before it was stopped is not lost. Knows no part. Called by the parts
(to write) and by benchmarks.gpu (to read).

Kinds: "device" (what it runs on), "progress" (a line for who waits), "figure" (one
measurement, with what it is of), "skipped" (what was not measured, and why), "problem" (what
went wrong: it makes the command fail).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

Record = dict[str, Any]

KINDS: Final = ("device", "progress", "figure", "skipped", "problem")


@dataclass(frozen=True)
class Recorder:
    """Writes records to a stream."""

    stream: TextIO = field(default_factory=lambda: sys.stdout)

    def write(self, kind: str, **fields: Any) -> None:
        """Write one record. Numbers that are none (NaN, infinity) are refused."""
        assert kind in KINDS, kind
        line = json.dumps({"kind": kind, **fields}, allow_nan=False)
        self.stream.write(line + "\n")
        self.stream.flush()

    def progress(self, text: str) -> None:
        """Say what is going on."""
        self.write("progress", text=text)

    def skipped(self, what: str, why: str) -> None:
        """Say that something will not be measured."""
        self.write("skipped", what=what, why=why)

    def problem(self, what: str, why: str) -> None:
        """Say what went wrong."""
        self.write("problem", what=what, why=why)


def read_record(line: str) -> Record | None:
    """Give the record of a line; None for a line that is none (a library may print, too)."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and record.get("kind") in KINDS
    return record if is_record else None


class Deadline:
    """The time that a part has, on a clock in seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._longest = 0.0

    @property
    def left(self) -> float:
        """Seconds that are left; negative when it is over."""
        return self._end - self._clock()

    def has(self, seconds: float) -> bool:
        """Say whether so many seconds are left."""
        return self.left >= seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Time a piece of work, so that others like it begin only if they can end."""
        before = self.left
        yield
        self._longest = max(self._longest, before - self.left)

    @property
    def has_another(self) -> bool:
        """Say whether the longest piece of work so far would fit once more."""
        return self.left >= self._longest


@dataclass(frozen=True)
class PartFlags:
    """What every part is told."""

    device: str
    quick: bool
    seconds: float


def flag_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Give the parser of the flags that all parts have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=(doc or "").splitlines()[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (interpreted)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: no speeds")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop what takes longer")
    return parser


def parse_flags(module: str, doc: str | None, argv: Sequence[str] | None = None) -> PartFlags:
    """Read the flags of a part that has no others."""
    args = flag_parser(module, doc).parse_args(argv)
    return PartFlags(args.device, args.quick, args.seconds)
