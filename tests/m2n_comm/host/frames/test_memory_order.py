"""Sequence words: one aligned access, and a refusal on processors with unknown memory order."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from m2n_comm.host.frames.memory_order import check_platform, consume, publish, word_at
from m2n_comm.open import listen_expert
from topspin.errors import ConfigError

ROUNDS = 300
ECHO = f"""
import mmap, os, sys
from m2n_comm.host.frames.memory_order import consume, publish, word_at

view = memoryview(mmap.mmap(int(sys.argv[1]), mmap.PAGESIZE))
there, back = word_at(view, 0), word_at(view, 64)
print("ready", flush=True)
for sequence in range(1, {ROUNDS} + 1):
    while consume(there) != sequence:
        os.sched_yield()
    if view[128:136] != sequence.to_bytes(8, "little"):
        sys.exit("published before its data")
    publish(back, sequence)
"""


@pytest.mark.slow
def test_what_one_process_publishes_the_other_consumes_with_its_data() -> None:
    memory = os.memfd_create("flags")
    os.ftruncate(memory, mmap.PAGESIZE)
    view = memoryview(mmap.mmap(memory, mmap.PAGESIZE))
    there, back = word_at(view, 0), word_at(view, 64)
    command = [sys.executable, "-c", ECHO, str(memory)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[4], pass_fds=(memory,), stdout=subprocess.PIPE
    ) as child:
        os.close(memory)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        for sequence in range(1, ROUNDS + 1):
            view[128:136] = sequence.to_bytes(8, "little")
            publish(there, sequence)
            while consume(back) != sequence:
                os.sched_yield()
                assert child.poll() is None or consume(back) == sequence
    assert child.returncode == 0


def test_all_64_bits_travel() -> None:
    view = memoryview(bytearray(64))
    word = word_at(view, 8)
    publish(word, 2**64 - 3)
    assert consume(word) == 2**64 - 3
    assert bytes(view[8:16]) == (2**64 - 3).to_bytes(8, "little")


def test_a_word_that_could_be_torn_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        word_at(memoryview(bytearray(64)), 4)


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_platform()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"aarch64 is not supported.*tcp"):
        check_platform()
    with pytest.raises(ConfigError, match="aarch64"):
        listen_expert("shm")
