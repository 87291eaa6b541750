"""The one place that knows the memory order of sequence words in shared memory.

A frame is published by writing its sequence number, last, into an aligned 64-bit word;
a reader that sees the number sees every byte written before it. Knows no frame and no
transport; windows.py says where the words are, local.py and shm.py call these functions.

Why two plain accesses are enough on x86-64: stores become visible in program order and
loads are done in program order (TSO), an aligned 8-byte access is never torn, and neither
CPython nor torch can move work across these calls. A memoryview of format "Q" reads and
writes its item with one such access; struct.pack_into("<Q") would write single bytes.
aarch64 needs a store-release and a load-acquire here, hence the refusal.

A reader that may sleep says beside the flag whether it is awake. Writer and reader then each write
one word and read the other's, which needs a fence between the two, even on x86-64: publish_fenced()
and fall_asleep(). With them either the writer sees that the reader sleeps, or the reader sees the
frame.
"""

from __future__ import annotations

import platform
import sys

from kernels.cpu.compiled.runtime import compiled
from kernels.cpu.simd.system import exchange_shared, read_shared
from topspin.errors import ConfigError

WORD_BYTES = 8


def check_platform() -> None:
    """Raise ConfigError unless this machine guarantees the memory order described above."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64") or sys.byteorder != "little" or sys.maxsize < 2**62:
        raise ConfigError(
            f"transport shm: {machine} is not supported, its memory order is not x86-64's; "
            "use --transport tcp or local"
        )


def word_at(buffer: memoryview, offset: int) -> memoryview:
    """Return the 64-bit word at byte `offset` of `buffer` as a memoryview of one item."""
    assert offset % WORD_BYTES == 0, "a torn word would break publish()"
    return buffer[offset : offset + WORD_BYTES].cast("Q")


def publish(word: memoryview, sequence: int) -> None:
    """Make everything written so far visible, marked with `sequence` (store-release)."""
    word[0] = sequence


def consume(word: memoryview) -> int:
    """Return the newest published sequence; its data may be read after this (load-acquire)."""
    sequence: int = word[0]
    return sequence


@compiled(3)
def publish_fenced(flag: int, is_awake: int, sequence: int) -> int:
    """publish() at address `flag`; returns whether the reader is awake, the word at `is_awake`."""
    exchange_shared(flag, sequence)
    awake: int = read_shared(is_awake)
    return awake


@compiled(2)
def fall_asleep(is_awake: int, flag: int) -> int:
    """Say at `is_awake` that this reader sleeps; returns consume() at `flag` afterwards."""
    exchange_shared(is_awake, 0)
    found: int = read_shared(flag)
    return found
