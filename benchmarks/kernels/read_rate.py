"""The memory's read bandwidth, measured while other programs may be measured.

Owns a process of its own for the probe of cpu_kernels: the load tester must not import
torch, whose objects lengthen every garbage collection, nor keep its threads. Called by
benchmarks.load.compare while no measured server works.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

NUM_READS = 20


def read_rates(num_reads: int = NUM_READS) -> list[float]:
    """Return the rate of each read of an array larger than the cache, in bytes/s, on all cores."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_probe, num_reads).result()


def _probe(num_reads: int) -> list[float]:
    from benchmarks.kernels.cpu_kernel_cases import cache_bytes
    from benchmarks.kernels.cpu_kernels import PROBE_FILLS, Ceilings, Probe

    probe, found = Probe(PROBE_FILLS * cache_bytes(), 1), Ceilings()
    for _ in range(num_reads):
        probe.read(found)
    return found.bytes_per_s
