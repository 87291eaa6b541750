"""Checks for the C compiler and headers with which Triton builds its kernel launchers.

Triton looks for them at its first launch, in the middle of loading a model; this module looks in
the same places at the start. Knows no kernel, and imports neither triton nor torch.
Called by `kernels.triton.ops` and `benchmarks.gpu.smoke`.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from topspin.errors import ConfigError


def find_compiler() -> str | None:
    """Return the compiler that Triton would call: CC, gcc or clang; None if there is none."""
    chosen = os.environ.get("CC")
    if chosen is not None:
        return shutil.which(chosen)
    return shutil.which("gcc") or shutil.which("clang")


def find_header() -> Path | None:
    """Return the path of this Python's Python.h, None if it is not installed."""
    scheme = sysconfig.get_default_scheme()
    # Debian's scheme for packages installed by users has no headers.
    if scheme == "posix_local":
        scheme = "posix_prefix"
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    return header if header.is_file() else None


def check_toolchain() -> None:
    """Raise ConfigError, saying what to install, if Triton could not launch kernels on a GPU."""
    if find_compiler() is None:
        chosen = os.environ.get("CC")
        raise ConfigError(
            "kernels triton: Triton needs a C compiler, and "
            + (f"CC={chosen} is none" if chosen else "there is neither gcc nor clang on PATH")
            + "; install gcc, or set CC"
        )
    if find_header() is None:
        raise ConfigError(
            "kernels triton: Triton needs the header Python.h of this Python "
            f"({sysconfig.get_python_version()}), which is not installed; the package is called "
            "python3-dev or python3-devel"
        )
