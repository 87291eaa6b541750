"""Common behaviour of every role process."""

from __future__ import annotations

import mmap
import resource
import subprocess
import sys

import pytest

from topspin.process import allow_open_files, resident_bytes

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


def test_resident_bytes_are_those_of_pages_that_are_used() -> None:
    size = 64 * 2**20
    with mmap.mmap(-1, size) as pages:
        before = resident_bytes()
        pages.write(bytes(size))
        assert size <= resident_bytes() - before + 2**20 < 2 * size


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_lets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(1024, 5000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert allow_open_files(2000) == 2000
    assert allow_open_files(1500) == 2000
    assert allow_open_files(9000) == 5000
    assert limits == [(1024, 5000), (2000, 5000), (5000, 5000)]
    limits.append((1024, resource.RLIM_INFINITY))
    assert allow_open_files(9000) == 9000
    assert limits[-1] == (9000, resource.RLIM_INFINITY)
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert allow_open_files(9000) > 9000


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_a_process_without_standard_streams_gets_them(closed: tuple[int, ...]) -> None:
    code = (
        "import os, subprocess, sys\n"
        "from topspin.process import open_standard_streams\n"
        "open_standard_streams()\n"
        "assert not sys.stderr.isatty()\n"
        "print('said', file=sys.stderr, flush=True)\n"
        "assert os.readlink('/proc/self/fd/2') == os.devnull\n"
        "child = 'import os; os.fstat(0), os.fstat(1), os.fstat(2)'\n"
        "sys.exit(subprocess.call([sys.executable, '-c', child]))\n"
    )
    shut = " ".join(f"{each}{'<' if each == 0 else '>'}&-" for each in closed)
    shell = f'exec "$0" -c "$1" {shut}'
    done = subprocess.run(["/bin/sh", "-c", shell, sys.executable, code], timeout=60, check=False)
    assert done.returncode == 0
