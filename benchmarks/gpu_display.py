"""What `make gpu` shows while it runs, and at its end: by rich if it is there, else plainly.

Owns the lines. Called by benchmarks.gpu.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.gpu_records import Record
from benchmarks.gpu_report import Row
from benchmarks.gpu_run import Outcome

Table = tuple[str, Sequence[str], list[Row]]
Say = Callable[[str], None]


def describe(record: Record) -> str:
    """Say a record in a line."""
    kind = record["kind"]
    if kind == "progress":
        return str(record["text"])
    if kind == "device":
        return ", ".join(str(value) for name, value in record.items() if name != "kind")
    if kind != "figure":
        return f"{kind}: {record['what']}: {record['why']}"
    if record["of"] == "kernel":
        share = f"{record['fraction']:.0%} of the roofline"
        return f"{record['op']}, {record['shape']}: {record['us']:.1f} us, {share}"
    if record["of"] == "decode":
        share = "" if "fraction" not in record else f", {record['fraction']:.0%} of the byte floor"
        step = f"{record['step_ms']:.2f} ms a step{share}"
        return f"{record['engine']}, {record['variant']}, batch {record['batch']}: {step}"
    if record["of"] == "prefill":
        rate = f"{record['tokens_per_s']:.0f} tokens/s"
        return f"{record['engine']}, {record['variant']}, {record['tokens']} tokens: {rate}"
    if record["of"] == "tests":
        counts = (f"{record[name]} {name}" for name in ("passed", "failed", "skipped"))
        return f"{', '.join(counts)} of {record['collected']}"
    return f"{record['name']}: {record['per_s'] / 1e12:.2f} T{record['unit']}"


def plain_table(headings: Sequence[str], rows: Sequence[Row]) -> str:
    """Align columns: the first to the left, the others to the right."""
    lines = [list(headings), *rows]
    widths = [max(len(line[idx]) for line in lines) for idx in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if idx == 0 else cell.rjust(width)
            for idx, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Display:
    """Writes a line per record, with the seconds since the beginning."""

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._begin = clock()

    def _line(self, part: str, text: str) -> None:
        self._say(f"{self._clock() - self._begin:4.0f} s  {part:12}  {text}")

    def record(self, part: str, record: Record) -> None:
        """Show a record as it comes."""
        self._line(part, describe(record))

    def failed(self, part: str, outcome: Outcome) -> None:
        """Show the end of what a failed part printed."""
        how = "was stopped" if outcome.status is None else f"ended with {outcome.status}"
        self._line(part, f"{how} after {outcome.seconds:.0f} s")
        for line in outcome.tail:
            self._say(f"        {line}")

    def say(self, text: str) -> None:
        """Show a line as it is."""
        self._say(text)

    def summary(self, ceilings: str, tables: Sequence[Table]) -> None:
        """Show the tables."""
        if ceilings:
            self._say(f"\n{ceilings}")
        for title, headings, rows in tables:
            self._say(f"\n{title}\n{plain_table(headings, rows)}")


def plain_say(text: str) -> None:
    """Print at once: who reads may be a pipe."""
    print(text, flush=True)


@contextmanager
def open_display(seconds: float) -> Iterator[Display]:
    """Give the display: above a bar of the time that is used, where rich and a terminal are."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TimeElapsedColumn
    except ImportError:
        yield Display(plain_say)
        return
    console = Console()
    if not console.is_terminal:
        yield Display(plain_say)
        return
    columns = ("of the time:", BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=seconds)
        begin = time.monotonic()

        def say(text: str) -> None:
            progress.update(task, completed=time.monotonic() - begin)
            progress.console.print(text, markup=False, highlight=False)

        yield Display(say)
