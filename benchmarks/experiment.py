"""A benchmark as all of them are run: flags, rounds in turn, and a result that is shown and kept.

Owns the flags that every benchmark has, the order of turns within a round, the end by a signal or
an error, the tables (columns over the keys of a result's JSON, the same on a terminal and in
benchmarks/README.md), the JSON file and the picture beside it. Knows nothing of what is measured.
Called by every benchmark, and by benchmarks.tables for the tables of results that are committed.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import statistics
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from rich import table as rich_table
from rich.box import SIMPLE
from rich.console import Console
from rich.text import Text

from benchmarks import report
from topspin.errors import ConfigError, TopspinError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart without red and green.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# A file or a pipe has no width to fit, and a folded table is hard to read.
_PLAIN_WIDTH: Final = 140
_OWN_FLAGS: Final = ("name", "no_write", "result_dir")

Result = Mapping[str, Any]
"""An object of a result's JSON."""

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")


def number(value: float | None) -> str:
    """Return a figure with about three digits; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


class _Cells(string.Formatter):
    """str.format, but None is "-" and a float without a format has about three digits."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or (isinstance(value, float) and not format_spec):
            return number(value)
        return format(value, format_spec)


_CELLS: Final = _Cells()


def cell(form: str, row: Result) -> str:
    """Return a str.format text of a row's keys; None is "-"."""
    return _CELLS.vformat(form, (), row)


class TextTable(NamedTuple):
    """A table of texts: the first column left-aligned, the others right-aligned."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return it as markdown."""
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)], *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def rich(self) -> rich_table.Table:
        """Return it for a terminal."""
        shown = rich_table.Table(box=SIMPLE)
        for idx, heading in enumerate(self.headings):
            shown.add_column(heading, justify="right" if idx else "left")
        for row in self.rows:
            shown.add_row(*map(Text, row))
        return shown


def table(columns: Mapping[str, str], rows: Iterable[Result]) -> TextTable:
    """Return a table of JSON objects; `columns` is heading -> a str.format text of a row's keys."""
    cells = [[cell(each, row) for each in columns.values()] for row in rows]
    return TextTable(list(columns), cells)


def rows_of(columns: Mapping[str, str]) -> Callable[[Result], Iterable[TextTable]]:
    """Return the layout of a result whose "rows" are one table."""
    return lambda result: [table(columns, result["rows"])]


class Spread(NamedTuple):
    """Median, least and greatest of the rounds' values, and the values in order."""

    median: float
    least: float
    greatest: float
    rounds: list[float]


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), list(values))


def ratio_text(ratios: Sequence[float]) -> str:
    """Return the median of rounds' ratios, with the least and the greatest in brackets."""
    median, least, greatest, _ = spread(ratios)
    return f"{median:.2f}x [{least:.2f}..{greatest:.2f}]"


def rounds_in_turn(
    things: Mapping[K, T], measure: Callable[[T, int], R], *, rounds: int, warm_ups: int = 1
) -> list[dict[K, R]]:
    """Measure every thing once a round, and return each round's values by name.

    `measure` gets the thing and the round's number. The first in a round is the last in the next,
    so that slow moments of a machine meet all. Rounds below 0 warm up and are left out.
    """
    found = []
    for turn in range(-warm_ups, rounds):
        order = list(things)[:: 1 if turn % 2 else -1]
        values = {name: measure(things[name], turn) for name in order}
        if turn >= 0:
            found.append({name: values[name] for name in things})
            say(f"round {turn + 1} of {rounds}")
    return found


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process by SystemExit, so that started servers are stopped.

    An ignored SIGHUP stays ignored: the command was started under nohup.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show(parts: Iterable[TextTable | str | Text], console: Console | None = None) -> None:
    """Print tables and lines (None: to stdout)."""
    console = console or Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    for part in parts:
        shown = Text(part) if isinstance(part, str) else part
        console.print(
            shown.rich() if isinstance(shown, TextTable) else shown,
            soft_wrap=isinstance(shown, Text),
        )


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_positive(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ConfigError naming the first of these arguments that is not above 0."""
    for name in names:
        if not getattr(args, name) > 0:
            shown = name.replace("_", "-")
            raise ConfigError(f"--{shown} is {getattr(args, name)}; it must be above 0")


@dataclass(frozen=True)
class Experiment:
    """A benchmark: the name of its result, the text of --help, its tables and its picture.

    `layout` gives a result's tables, and lines of text between them. `draw` fills a figure.
    `command` is how it is run, without its flags (topspin bench NAME).
    """

    name: str
    about: str | None
    layout: Callable[[Result], Iterable[TextTable | str]]
    draw: Callable[[Result, Figure], None] | None = None
    command: str | None = None

    def parser(
        self,
        *,
        model: str | None = None,
        rounds: int | None = None,
        folder: Path | None = None,
        epilog: str | None = None,
    ) -> argparse.ArgumentParser:
        """Return the parser of the flags that all have; MODEL and --rounds only with a default."""
        command = self.command or f"topspin bench {self.name.replace('_', '-')}"
        parser = argparse.ArgumentParser(
            prog=command, description=self.about, epilog=epilog, allow_abbrev=False
        )
        if model is not None:
            parser.add_argument("model", nargs="?", default=model, help="(%(default)s)")
        group = parser.add_argument_group("result")
        if rounds is not None:
            group.add_argument("--rounds", type=int, default=rounds, help="(%(default)s)")
        group.add_argument("--name", default=self.name, help="of the files (%(default)s)")
        group.add_argument("--no-write", action="store_true", help="print only")
        group.add_argument(
            "--result-dir",
            type=Path,
            default=folder,
            metavar="DIR",
            help=f"folder ({folder or 'benchmarks/results'})",
        )
        return parser

    def finish(self, args: argparse.Namespace, result: Result) -> int:
        """Print the result's tables, and write JSON and picture; returns the exit status."""
        show(self.layout(result))
        if args.no_write:
            return 0
        path = report.write(args.name, dict(result), args.result_dir)
        print(f"Written to {path}")
        if self.draw is not None:
            self.picture(result, path.with_suffix(".png"))
        return 0

    def run_rounds(
        self,
        args: argparse.Namespace,
        measure: Callable[[int], R],
        result: Callable[[list[R]], Result],
        *,
        check: Callable[[R], None] | None = None,
    ) -> int:
        """Measure args.rounds rounds and finish with what `result` makes of the complete ones.

        Returns the exit status: 0, or 128 + n after signal n. Raises what ended the rounds, or what
        `check` found in one, after the others are written.
        """
        rounds: list[R] = []
        status, failure = 0, None
        try:
            with ended_by_signals():
                for turn in range(args.rounds):
                    rounds.append(measure(turn))
                    if check is not None:
                        check(rounds[-1])
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except SystemExit as end:
            status = int(end.code or 0)
        except TopspinError as error:
            failure = error
        if rounds:
            about = {
                "rounds_asked": args.rounds,
                "rounds_measured": len(rounds),
                "error": None if failure is None else str(failure),
            }
            self.finish(args, {**result(rounds), **about})
        if failure is not None:
            raise failure
        return status

    def picture(self, result: Result, path: Path) -> None:
        """Draw the result to `path`, or say that matplotlib is not installed."""
        if not can_draw():
            say("No picture: that needs matplotlib, pip install -e '.[plots]'")
            return
        from matplotlib.figure import Figure

        assert self.draw is not None
        figure = Figure(layout="constrained")
        self.draw(result, figure)
        figure.savefig(path, dpi=110)
        print(f"Written to {path}")

    def markdown(self, result: Result) -> str:
        """Return the result's tables as benchmarks/README.md shows them."""
        parts = self.layout(result)
        return "\n\n".join(part if isinstance(part, str) else part.markdown() for part in parts)


def settings_of(args: argparse.Namespace, **others: Any) -> dict[str, Any]:
    """Return a benchmark's own flags as JSON values, some replaced by `others`."""
    own = {name: value for name, value in vars(args).items() if name not in _OWN_FLAGS}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in (own | others).items()
    }
