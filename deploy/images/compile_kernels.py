"""`python -m deploy.images.compile_kernels`: compile all kernels for CPUs, into numba's cache.

Owns finding them. An image has the code for the processor that it was built on, so that a container
on the like compiles nothing (TOPSPIN_PREPARED_KERNELS); on another one nodes compile as ever.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

from rich.progress import track

from kernels.cpu.compiled.runtime import Kernel

PACKAGES = ("kernels.cpu", "m2n_comm.host")
"""Functions that Python calls are compiled when their modules are imported."""


def kernels() -> Iterator[Kernel]:
    """Yield all kernels for this processor, each once."""
    seen: set[int] = set()
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, Kernel) and value.runs_here and id(value) not in seen:
                    seen.add(id(value))
                    yield value


def main() -> int:
    """Compile them; returns the exit status."""
    found = list(kernels())
    for kernel in track(found, "kernels", disable=not sys.stderr.isatty()):
        assert kernel.address, kernel.name
    print(f"{len(found)} kernels are compiled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
