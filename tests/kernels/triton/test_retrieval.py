"""Kernels that search codes: what they select, attention to that, and batches with other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.contracts import HostKeys, KeyCodes
from kernels.triton.attention.launches import paged_attention
from tests.kernels.cases.attention import Heads, attention_case
from tests.kernels.cases.retrieval import coded
from tests.kernels.cases.searches import SCALE, arguments, placed


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_keys_in_the_hosts_memory_are_those_in_the_cache(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Of two sequences of three some blocks are there; the others have no copies."""
    size, layer, lens = 16, 1, [1100, 1200, 1300]
    case = attention_case(lens, [1, 2, 1], heads=Heads(6, 2, 24), block_size=size, dtype=dtype)
    case, codes = coded(case, {0: (1090, 50), 1: (1150, 7), 2: (1290, 40)})
    whole, its_codes = placed(case, codes, device)
    wanted = paged_attention(*arguments(whole), scale=SCALE, codes=its_codes)

    num_blocks = len(case.k_cache)
    records = torch.full((num_blocks, 3, 2, size, 2, 24), float("nan"), dtype=dtype)
    nothing = torch.full((8, *case.k_cache.shape[1:]), float("nan"), dtype=dtype)
    k_cache, v_cache = (torch.cat([each, nothing]) for each in (case.k_cache, case.v_cache))
    tables, numbers = case.meta.block_tables.clone(), torch.zeros(3, 80, dtype=torch.int32)
    for seq, away in ((0, range(1, 60)), (2, range(30, 64))):
        for idx in away:
            block = int(tables[seq, idx])
            numbers[seq, idx] = record = num_blocks - 1 - block
            records[record, 2, :, :, 0] = k_cache[block].transpose(0, 1)
            records[record, 2, :, :, 1] = v_cache[block].transpose(0, 1)
            k_cache[block] = v_cache[block] = float("nan")
            tables[seq, idx] = -1
    slots = torch.zeros(3, 50, dtype=torch.int32)
    slots[0] = torch.arange(50).flip(0) + num_blocks * size
    slots[2, :40] = torch.arange(40) + num_blocks * size + 64
    away_case = case._replace(
        k_cache=k_cache, v_cache=v_cache, meta=replace(case.meta, block_tables=tables, memo={})
    )
    there, its_codes = placed(away_case, codes, device)
    its_codes = replace(its_codes, layer=layer)
    memory = records.pin_memory() if device.type == "cuda" else records
    host = HostKeys(memory, (0, 2), numbers.to(device), slots.to(device))
    its = there.meta.retrieval
    assert its is not None
    meta = replace(there.meta, retrieval=its._replace(host_keys=host))
    found = paged_attention(*arguments(there._replace(meta=meta)), scale=SCALE, codes=its_codes)
    assert torch.equal(found, wanted)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = attention_case([1100], [1], heads=Heads(2, 1, 16), block_size=16)
    case, codes = placed(*coded(case, {0: (1090, 50)}), device)
    retrieval = case.meta.retrieval
    assert retrieval is not None
    for wrong, message in (
        (retrieval._replace(bounds=None), "bounds"),
        (retrieval._replace(budgets=retrieval.budgets.long()), "int32"),
        (retrieval._replace(hot=(None,)), "file"),
    ):
        meta = replace(case.meta, retrieval=wrong)
        with pytest.raises(ValueError, match=message):
            paged_attention(*arguments(case._replace(meta=meta)), scale=SCALE, codes=codes)
    narrow = KeyCodes(codes.centroids[..., :1], codes.codes, codes.summaries)
    with pytest.raises(ValueError, match="heads of 16"):
        paged_attention(*arguments(case), scale=SCALE, codes=narrow)
    narrow = KeyCodes(codes.centroids, codes.codes, codes.summaries[..., :8])
    with pytest.raises(ValueError, match="summaries"):
        paged_attention(*arguments(case), scale=SCALE, codes=narrow)
    with pytest.raises(ValueError, match="window"):
        paged_attention(*arguments(case), scale=SCALE, codes=codes, sliding_window=9)
