"""The progress bar of passes over a model's layers.

Owns its looks, on standard error. Called by deploy.quantisation's commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Stages = Callable[[str, int], Callable[[], None]]
"""Begins a stage of so many layers; returns what is to be called after each."""


@contextmanager
def stages() -> Iterator[Stages]:
    """Show stages while the block runs: layers done, time gone and time left."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("layers"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def begin(name: str, total: int) -> Callable[[], None]:
            task = bar.add_task(name, total=total)
            return lambda: bar.advance(task)

        yield begin
