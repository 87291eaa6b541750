"""Every processor's form of the scores of coded keys against torch's integers."""

from __future__ import annotations

import pytest
import torch

from kernels.contracts import NUM_CENTROIDS, NUM_SUBSPACES, SEGMENT_KEYS
from kernels.cpu.simd import retrieval
from kernels.cpu.simd.lanes import F32, I64
from kernels.cpu.simd.retrieval import GREATEST, KEYS_AT_ONCE
from tests.kernels.cpu.simd.forms import Form, compile_form

# By processor, as LLVM names them.
FORMS = {
    "sapphirerapids": Form(("avx512vbmi", "avx512bw", "avx2"), "vpermb.*%zmm"),
    "skylake-avx512": Form(("avx512bw", "avx2"), "vpshufb.*%zmm"),
    "haswell": Form(("avx2",), "vpshufb.*%ymm"),
    "x86-64": Form((), ""),
}
OPERATIONS = {
    "quantise_table": (retrieval.quantise_table, [I64, F32, I64]),
    "look_up": (retrieval.look_up, [I64] * 4),
}


@pytest.mark.parametrize("processor", FORMS)
def test_scores_are_sums_of_rounded_entries(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the least and the greatest sums, whose bytes must not overflow."""
    rng = torch.Generator().manual_seed(0)
    table = torch.randn(NUM_SUBSPACES, NUM_CENTROIDS, generator=rng) * GREATEST / 40
    table[:, 0], table[:, 1] = GREATEST / NUM_SUBSPACES + 0.4, -GREATEST / NUM_SUBSPACES - 0.4
    table[:, 2] = -GREATEST / NUM_SUBSPACES + 1
    codes = torch.randint(NUM_CENTROIDS, (NUM_SUBSPACES, SEGMENT_KEYS), generator=rng).byte()
    codes[:, 0], codes[:, 1], codes[:, 2] = 0, 1, 2
    before = torch.randint(-1000, 1000, (SEGMENT_KEYS,), generator=rng).short()
    before[:3] = -30000
    compiled = compile_form(processor, FORMS[processor], retrieval, OPERATIONS, monkeypatch)
    if compiled is None:
        return
    entries = torch.empty(NUM_SUBSPACES * NUM_CENTROIDS, dtype=torch.int16)
    doubled = table * 2
    compiled["quantise_table"](doubled.data_ptr(), 0.5, entries.data_ptr())
    count, scores = SEGMENT_KEYS // KEYS_AT_ONCE - 1, before.clone()
    compiled["look_up"](entries.data_ptr(), codes.data_ptr(), scores.data_ptr(), count)
    sums = table.round().gather(1, codes.long()).sum(0).short()
    assert torch.equal(scores[:-KEYS_AT_ONCE], torch.maximum(before, sums)[:-KEYS_AT_ONCE])
    assert torch.equal(scores[-KEYS_AT_ONCE:], before[-KEYS_AT_ONCE:])
