"""Paged attention beside its op: tiles and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.triton.attention.launches import (
    AttentionTiles,
    attend,
    plan_attention,
)
from tests.kernels.cases.attention import AttentionCase, Heads, attention_case, placed
from tests.kernels.triton.tiles import SMALL_TILES

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
DTYPES = [torch.float32, torch.bfloat16]


def compare(
    case: AttentionCase,
    device: torch.device,
    *,
    window: int | None = None,
    tiles: AttentionTiles | None = SMALL_TILES,
) -> None:
    case = placed(case, device)
    arguments = (case.q, case.k_cache, case.v_cache, case.meta)
    wanted = reference.paged_attention(*arguments, scale=0.2, sliding_window=window)
    out = torch.full_like(case.q, float("nan"))
    result = attend(*arguments, scale=0.2, sliding_window=window, out=out, tiles=tiles)
    assert result is out
    torch.testing.assert_close(result, wanted, **TOLERANCE[case.q.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tiles_that_a_gpu_gets(dtype: torch.dtype, device: torch.device) -> None:
    case = attention_case(
        [300, 70, 290], [1, 70, 5], heads=Heads(4, 2, 128), block_size=16, dtype=dtype
    )
    compare(case, device, tiles=None)
    case = attention_case([700, 3], [1, 1], heads=Heads(4, 1, 64), block_size=64, dtype=dtype)
    compare(case, device, tiles=None)


def test_a_bucket_is_replayed_for_a_smaller_batch(device: torch.device) -> None:
    """The host knows only bounds: wider ones give the same result."""
    case = attention_case([50, 9, 33], [1, 9, 3], heads=Heads(4, 2, 64), block_size=4)
    loose = replace(case.meta, max_query_len=64, max_context_len=4096)
    compare(case._replace(meta=loose), device)


def test_blocks_beyond_32_bits_of_elements(device: torch.device) -> None:
    """Blocks far apart need 64-bit offsets. Untouched pages take no memory."""
    case = placed(attention_case([17], [1], heads=Heads(2, 1, 16), block_size=4), device)
    apart = 1 << 29
    assert int(case.meta.block_tables[0, :5].max()) * apart >= 1 << 31
    shape, caches = case.k_cache.shape, []
    whole = torch.empty(shape[0] * apart, dtype=torch.float8_e4m3fn, device=device)
    for offset, cache in ((0, case.k_cache), (64, case.v_cache)):
        view = whole.as_strided(shape, (apart, *cache.stride()[1:]), offset)
        caches.append(view.copy_(cache))
    wanted = reference.paged_attention(
        case.q, caches[0].float(), caches[1].float(), case.meta, scale=0.2
    )
    out = attend(case.q, caches[0], caches[1], case.meta, scale=0.2, tiles=SMALL_TILES)
    torch.testing.assert_close(out, wanted, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("group", [1, 3, 7, 8, 24])
def test_batches_of_all_kinds_need_few_compiled_kernels(group: int) -> None:
    plans = [
        plan_attention(num_seqs, 2, group, rows, 4096, None, AttentionTiles())
        for num_seqs in (1, 3, 20, 200)
        for rows in range(300)
    ]
    assert len({(plan.short_len, plan.short_rows) for plan in plans}) <= 3
    # The variants beside those of decode steps, which are recorded at the start.
    others = {plan[:3] for plan in plans if plan.short_len > 1 or plan.has_long}
    assert len(others) <= 2
    assert len({plan.splits for plan in plans}) <= 7
