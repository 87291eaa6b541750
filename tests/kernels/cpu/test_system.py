"""What compiled code asks of Linux."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.system import ask_file

FILE, OFFSET, NUM_BYTES = offsets(3)
PAGE = 4096


@Kernel
def _ask(block: int) -> None:
    fd, offset = simd.read_i64(block + FILE), simd.read_i64(block + OFFSET)
    ask_file(fd, offset, simd.read_i64(block + NUM_BYTES))


def is_cached(fd: int, page: int) -> bool:
    try:
        return os.preadv(fd, [bytearray(PAGE)], page * PAGE, os.RWF_NOWAIT) == PAGE
    except BlockingIOError:
        return False


def test_what_a_file_is_asked_for_comes_without_being_read(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, bytes(64 * PAGE))
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(fd, 40):
        pytest.skip("a file system in memory")
    launch(_ask, (fd, 30 * PAGE + 7, 100), num_threads=1)
    deadline = time.monotonic() + 60
    while not is_cached(fd, 30):
        assert time.monotonic() < deadline
        os.sched_yield()
    assert not is_cached(fd, 50)
    os.close(fd)
