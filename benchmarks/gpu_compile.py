"""Kernels compiled by several processes before one of them times what they do.

A compiler uses one core and takes most of a second, which would be most of a measurement's time.
Owns the processes, which compile a share each into Triton's cache, and the device on which
kernels are compiled and not run. Called by benchmarks.gpu_rooflines and
benchmarks.gpu_kernels.tune.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from kernels.runtime import HostRuntime, Replay

ROOT: Final = Path(__file__).parent.parent


def num_compilers(most: int) -> int:
    """Give the processes that compile: one per core, of which two are left to others."""
    return max(min(len(os.sched_getaffinity(0)) - 2, most), 1)


def compile_beside(command: Sequence[str], count: int, seconds: float) -> None:
    """Run `count` processes, each with its --share I/N; stop those that outlast the seconds.

    What they leave is compiled later, by whoever needs it.
    """
    end = time.monotonic() + seconds
    processes = [
        subprocess.Popen(
            [sys.executable, *command, "--share", f"{idx}/{count}"], cwd=ROOT, stdout=sys.stderr
        )
        for idx in range(count)
    ]
    for process in processes:
        try:
            process.wait(timeout=max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_share(text: str) -> slice:
    """Give the places of a share, "I/N": every N-th from the I-th on, from 0."""
    number, _, count = text.partition("/")
    return slice(int(number), None, int(count))


class CompilingRuntime(HostRuntime):
    """A device whose kernels are compiled by their launches; none runs (see only_compiling)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # type: ignore[misc]

    def capture(self, body: Callable[[], None]) -> Replay:
        return lambda: None


@contextmanager
def only_compiling() -> Iterator[None]:
    """Let launches of Triton's kernels compile them and do nothing else."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_
    try:
        yield
    finally:
        JITFunction.run = launch
