"""Runs a part of `make gpu` in a process of its own, for as long as it may take.

Owns that process: its records are handed on as they come, and when its time is over it and
all that it started are stopped. What it prints besides goes to a log. Knows no part's
meaning. Called by benchmarks.gpu.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from benchmarks.gpu_records import Record, read_record

ROOT: Final = Path(__file__).parent.parent
TAIL_LINES: Final = 20
CHUNK: Final = 1 << 16


@dataclass
class Outcome:
    """What became of a part."""

    status: int | None
    """The exit status; None if it was stopped because its time was over."""
    seconds: float
    records: list[Record] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
    """The last lines of its log."""

    def of_kind(self, kind: str) -> list[Record]:
        """Give the records of one kind, in order."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def is_good(self) -> bool:
        """Say whether it ended by itself, successfully and without a problem."""
        return self.status == 0 and not self.of_kind("problem")


def run_part(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    log: Path,
    on_record: Callable[[Record], None],
) -> Outcome:
    """Run a command that writes records until it ends or `limit_s` seconds have passed."""
    begin = time.monotonic()
    records: list[Record] = []

    def take(line: bytes) -> None:
        record = read_record(line.decode(errors="replace"))
        if record is None:
            print(line.decode(errors="replace"), file=errors, flush=True)
        else:
            records.append(record)
            on_record(record)

    with log.open("w", encoding="utf-8", errors="replace") as errors:
        # A session of its own: stopping it stops the compilers and tests that it started.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            was_stopped = not _read_lines(process.stdout, begin + limit_s, take)
            status = None if was_stopped else _wait(process, begin + limit_s)
        finally:
            _stop(process)
            process.stdout.close()
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return Outcome(status, time.monotonic() - begin, records, tail)


def _read_lines(stream: IO[bytes], end: float, take: Callable[[bytes], None]) -> bool:
    """Hand on each line until the stream ends (True) or the time is over (False)."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            left = end - time.monotonic()
            if left <= 0:
                return False
            if not selector.select(left):
                continue
            chunk = os.read(stream.fileno(), CHUNK)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                take(line)
            if not chunk:
                if pending:
                    take(pending)
                return True


def _wait(process: subprocess.Popen[bytes], end: float) -> int | None:
    """Wait for a process that has closed its output; None if it outlasts its time."""
    try:
        return process.wait(timeout=max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process's session; it has no state worth a warning."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def part_command(module: str, *, device: str, is_quick: bool, seconds: float) -> list[str]:
    """Give the command of a part that is to end by itself within so many seconds."""
    command = [sys.executable, "-m", module, "--device", device, "--seconds", f"{seconds:.1f}"]
    return [*command, "--quick"] if is_quick else command
