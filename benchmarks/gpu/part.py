"""One part of `make gpu`: its flags, its time, its figures as JSON, and its exit status.

The JSON (gpu-PART-DEVICE.json) is written after every figure, with "complete" false until the part
has ended, so that a stopped part leaves its results so far. A problem, or work skipped for lack of
time, makes the part fail. Knows no particular part. Called by the scripts beside this module.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import report
from kernels.runtime import Runtime, open_runtime

WHY_LENGTH: Final = 300


def parser(name: str, seconds: float) -> argparse.ArgumentParser:
    """Return the parser of the flags common to all parts."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{name}")
    made.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --quick")
    made.add_argument("--quick", action="store_true", help="tiny sizes: no speeds")
    made.add_argument("--output", type=Path, help="folder for the JSON (benchmarks/results)")
    made.add_argument("--seconds", type=float, default=seconds, help="begin nothing after so long")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags; refuse a combination whose result would have no speeds."""
    args = made.parse_args(argv)
    if args.device == "cpu" and not args.quick:
        made.error("--device cpu interprets kernels, at tiny sizes only: add --quick")
    if args.quick and args.output is None:
        made.error("--quick measures no speeds, and its file is no result: add --output FOLDER")
    return args


def device_name(runtime: Runtime) -> str:
    """Return the name of a GPU, or "cpu"."""
    if runtime.device.type == "cpu":
        return "cpu"
    name: str = torch.cuda.get_device_properties(runtime.device).name
    return name


class Part:
    """The figures and problems of one part."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        device: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`args` are the flags of parse(); `device` names the device of the results."""
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        self._name = f"gpu-{name}-{slug}"
        self._folder: Path | None = args.output
        self._clock = clock
        self._end: float = clock() + args.seconds
        self._result: dict[str, Any] = {
            "device": device,
            "quick": args.quick,
            "complete": False,
            "problems": [],
            "figures": [],
        }

    @property
    def left_s(self) -> float:
        """Return the seconds left; negative when the time is up."""
        return self._end - self._clock()

    def figure(self, line: str, **fields: Any) -> None:
        """Print a line and keep the fields."""
        print(line, flush=True)
        self._result["figures"].append(fields)
        self._write()

    def problem(self, what: str, why: str) -> None:
        """Keep why the part fails."""
        text = f"{what}: {why.strip()[:WHY_LENGTH]}"
        print(f"problem: {text}", file=sys.stderr, flush=True)
        self._result["problems"].append(text)
        self._write()

    @contextmanager
    def attempt(self, what: str) -> Iterator[bool]:
        """Yield whether there is time for `what`; its failure is kept as a problem, not raised."""
        if self.left_s <= 0:
            self.problem(what, "the time was up")
            yield False
            return
        # A kernel, its compiler or the driver may raise anything.
        try:
            yield True
        except Exception as error:
            traceback.print_exc()
            self.problem(what, f"{type(error).__name__}: {error}")

    def finish(self) -> int:
        """Print the file's path and return the exit status."""
        self._result["complete"] = True
        print(self._write(), flush=True)
        return int(bool(self._result["problems"]))

    def _write(self) -> Path:
        return report.write(self._name, self._result, self._folder)


def open_part(name: str, args: argparse.Namespace) -> tuple[Part, Runtime]:
    """Open the device and its part. Raises ConfigError if the device is missing."""
    runtime = open_runtime(args.device)
    torch.manual_seed(0)
    return Part(name, args, device_name(runtime)), runtime
