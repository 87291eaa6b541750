"""Paged attention kernels against the reference, and sinks against transformers' gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from kernels import reference
from kernels.triton.attention.launches import (
    AttentionTiles,
    attend,
    paged_attention,
    plan_attention,
)
from tests.kernels.cases import AttentionCase, Heads, attention_case
from tests.kernels.matrices import slow_rows
from tests.pairwise import cover_values

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
DTYPES = [torch.float32, torch.bfloat16]
SMALL = AttentionTiles(
    max_short_len=8,
    short_keys=16,
    min_chunk=16,
    max_splits=4,
    long_rows=16,
    long_keys=16,
    short_warps=1,
    long_warps=1,
)
"""Tiles small enough that short contexts fill several blocks, splits and tiles of rows."""


def place(case: AttentionCase, device: torch.device) -> AttentionCase:
    meta = case.meta
    tree = None if meta.tree_mask is None else meta.tree_mask.to(device)
    tree_lens = None if meta.tree_lens is None else meta.tree_lens.to(device)
    moved = replace(
        meta,
        query_start=meta.query_start.to(device),
        context_lens=meta.context_lens.to(device),
        block_tables=meta.block_tables.to(device),
        tree_mask=tree,
        tree_lens=tree_lens,
    )
    caches = (case.k_cache.to(device), case.v_cache.to(device))
    return case._replace(q=case.q.to(device), k_cache=caches[0], v_cache=caches[1], meta=moved)


def compare(
    case: AttentionCase,
    device: torch.device,
    *,
    window: int | None = None,
    tiles: AttentionTiles | None = SMALL,
) -> None:
    case = place(case, device)
    arguments = (case.q, case.k_cache, case.v_cache, case.meta)
    wanted = reference.paged_attention(*arguments, scale=0.2, sliding_window=window)
    out = torch.full_like(case.q, float("nan"))
    result = attend(*arguments, scale=0.2, sliding_window=window, out=out, tiles=tiles)
    assert result is out
    torch.testing.assert_close(result, wanted, **TOLERANCE[case.q.dtype])


@pytest.mark.parametrize(
    ("dtype", "heads", "block_size"),
    slow_rows(
        [(torch.float32, Heads(2, 2, 96), 32), (torch.bfloat16, Heads(4, 1, 128), 4)],
        beside=[(torch.float32, Heads(3, 1, 64), 1), (torch.bfloat16, Heads(8, 1, 80), 16)],
    ),
)
def test_decode(heads: Heads, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """One row each; contexts that end before, at and after the edges of blocks and splits."""
    lens = [1, 16, 65, 33]
    case = attention_case(lens, [1] * 4, heads=heads, block_size=block_size, dtype=dtype)
    compare(case, device)


@pytest.mark.parametrize(
    ("dtype", "heads", "block_size"),
    slow_rows(
        [(torch.float32, Heads(2, 1, 96), 32), (torch.bfloat16, Heads(7, 1, 128), 1)],
        beside=[(torch.float32, Heads(6, 2, 64), 4), (torch.bfloat16, Heads(8, 1, 80), 16)],
    ),
)
def test_prompts_and_decodes_mixed(
    heads: Heads, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Whole prompts, chunks after a context, single rows, and one sequence without rows."""
    lens, rows = [1, 50, 16, 17, 33, 40, 25], [1, 1, 16, 17, 3, 0, 9]
    case = attention_case(
        lens, rows, heads=heads, block_size=block_size, dtype=dtype, padding_rows=2
    )
    compare(case, device)


@pytest.mark.parametrize(("dtype", "window"), cover_values(DTYPES, [32, 7]))
def test_sliding_window(window: int, dtype: torch.dtype, device: torch.device) -> None:
    heads = Heads(4, 2, 64)
    mixed = attention_case([60, 5, 40], [1, 5, 20], heads=heads, block_size=16, dtype=dtype)
    compare(mixed, device, window=window)
    short = attention_case([60, 5], [1, 4], heads=heads, block_size=4, dtype=dtype)
    compare(short, device, window=window)


WIDE: tuple[int | None, ...] = (None, *(node // 3 for node in range(19)))
TREES = ((None, 0, 0, 1, 1, 4, 2), (None,), (None, None, 1, 0))


# All nodes are query rows, or only the last ones: one row each, few, and many.
ALL = tuple(len(tree) for tree in (*TREES, WIDE))
LAST: tuple[tuple[int, ...], ...] = ((1, 1, 0, 1), (3, 1, 2, 2), (3, 1, 2, 17))


@pytest.mark.parametrize(
    ("window", "dtype", "rows"),
    slow_rows(
        [
            (None, torch.float32, ALL[:3]),
            (None, torch.bfloat16, ALL),
            (12, torch.float32, ALL[:3]),
            (None, torch.float32, LAST[0]),
            (12, torch.float32, LAST[1]),
            (None, torch.float32, LAST[2]),
            (1, torch.bfloat16, LAST[2]),
        ],
        beside=[
            (1, torch.float32, ALL[:3]),
            (3, torch.bfloat16, ALL),
            (12, torch.float32, LAST[0]),
            (None, torch.bfloat16, LAST[1]),
            (3, torch.float32, LAST[2]),
        ],
    ),
)
def test_trees(
    rows: tuple[int, ...], window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    trees = (*TREES, WIDE)[: len(rows)]
    lens = [c + len(t) for c, t in zip((40, 0, 33, 3), trees, strict=False)]
    case = attention_case(
        lens,
        rows,
        heads=Heads(4, 2, 16),
        block_size=4,
        dtype=dtype,
        parents=trees,
        padding_rows=1,
    )
    # Bits beyond a sequence's own columns of the mask are not part of its tree.
    starts = case.meta.query_start.tolist()
    for start, end, tree in zip(starts, starts[1:], trees, strict=False):
        case.meta.tree_mask[start:end, len(tree) :] = True
    compare(case, device, window=window)


@pytest.mark.parametrize(
    ("dtype", "rows", "window"), cover_values(DTYPES, [(1, 1), (12, 1)], [None, 9])
)
def test_sinks_as_gpt_oss_has_them(
    window: int | None, rows: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    lens, heads = [50, 37], Heads(4, 2, 64)
    case = place(attention_case(lens, rows, heads=heads, block_size=4, dtype=dtype), device)
    sinks = torch.tensor([2.0, -1.0, 0.5, 30.0], device=device, dtype=dtype)
    out = attend(
        case.q, case.k_cache, case.v_cache, case.meta,
        scale=0.3, sliding_window=window, sinks=sinks, tiles=SMALL,
    )  # fmt: skip
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks.float())
    for idx, (start, length) in enumerate(zip((0, rows[0]), lens, strict=True)):
        seen = reference.visible(rows[idx], length, sliding_window=window, tree=None, device=device)
        mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, float("-inf"))
        q = case.q[start : start + rows[idx]].float().transpose(0, 1)[None]
        keys, values = (
            x[idx].to(device).float().transpose(0, 1)[None] for x in (case.keys, case.values)
        )
        wanted, _ = eager_attention_forward(module, q, keys, values, mask[None, None], scaling=0.3)
        torch.testing.assert_close(
            out[start : start + rows[idx]], wanted[0].to(dtype), **TOLERANCE[dtype]
        )


@pytest.mark.parametrize(("dtype", "rows"), cover_values(DTYPES, [(1, 1), (12, 1)]))
def test_fp8_cache(rows: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    case = attention_case([50, 37], rows, heads=Heads(4, 2, 64), block_size=4, dtype=dtype)
    case = place(case, device)
    k_cache = (case.k_cache.float() / 0.5).to(torch.float8_e4m3fn)
    v_cache = (case.v_cache.float() / 0.25).to(torch.float8_e4m3fn)
    out = attend(
        case.q, k_cache, v_cache, case.meta,
        scale=0.2, k_scale=0.5, v_scale=0.25, tiles=SMALL,
    )  # fmt: skip
    wanted = reference.paged_attention(
        case.q, k_cache.float() * 0.5, v_cache.float() * 0.25, case.meta, scale=0.2
    )
    torch.testing.assert_close(out, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tiles_that_a_gpu_gets(dtype: torch.dtype, device: torch.device) -> None:
    case = attention_case(
        [300, 70, 290], [1, 70, 5], heads=Heads(4, 2, 128), block_size=16, dtype=dtype
    )
    compare(case, device, tiles=None)
    case = attention_case([700, 3], [1, 1], heads=Heads(4, 1, 64), block_size=64, dtype=dtype)
    compare(case, device, tiles=None)


def test_the_interface_of_all_ops(device: torch.device) -> None:
    """`paged_attention` allocates its result; the query lies inside a wider buffer."""
    case = place(attention_case([30, 8], [1, 1], heads=Heads(4, 2, 64), block_size=4), device)
    wide = torch.zeros(2, 8, 64, device=device)
    wide[:, 2:6] = case.q
    arguments = (wide[:, 2:6], case.k_cache, case.v_cache, case.meta)
    wanted = reference.paged_attention(*arguments, scale=0.2, sliding_window=20)
    result = paged_attention(*arguments, scale=0.2, sliding_window=20)
    assert result.is_contiguous()
    torch.testing.assert_close(result, wanted, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("lens", [[], [20, 7]])
def test_padding_rows_alone_are_zero(lens: list[int], device: torch.device) -> None:
    heads = Heads(6, 2, 16)
    compare(
        attention_case(lens, [0] * len(lens), heads=heads, block_size=4, padding_rows=21), device
    )
    nothing = place(attention_case([], [], heads=heads, block_size=4), device)
    result = attend(nothing.q, nothing.k_cache, nothing.v_cache, nothing.meta, scale=1.0)
    assert result.shape == (0, 6, 16)


def test_a_bucket_is_replayed_for_a_smaller_batch(device: torch.device) -> None:
    """The host knows only bounds: wider ones give the same result."""
    case = attention_case([50, 9, 33], [1, 9, 3], heads=Heads(4, 2, 64), block_size=4)
    loose = replace(case.meta, max_query_len=64, max_context_len=4096)
    compare(case._replace(meta=loose), device)


def test_blocks_beyond_32_bits_of_elements(device: torch.device) -> None:
    """Blocks far apart need 64-bit offsets. Untouched pages take no memory."""
    case = place(attention_case([17], [1], heads=Heads(2, 1, 16), block_size=4), device)
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
    out = attend(case.q, caches[0], caches[1], case.meta, scale=0.2, tiles=SMALL)
    torch.testing.assert_close(out, wanted, **TOLERANCE[torch.float32])


TILES = AttentionTiles(programs=128, min_chunk=256, min_programs=8, max_splits=16)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        # One long sequence: all splits. Many: enough splits to fill the device. Short ones: none.
        ((1, 2, 8, 1, 100_000, None), (1, 16, 16, 64, False)),
        ((16, 2, 8, 1, 100_000, None), (1, 16, 4, 256, False)),
        ((64, 2, 8, 1, 100_000, None), (1, 16, 1, 256, False)),
        ((4, 2, 8, 1, 256, None), (1, 16, 1, 256, False)),
        ((4, 2, 8, 1, 300, None), (1, 16, 2, 256, False)),
        # Few sequences: shorter splits, of whole blocks.
        ((1, 2, 8, 1, 512, None), (1, 16, 8, 64, False)),
        ((2, 2, 8, 1, 512, None), (1, 16, 4, 128, False)),
        ((3, 2, 8, 1, 384, None), (1, 16, 2, 192, False)),
        ((1, 2, 8, 1, 256, None), (1, 16, 1, 256, False)),
        # A window bounds the keys to split.
        ((4, 2, 8, 1, 100_000, 512), (1, 16, 4, 256, False)),
        # A tree's rows fill several tiles; a prompt makes single rows the only short slices.
        ((1, 2, 8, 48, 100_000, None), (64, 64, 1, 256, False)),
        ((9, 2, 8, 2, 100, None), (2, 16, 8, 256, False)),
        ((4, 2, 8, 2000, 2000, None), (2, 16, 8, 256, True)),
        ((4, 2, 24, 2000, 2000, None), (1, 32, 8, 256, True)),
        ((2, 2, 1, 0, 50, None), (1, 16, 1, 256, False)),
    ],
)
def test_plans(batch: tuple[Any, ...], wanted: tuple[int, int, int, int, bool]) -> None:
    assert plan_attention(*batch, TILES) == wanted


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


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = place(attention_case([9], [1], heads=Heads(4, 2, 16), block_size=4), device)
    q, k_cache, v_cache, meta = case[:4]
    with pytest.raises(ValueError, match="3 query heads for 2 key/value heads"):
        attend(q[:, :3], k_cache, v_cache, meta, scale=1.0)
    with pytest.raises(ValueError, match=r"caches .* for heads of 8"):
        attend(q[..., :8], k_cache, v_cache, meta, scale=1.0)
    with pytest.raises(ValueError, match=r"caches are torch\.float16"):
        attend(q, k_cache.half(), v_cache.half(), meta, scale=1.0)
    with pytest.raises(ValueError, match=r"sinks \(2,\) for 4 heads"):
        attend(q, k_cache, v_cache, meta, scale=1.0, sinks=q.new_zeros(2))
    with pytest.raises(ValueError, match=r"scaled by -0\.5 \* 1\.0"):
        attend(q, k_cache, v_cache, meta, scale=-0.5)
    with pytest.raises(ValueError, match="a sliding window of 0"):
        attend(q, k_cache, v_cache, meta, scale=1.0, sliding_window=0)
    wrong = replace(meta, context_lens=meta.context_lens.long())
    with pytest.raises(ValueError, match="must be contiguous int32"):
        attend(q, k_cache, v_cache, wrong, scale=1.0)
    wrong = replace(meta, tree_lens=meta.query_start)
    with pytest.raises(ValueError, match=r"tree_lens torch\.int32 \(2,\) for 1 sequences"):
        attend(q, k_cache, v_cache, wrong, scale=1.0)
    wrong = replace(meta, tree_mask=torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"tree_mask torch\.bool \(2, 1\) for 1 rows"):
        attend(q, k_cache, v_cache, wrong, scale=1.0)
