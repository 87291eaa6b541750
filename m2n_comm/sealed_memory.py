"""Anonymous shared memory that neither end of a pair can resize.

Owns the seals. Knows no windows; host.shm and gpu.memory share it with peers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

from topspin.errors import FrameError

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_sealed(num_bytes: int) -> int:
    """Return the descriptor of new, zeroed memory."""
    memory = os.memfd_create("topspin-m2n", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, num_bytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def map_sealed(memory: int, num_bytes: int, *, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
    """Map a peer's memory. Raises FrameError for another size, or if a peer could resize it."""
    size = os.fstat(memory).st_size
    if size != num_bytes:
        raise FrameError(f"memory of a peer: {size} bytes, expected {num_bytes}")
    try:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:  # it is a file of another kind
        seals = 0
    if seals & _SEALS != _SEALS:
        raise FrameError("memory of a peer: it is not sealed against resizing")
    return mmap.mmap(memory, num_bytes, flags=flags)
