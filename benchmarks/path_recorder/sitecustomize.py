"""Recorder of the product's functions that this process calls while a window is open.

Python imports a module of this name when it starts, from a folder in PYTHONPATH: so all processes
of an engine have one each. They share a byte, by a mapped file: a window's number, 0: none is open,
LAST: write what was seen. Knows no engine; benchmarks.token_path starts one and reads what is
written.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Final

FOLDER_VARIABLE: Final = "TOPSPIN_PATH_FOLDER"
LAST: Final = 255
_POLL_S: Final = 0.05


class Recorder:
    """The first call of each function, by window, in nanoseconds of the monotonic clock."""

    def __init__(self, folder: Path) -> None:
        with (folder / "window").open("r+b") as file:
            self._window = mmap.mmap(file.fileno(), 1)
        self._folder = folder
        self._first_ns: dict[tuple[int, str, str], int] = {}

    def start(self) -> None:
        """Record all threads of this process, and write at the end."""
        threading.setprofile(self)
        sys.setprofile(self)
        threading.Thread(target=self._write_at_the_end, daemon=True).start()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note a call (sys.setprofile)."""
        number = self._window[0]
        if event == "call" and 0 < number < LAST:
            code = frame.f_code
            self._first_ns.setdefault(
                (number, code.co_filename, code.co_qualname), time.monotonic_ns()
            )

    def _write_at_the_end(self) -> None:
        (self._folder / f"{os.getpid()}.begun").touch()
        while self._window[0] != LAST:
            time.sleep(_POLL_S)
        calls = [[*key, first_ns] for key, first_ns in list(self._first_ns.items())]
        written = json.dumps({"command": sys.orig_argv, "calls": calls})
        unfinished = self._folder / f"{os.getpid()}.part"
        unfinished.write_text(written, encoding="utf-8")
        unfinished.rename(unfinished.with_suffix(".json"))


if FOLDER_VARIABLE in os.environ:
    Recorder(Path(os.environ[FOLDER_VARIABLE])).start()
