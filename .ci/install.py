"""Install with pip and say meanwhile what it does: `install.py ARGUMENTS OF pip install`.

On a terminal one line that is redrawn, with the seconds so far; else a line per stage. pip's
own output is kept back, and shown if it fails. Run by the Makefile with the environment's
Python; uses nothing but the standard library.
"""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from typing import IO

REDRAW_S = 0.25
NUM_TAIL_LINES = 40


class Stages:
    """What pip's output lines mean: `stage` is one of three, `text` the details."""

    def __init__(self) -> None:
        self.stage = "starting pip"
        self.text = self.stage
        self._packages = 0

    def read(self, line: str) -> None:
        """Take note of a line."""
        line = line.strip()
        if found := re.match(r"Collecting ([\w.-]+)", line):
            self._packages += 1
            self.stage = "finding and downloading packages"
            self.text = f"{self.stage}: {self._packages}, {found[1]}"
        elif found := re.match(r"Downloading .*?([\w.]+)-[^/]*\((.+)\)", line):
            self.stage = "finding and downloading packages"
            self.text = f"{self.stage}: {self._packages}, {found[1]} ({found[2]})"
        elif line.startswith("Installing collected packages:"):
            count = line.count(",") + 1
            self.stage = self.text = f"installing {count} packages"


def _read_lines(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def install(arguments: list[str]) -> int:
    """Run pip; returns its exit status."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    process = subprocess.Popen(
        [*command, "--progress-bar", "off", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    stages, tail, shown = Stages(), deque[str](maxlen=NUM_TAIL_LINES), ""
    live = sys.stderr.isatty()
    line: str | None = ""
    while line is not None:
        try:
            line = lines.get(timeout=REDRAW_S)
            if line is not None:
                tail.append(line)
                stages.read(line)
        except queue.Empty:
            pass
        if live:
            text = f"{stages.text} ({time.monotonic() - started:.0f} s)"
            _write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        elif stages.stage != shown:
            shown = stages.stage
            _write(f"{shown}\n")
    status = process.wait()
    _write("\r\x1b[K" if live else "")
    if status:
        _write(f"{''.join(tail)}pip install failed with status {status}\n")
    else:
        _write(f"installed in {time.monotonic() - started:.0f} s\n")
    return status


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.exit(install(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
