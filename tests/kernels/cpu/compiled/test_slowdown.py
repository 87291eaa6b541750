"""An emulated slower device takes a multiple of its work's time, asleep, in programs too."""

from __future__ import annotations

import time

import pytest

from kernels.cpu.compiled.program import Program
from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.compiled.slowdown import MIN_SLEEP_NS, Slowdown
from kernels.cpu.recorder import CpuRuntime
from kernels.cpu.simd.lanes import read_i64
from kernels.cpu.simd.system import thread_ns

FACTOR = 3.5
(NUM_NS,) = offsets(1)


@Kernel
def _work(block: int) -> None:
    """Compute for NUM_NS."""
    until_ns = thread_ns() + read_i64(block + NUM_NS)
    while thread_ns() < until_ns:
        pass


def check(work_ns: int, wall_ns: int, cpu_ns: int) -> None:
    """Check the times of work that was slowed by FACTOR; a busy machine only adds to `wall_ns`."""
    assert wall_ns >= FACTOR * work_ns - MIN_SLEEP_NS
    # The rest is asleep. Between pieces there is Python, which is not work.
    assert cpu_ns < FACTOR * work_ns


@pytest.mark.parametrize("piece_ns", [30_000, 2_000_000])
def test_short_and_long_pieces_take_as_long_in_sum(piece_ns: int) -> None:
    count = 6_000_000 // piece_ns
    slowdown = Slowdown(FACTOR)
    launch(_work, (1,), num_threads=1)
    wall_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
    for _ in range(count):
        with slowdown:
            launch(_work, (piece_ns,), num_threads=1)
    check(count * piece_ns, time.monotonic_ns() - wall_ns, time.thread_time_ns() - cpu_ns)


def test_a_recorded_slowdown_is_part_of_the_program() -> None:
    slowdown = Slowdown(FACTOR)

    def body() -> None:
        for _ in range(4):
            with slowdown:
                launch(_work, (2_000_000,), num_threads=1)

    runtime = CpuRuntime()
    began_ns = time.monotonic_ns()
    replay = runtime.capture(body)
    (program,) = runtime.programs
    assert isinstance(program, Program)
    assert len(program.kernels) == 12
    replay()  # does nothing: the recording was the first run
    cpu_ns = time.thread_time_ns()
    replay()
    # What the first run has slept too long, the second one does not sleep.
    assert time.monotonic_ns() - began_ns >= 2 * FACTOR * 8_000_000 - MIN_SLEEP_NS
    assert time.thread_time_ns() - cpu_ns < FACTOR * 8_000_000
