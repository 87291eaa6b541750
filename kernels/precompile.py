"""Compiles kernels for this machine's processor, so that nodes find their code in the cache.

`python -m kernels.precompile MODULE ...` names modules of this folder, and writes the name of
each that is done to stdout. Knows neither what a kernel does nor who needs it. Started by
topspin.compile_ahead, with which it ends.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from importlib import import_module

from topspin.process import follow_parent


def compile_module(name: str) -> None:
    """Compile the kernels of kernels/`name`.py that are not in the cache.

    Raises ModuleNotFoundError if there is no such module.
    """
    module = import_module(f"kernels.{name}")
    # Not sooner: it takes a second, in which the process must end with its parent already.
    from kernels.numba_runtime import Kernel

    for kernel in vars(module).values():
        if isinstance(kernel, Kernel):
            assert kernel.address, kernel.name


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the modules that are named; returns the exit status."""
    # An interrupt is told once, by who started this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m kernels.precompile", description=__doc__)
    parser.add_argument("modules", nargs="+", metavar="MODULE")
    for name in parser.parse_args(argv).modules:
        compile_module(name)
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
