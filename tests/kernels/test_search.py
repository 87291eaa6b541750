"""Kernels that search codes: what they select, and attention to that."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.cpu import ops as cpu
from kernels.triton.attention import launches
from kernels.triton.attention.launches import paged_attention
from tests.kernels.cases.attention import Heads, attention_case
from tests.kernels.cases.matrices import slow_rows, values_then_pairs
from tests.kernels.cases.retrieval import coded
from tests.kernels.cases.searches import SCALE, arguments, attend, check, mixed_case, placed
from tests.kernels.triton.tiles import SMALL_TILES

BF16, FP32 = torch.bfloat16, torch.float32
HEADS = [
    Heads(9, 3, 64),
    Heads(8, 1, 64),
    Heads(4, 4, 32),
    Heads(10, 2, 128),
    Heads(2, 2, 16),
    Heads(7, 1, 256),
]


@pytest.mark.parametrize(
    ("heads", "cache", "num_rows", "block_size", "coding", "sinks"),
    values_then_pairs(
        HEADS,
        [*product([FP32, BF16], [False, True])],
        [3, 1],
        [16, 1, 48],
        # The end of the keys with codes, the budget, and sinks.
        [
            *((2048, 300, 4), (2100, 1, 0), (1500, 640, 1), (5, 1, 4), (1025, 100, 4)),
            *((1390, 77, 1100), (1300, 90, 100)),
        ],
        [None, 0.0, 200.0, float("-inf")],
    ),
)
def test_the_best_keys_are_selected(
    heads: Heads,
    cache: tuple[torch.dtype, bool],
    num_rows: int,
    block_size: int,
    coding: tuple[int, int, int],
    sinks: float | None,
) -> None:
    """Segments that are full, hardly begun, and one with less keys than a vector."""
    end, budget, num_sinks = coding
    case = attention_case(
        [2200], [num_rows], heads=heads, block_size=block_size, dtype=cache[0], in_fp8=cache[1]
    )
    own = None if sinks is None else torch.randn(heads.query) + sinks
    check(*coded(case, {0: (end, budget)}, num_sinks=num_sinks), sinks=own)


@pytest.mark.parametrize(
    ("heads", "dtype", "num_rows", "block_size", "coding"),
    [
        pytest.param(Heads(9, 3, 32), FP32, 1, 16, (1300, 90, 4), marks=pytest.mark.slow),
        pytest.param(Heads(8, 1, 80), BF16, 3, 48, (1025, 300, 0), marks=pytest.mark.slow),
        pytest.param(Heads(2, 2, 16), BF16, 1, 1, (5, 1, 1), marks=pytest.mark.slow),
        (Heads(17, 1, 64), FP32, 2, 32, (1390, 77, 1100)),
    ],
)
def test_a_gpu_selects_the_best_keys(
    heads: Heads,
    dtype: torch.dtype,
    num_rows: int,
    block_size: int,
    coding: tuple[int, int, int],
    device: torch.device,
) -> None:
    """Rows of more tiles than one; sinks beyond one."""
    end, budget, num_sinks = coding
    case = attention_case([1400], [num_rows], heads=heads, block_size=block_size, dtype=dtype)
    found = coded(case, {0: (end, budget)}, num_sinks=num_sinks)
    check(*found, device, torch.randn(heads.query) if num_sinks > 1 else None)


@pytest.mark.parametrize(
    ("kernels", "heads", "dtype", "kept"),
    slow_rows(
        [*product(["cpu"], HEADS, [FP32, BF16], [1, 2, 17]), ("triton", Heads(17, 1, 80), BF16, 1)],
        beside=[
            *(
                ("cpu", each, (FP32, BF16)[n % 2], (1, 2, 17)[n % 3])
                for n, each in enumerate(HEADS)
            ),
            ("triton", Heads(4, 1, 32), FP32, 1),
        ],
    ),
)
@pytest.mark.slow
def test_only_the_best_segments_are_searched(
    kernels: str, heads: Heads, dtype: torch.dtype, kept: int, device: torch.device
) -> None:
    """Of more summaries than a vector or a tile has, of few, and of none."""
    case = attention_case(
        [18500, 1200, 3200, 3090], [1, 1, 2, 1], heads=heads, block_size=16, dtype=dtype
    )
    ends = {0: (18440, 90), 1: (1100, 30), 2: (3072, 700), 3: (3073, 100)}
    check(*coded(case, ends, kept=kept), device if kernels == "triton" else None)


# The interpreter computes with numpy.
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("kernels", "number", "kept"),
    [
        *product(["cpu"], [float("nan"), float("inf"), 0.0, 1e38], [None, 1]),
        pytest.param("triton", float("nan"), 1, marks=pytest.mark.slow),
    ],
)
def test_a_row_that_cannot_be_compared_selects_keys_that_exist_and_spoils_no_other(
    kernels: str, number: float, kept: int | None, device: torch.device
) -> None:
    place = device if kernels == "triton" else None
    case = attention_case([3200, 3200], [1, 1], heads=Heads(4, 2, 16), block_size=16)
    case, codes = coded(case, {0: (3190, 50), 1: (3190, 50)}, kept=kept)
    wanted = attend(case, codes, place)
    case.q[0] = number
    found = attend(case, codes, place)
    assert torch.equal(found.out[1], wanted.out[1])
    assert torch.equal(found.selected[1], wanted.selected[1])
    selected = found.selected[0]
    assert selected.shape == (2, 50)
    assert bool((selected.diff(dim=1) > 0).all())
    assert selected.min() >= 4
    assert selected.max() < 3190
    if kept is not None:
        assert all(len(each.unique()) <= kept + 1 for each in selected // 1024)


@pytest.mark.parametrize(
    ("kernels", "budget", "dtype"),
    [
        *product(["cpu"], [1107, 5000], [FP32, BF16]),
        pytest.param("triton", 5000, FP32, marks=pytest.mark.slow),
    ],
)
def test_a_budget_for_all_keys_is_attention_to_all(
    kernels: str, budget: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Codes behind the last key do not matter, even those of no centroid."""
    case = attention_case([1300, 40], [4, 1], heads=Heads(9, 3, 32), block_size=16, dtype=dtype)
    case, codes = coded(case, {0: (1111, budget)})
    assert case.meta.retrieval is not None
    codes.codes[case.meta.retrieval.segments[0, 1], :, :, 1111 - 1024 :] = 255
    wide = (x.float() for x in (case.q, case.k_cache, case.v_cache))
    wanted = reference.paged_attention(*wide, case.meta, scale=SCALE)
    attention = cpu.paged_attention
    if kernels == "triton":
        (case, codes), attention = placed(case, codes, device), paged_attention
    found = attention(*arguments(case), scale=SCALE, codes=codes)
    tolerance = 1e-5 if dtype == FP32 else 2.0**-8
    torch.testing.assert_close(found.cpu().float(), wanted, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize(
    ("kernels", "dtype", "trees"),
    [
        *product(["cpu"], [FP32, BF16], [False, True]),
        pytest.param("triton", FP32, True, marks=pytest.mark.slow),
        pytest.param("triton", BF16, False, marks=pytest.mark.slow),
    ],
)
def test_other_rows_of_a_batch_attend_as_without(
    kernels: str,
    dtype: torch.dtype,
    trees: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launches, "attention_tiles", lambda *_: SMALL_TILES)
    case, codes = mixed_case(dtype, trees=trees)
    sinks = torch.randn(6) if trees else None
    dense = reference.paged_attention(*arguments(case), scale=SCALE, sinks=sinks)
    if kernels == "triton":
        found = check(case, codes, device, sinks)
    else:
        found = torch.full_like(case.q, float("nan"))
        options: dict[str, Any] = {"scale": SCALE, "sinks": sinks, "codes": codes}
        assert cpu.paged_attention(*arguments(case), **options, out=found) is found
        again = cpu.paged_attention(*arguments(case), **options)
        assert torch.equal(again, found), "the memo changed the result"
        selecting = check(case, codes, sinks=sinks)
        assert torch.equal(found[:10], selecting[:10])
        assert torch.equal(found[22], selecting[22])
        assert selecting[10:22].isnan().all()
    assert not found[27:].any(), "padding"
    assert not torch.allclose(found[:10], dense[:10], rtol=2e-2, atol=2e-2)
    tolerance = 1e-5 if dtype == FP32 else 2e-2
    for rows in (slice(10, 22), slice(23, 27)):
        torch.testing.assert_close(found[rows], dense[rows], rtol=tolerance, atol=tolerance)
