"""The terminal while an engine starts and runs: role output, progress, announcements.

Owns two ways to show it: plain lines, and on a terminal a live status line (rich, loaded only
there: the supervisor stays small). Role output and progress go to stderr, announcements to stdout.
While the engine starts, the log lines of nodes that compile kernels are replaced by a count of
these kernels. Knows no processes; app.launch.engine calls it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from topspin.logs import is_json, json_line, shows_json

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner


class Display:
    """Lines only, on stderr; a progress line whenever the state changes."""

    def __init__(self) -> None:
        self._state = ""

    def line(self, text: str) -> None:
        """Show one line of a role's output, or of the supervisor's own."""
        write_line(sys.stderr, text)

    def progress(self, state: str, elapsed_s: float) -> None:
        """Show the state that the start waits for; called repeatedly."""
        if state != self._state:
            self._state = state
            self.line(f"{state} ({elapsed_s:.1f} s)")

    def finish(self) -> None:
        """End the progress; lines may still follow."""
        self._state = ""

    def announce(self, text: str) -> None:
        """Show a result of the start, on stdout, below the ended progress."""
        self.finish()
        write_line(sys.stdout, text)


class JsonDisplay(Display):
    """The same with each line on stderr as JSON: roles' are, the supervisor's become it."""

    def line(self, text: str) -> None:
        """Write `text` to stderr."""
        super().line(text if is_json(text) else json_line("topspin", text))


class TerminalDisplay(Display):
    """A live status line below the roles' output while the engine starts."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None
        self._spinner: Spinner | None = None

    def line(self, text: str) -> None:
        """Write `text` to stderr, above the status line."""
        if self._live is None:
            super().line(text)
        else:
            self._live.console.out(text, highlight=False)

    def progress(self, state: str, elapsed_s: float) -> None:
        """Redraw the status line."""
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        spinner = self._spinner or Spinner("dots")
        if self._live is None:
            # No refresh thread: the supervisor redraws when it looks at the engine anyway.
            self._live = Live(
                spinner,
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._spinner = spinner
        spinner.update(text=Text(f" {state} ({elapsed_s:.1f} s)"))
        self._live.refresh()

    def finish(self) -> None:
        """Remove the status line."""
        if self._live is not None:
            self._live.stop()
            self._live = self._spinner = None


class CompiledKernels:
    """Counts the kernels that nodes compile during a start, in place of their log lines."""

    _COMPILED = re.compile(r" compiled kernel \S+ for this processor")

    def __init__(self, show: Callable[[str], object]) -> None:
        self._show = show
        self._count: int | None = 0

    def line(self, text: str) -> bool:
        """Count a line that reports a compiled kernel and return True, else show it."""
        if self._count is None or not self._COMPILED.search(text):
            self._show(text)
            return False
        self._count += 1
        return True

    def state(self, state: str) -> str:
        """Return `state` of the start, with the number of kernels compiled so far, if any."""
        if not self._count:
            return state
        return f"{state}; compiling kernels for this processor, once: {self._count} done"

    def finish(self) -> None:
        """Stop counting: the engine has started."""
        self._count = None


def open_display() -> Display:
    """Return JSON lines if logs are JSON, else a live display if stderr is a terminal."""
    if shows_json():
        return JsonDisplay()
    return TerminalDisplay() if sys.stderr.isatty() else Display()


def write_line(stream: TextIO, text: str) -> None:
    """Write a line. If the stream's reader has gone, its lines are dropped: that must not end a
    server that others use."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
