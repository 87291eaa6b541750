"""Common behaviour of every role process."""

from __future__ import annotations

import subprocess
import sys

# Blocks below malloc's mmap threshold, freed between two that stay.
_SCRIPT = """
import ctypes
from pathlib import Path
from topspin.process import release_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)

def resident_kb():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])

size = 100_000
blocks = [libc.malloc(size) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[1:-1]:
    libc.free(block)
held = resident_kb()
release_freed_memory()
print(held - resident_kb())
"""


def test_freed_memory_goes_back_to_the_system() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(found.stdout) > 50_000, "KB, of the 100,000 that were freed"
