"""The compiled attention kernels against an fp32 computation, over odd shapes and any threads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.attention_rows import SPLIT_KEYS, Row, plan_work
from kernels.cpu.compiled.attention.latents import (
    attend_to_latents,
    can_attend_to_latents,
    divide_heads,
)
from kernels.cpu.compiled.attention.rows import HeadShape, WorkWords, attend_rows, can_attend
from kernels.cpu.simd.attention import CHUNK_KEYS
from kernels.cpu.simd.matmul import may_use_tiles
from tests.kernels.cases.attention import AttentionCase, Heads, attention_case
from tests.kernels.cases.matrices import values_then_pairs
from tests.pairwise import cover_pairs, cover_values, slow_rows

LENS = [1, 2, 15, 16, 17, 33, 65, CHUNK_KEYS, CHUNK_KEYS + 1, SPLIT_KEYS, SPLIT_KEYS + 1, 1100]
HEADS = [
    Heads(9, 3, 64),
    Heads(8, 1, 80),
    Heads(4, 4, 96),
    Heads(8, 2, 128),
    Heads(1, 1, 64),
    Heads(5, 1, 64),
    Heads(12, 1, 72),
    Heads(6, 2, 8),
    Heads(7, 1, 256),
    # Of which a task has some only.
    Heads(16, 1, 576),
    Heads(36, 2, 320),
    # Latents: in blocks of heads, if there is AMX, but for the last ones.
    Heads(16, 1, 576, rank=512),
    Heads(1, 1, 96, rank=64),
    Heads(37, 1, 128, rank=64),
    Heads(100, 1, 160, rank=128),
    Heads(5, 1, 40, rank=24),
    Heads(6, 2, 96, rank=64),
]
LATENTS = Heads(37, 1, 96, rank=64)


def attend(case: AttentionCase, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    """Attend the last row of every sequence with the kernel."""
    rows = [
        Row(idx, idx, 0 if window is None else max(0, length - window), length)
        for idx, length in enumerate(case.meta.context_lens.tolist())
    ]
    out = torch.full((*case.q.shape[:2], case.v_cache.shape[3]), float("nan"), dtype=case.q.dtype)
    attend_to(case, rows, out, sinks)
    return out


def attend_to(
    case: AttentionCase, rows: list[Row], out: Tensor, sinks: Tensor | None = None
) -> None:
    """Attend these rows with the kernel that is for them."""
    by_blocks = can_attend_to_latents(case.q, case.k_cache, case.v_cache)
    heads = HeadShape(case.q.shape[1], case.k_cache.shape[2], case.q.shape[2])
    words = WorkWords(heads, divide_heads if by_blocks else None)
    words.fill(plan_work(rows), case.meta.block_tables)
    assert can_attend(case.q, case.k_cache, case.meta.block_tables, out)
    kernel = attend_to_latents if by_blocks else attend_rows
    kernel(case.q, case.k_cache, case.v_cache, words, out, scale=0.2, sinks=sinks)


def wanted(case: AttentionCase, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    wide = (x.float() for x in (case.q, case.k_cache, case.v_cache))
    return reference.paged_attention(
        *wide, case.meta, scale=0.2, sliding_window=window, sinks=sinks
    )


def check(case: AttentionCase, window: int | None = None, sinks: Tensor | None = None) -> None:
    result = attend(case, window, sinks)
    # Only the output is rounded to bf16: by half a unit in the last place.
    tolerance = 1e-5 if case.q.dtype == torch.float32 else 2.0**-8
    atol = 1e-5
    if can_attend_to_latents(case.q, case.k_cache, case.v_cache):
        # Weights are rounded too; so is what they add up to.
        atol = 2.0**-8 * max(float(values.abs().max()) for values in case.values)
    expected = wanted(case, window, sinks)
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=atol)


FACTORS: tuple[Sequence[Any], ...] = (
    HEADS,
    [*product([torch.float32, torch.bfloat16], [False, True])],
    [None, 0.0, 200.0, -200.0, float("-inf")],
)
LONG = (HEADS[9], HEADS[10], HEADS[14])


@pytest.mark.parametrize(
    ("heads", "cache", "sinks"),
    slow_rows(
        cover_pairs(*FACTORS), beside=[row for row in cover_values(*FACTORS) if row[0] not in LONG]
    ),
)
def test_shapes(heads: Heads, cache: tuple[torch.dtype, bool], sinks: float | None) -> None:
    dtype, in_fp8 = cache
    own = None if sinks is None else torch.randn(heads.query) + sinks
    for block_size in (1, 16, 48):
        case = attention_case(
            LENS,
            [1] * len(LENS),
            heads=heads,
            block_size=block_size,
            dtype=dtype,
            in_fp8=in_fp8,
        )
        check(case, sinks=own)


@pytest.mark.parametrize(
    ("heads", "cache", "block_size", "window"),
    values_then_pairs(
        [Heads(6, 2, 64), LATENTS],
        [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
        [1, 16, 48],
        [1, None, 100],
    ),
)
def test_branches_give_the_bits_of_the_same_keys_in_a_row(
    heads: Heads, cache: tuple[torch.dtype, bool], block_size: int, window: int | None
) -> None:
    """Branches across chunks, pieces and blocks; keys that are not on them are no numbers."""
    dtype, in_fp8 = cache
    rng = random.Random(block_size)
    lens = [3, 40, 200, CHUNK_KEYS + 80, 1500]
    shape = {"heads": heads, "block_size": block_size, "dtype": dtype, "in_fp8": in_fp8}
    case = attention_case(lens, [1] * len(lens), **shape)
    seen = []
    for length in lens:
        first = length - min(length, 1 + length // 3)
        branch = sorted({length - 1, *rng.sample(range(first, length), (length - first) // 2)})
        seen.append((first, branch))
    plain = attention_case(
        [first + len(branch) for first, branch in seen], [1] * len(lens), **shape
    )
    plain.q.copy_(case.q)
    rows = []
    for idx, (first, branch) in enumerate(seen):
        num_keys = first + len(branch)
        start = 0 if window is None else max(0, num_keys - window)
        rows.append(Row(idx, idx, start, num_keys, tuple(branch)))
        for to, position in enumerate([*range(first), *branch]):
            move_key(case, plain, idx, position, to)
        for position in set(range(first, lens[idx])) - set(branch):
            for cache in (case.k_cache, case.v_cache):
                cache[place_of(case, idx, position)] = float("nan")
    expected = attend(plain, window)
    out = torch.full_like(expected, float("nan"))
    attend_to(case, rows, out)
    check(plain, window)
    assert torch.equal(out, expected)


def place_of(case: AttentionCase, idx: int, position: int) -> tuple[int, int]:
    block, offset = divmod(position, case.k_cache.shape[1])
    return int(case.meta.block_tables[idx, block]), offset


def move_key(source: AttentionCase, target: AttentionCase, idx: int, place: int, to: int) -> None:
    """Copy a sequence's key and value into another case."""
    read, write = place_of(source, idx, place), place_of(target, idx, to)
    target.k_cache[write], target.v_cache[write] = source.k_cache[read], source.v_cache[read]


@pytest.mark.parametrize("heads", [Heads(9, 3, 64), LATENTS])
@pytest.mark.parametrize("lens", [[1300], LENS])
def test_threads_do_not_change_a_bit(lens: list[int], heads: Heads) -> None:
    case = attention_case(lens, [1] * len(lens), heads=heads, block_size=16, dtype=torch.bfloat16)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(attend(case))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("heads", "dtype"), [(Heads(9, 3, 64), torch.float32), (LATENTS, torch.bfloat16)]
)
def test_other_rows_do_not_change_a_bit(heads: Heads, dtype: torch.dtype) -> None:
    case = attention_case(LENS, [1] * len(LENS), heads=heads, block_size=16, dtype=dtype)
    together = attend(case)
    for idx, length in enumerate(LENS):
        alone = torch.full_like(together, float("nan"))
        attend_to(case, [Row(idx, idx, 0, length)], alone)
        assert torch.equal(alone[idx], together[idx])
        assert alone[idx + 1 :].isnan().all(), "a row of another sequence was written"


@pytest.mark.parametrize(
    ("heads", "dtype"), [(Heads(4, 2, 64), torch.float32), (LATENTS, torch.bfloat16)]
)
def test_a_head_that_is_not_a_number_spoils_no_other(heads: Heads, dtype: torch.dtype) -> None:
    case = attention_case([20, 700, 40], [1] * 3, heads=heads, block_size=16, dtype=dtype)
    expected = attend(case)
    case.q[1, 2] = float("nan")
    result = attend(case)
    assert result[1, 2].isnan().all()
    result[1, 2] = expected[1, 2]
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("heads", "dtype"), [(Heads(2, 1, 64), torch.float32), (LATENTS, torch.bfloat16)]
)
def test_scores_far_apart(heads: Heads, dtype: torch.dtype) -> None:
    """Keys whose weight underflows, and a greatest score that comes last."""
    case = attention_case([400], [1], heads=heads, block_size=16, dtype=dtype)
    case.q.mul_(30)
    check(case)


def test_what_the_kernel_does_not_know() -> None:
    case = attention_case([8, 9], [1, 1], heads=Heads(2, 1, 64), block_size=4)
    q, cache, tables = case.q, case.k_cache, case.meta.block_tables
    assert can_attend(q, cache, tables, q)
    assert not can_attend(q.half(), cache.half(), tables, q.half())
    assert not can_attend(q, cache.bfloat16(), tables, q)
    assert not can_attend(q, cache.to(torch.float8_e5m2), tables, q)
    wide = torch.zeros(2, 1, 578)
    assert can_attend(wide, wide[None], tables, wide)
    assert not can_attend(wide, wide[None].to(torch.float8_e4m3fn), tables, wide)
    assert not can_attend(q, cache, tables.long(), q)
    assert not can_attend(q.transpose(0, 1).contiguous().transpose(0, 1), cache, tables, q)
    assert not can_attend(q[..., :63], cache[..., :63], tables, q[..., :63])


@pytest.mark.skipif(not may_use_tiles(), reason="a processor without AMX")
def test_which_latents_are_computed_in_blocks_of_heads() -> None:
    def can(dim: int, rank: int, *, groups: int = 1, dtype: torch.dtype = torch.bfloat16) -> bool:
        q, cache = torch.zeros(1, 2, dim, dtype=dtype), torch.zeros(3, 4, groups, dim, dtype=dtype)
        return can_attend_to_latents(q, cache, cache[..., :rank])

    assert can(576, 512)
    assert can(96, 64)
    assert not can(576, 512, dtype=torch.float32)
    assert not can(576, 512, groups=2)
    assert not can(64, 64), "values of their own"
    assert not can(640, 512)
    assert not can(576, 480)
    assert not can(80, 64)
