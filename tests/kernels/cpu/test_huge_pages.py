"""Memory for weights: zeroed, aligned, not shared, and freed."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest

from kernels.cpu import huge_pages
from kernels.cpu.huge_pages import CHUNK_BYTES, Arena


def test_cuts_are_zeros_apart_and_aligned() -> None:
    arena = Arena()
    shapes = [(3, 7), (1,), (2, 5, 64), (0, 4), (CHUNK_BYTES // 2,), (CHUNK_BYTES // 2,), (9,)]
    cuts = [arena.zeros(*shape) for shape in shapes]
    for number, (cut, shape) in enumerate(zip(cuts, shapes, strict=True)):
        assert tuple(cut.shape) == shape
        assert cut.numel() == 0 or cut.data_ptr() % 64 == 0
        assert not cut.any()
        cut.fill_(number + 1)
    for number, cut in enumerate(cuts):
        assert bool((cut == number + 1).all())


def test_more_than_a_chunk_and_systems_that_refuse_the_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    cut = Arena().zeros(3, 4096)
    assert cut.sum() == 0


@pytest.mark.slow
def test_a_chunk_goes_with_its_last_cut() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE

    arena = Arena()
    cuts = [arena.zeros(CHUNK_BYTES) for _ in range(4)]
    before = resident_bytes()
    for cut in cuts:
        cut.fill_(1)
    assert resident_bytes() - before > 3 * CHUNK_BYTES
    del arena, cut
    cuts.clear()
    gc.collect()
    assert resident_bytes() - before < CHUNK_BYTES
