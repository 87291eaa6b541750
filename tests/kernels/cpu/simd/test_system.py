"""Linux as compiled code uses it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest
import torch

from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.system import ask_file

FILE, OFFSET, NUM_BYTES = offsets(3)
PAGE, NUM_PAGES = 4096, 64


@Kernel
def _ask(block: int) -> None:
    fd, offset = simd.read_i64(block + FILE), simd.read_i64(block + OFFSET)
    ask_file(fd, offset, simd.read_i64(block + NUM_BYTES))


def cached_pages(fd: int) -> set[int]:
    """Return which pages are in memory: mincore looks, where a read would bring them."""
    mapped = mmap.mmap(fd, NUM_PAGES * PAGE)
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    found = (ctypes.c_ubyte * NUM_PAGES)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(NUM_PAGES * PAGE), found) == 0
    return {page for page in range(NUM_PAGES) if found[page] & 1}


def test_what_a_file_is_asked_for_comes_without_being_read(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, bytes(NUM_PAGES * PAGE))
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    deadline = time.monotonic() + 5
    while cached_pages(fd):  # what is still being written stays a moment longer
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if time.monotonic() > deadline:
            pytest.skip("a file system in memory")
    launch(_ask, (fd, 30 * PAGE + 7, 100), num_threads=1)
    deadline = time.monotonic() + 60
    while 30 not in (found := cached_pages(fd)):
        assert time.monotonic() < deadline
        os.sched_yield()
    assert 50 not in found
    os.close(fd)
