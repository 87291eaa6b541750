"""Where the machine code of the CPU's kernels is kept.

Owns the directories' names: each module with kernels has one, in the user's cache, whose name
changes with the sources that the code comes from (numba itself compares the time of one file
only), the interpreter and numba. Imports neither numba nor torch, so that `topspin serve` can
look what is there before it starts anything. Called by kernels.numba_runtime, which fills the
directories, and topspin.compile_ahead.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

# Set to 1: leave out what only some processors have, as if this one lacked it.
PORTABLE_VARIABLE: Final = "TOPSPIN_PORTABLE_KERNELS"

KERNELS: Final = Path(__file__).resolve().parent.parent / "kernels"


def code_directory(module: Path) -> Path | None:
    """Return the directory of the code of `module`'s kernels, made if need be.

    It lies in $NUMBA_CACHE_DIR, else in `numba` in Topspin's cache. None: there is no place
    that can be written.
    """
    directory = _cache_root() / _digest(module)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError:
        return None
    return directory


def is_missing(module: Path) -> bool:
    """Say whether no code of `module` is kept though it could be.

    Code made for another processor counts as well: its nodes then compile what they need.
    """
    directory = code_directory(module)
    return directory is not None and not any(directory.rglob("*.nbc"))


def _cache_root() -> Path:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    if chosen := os.environ.get("TOPSPIN_CACHE"):
        return Path(chosen) / "numba"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "topspin" / "numba"


@cache
def _digest(module: Path) -> str:
    facts = (
        importlib.metadata.version("numba"),
        sys.implementation.cache_tag,
        os.environ.get(PORTABLE_VARIABLE),
    )
    digest = hashlib.sha256(repr(facts).encode())
    shared = sorted(KERNELS.glob("simd*.py"))
    for source in (*shared, KERNELS / "numba_runtime.py", Path(__file__), module):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
