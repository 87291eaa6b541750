"""CPU attention against the reference over odd shapes, mixed lengths, trees and windows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import AttentionMeta
from kernels.cpu import ops as cpu
from kernels.cpu.attention import MAX_GROUP_ELEMENTS, renew
from tests.kernels.cases import AttentionCase, Heads, attention_case
from tests.kernels.matrices import values_then_pairs

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def compare(case: AttentionCase, *, window: int | None = None) -> None:
    arguments = (case.q, case.k_cache, case.v_cache, case.meta)
    wanted = reference.paged_attention(*arguments, scale=0.2, sliding_window=window)
    out = torch.full_like(case.q, float("nan"))
    result = cpu.paged_attention(*arguments, scale=0.2, sliding_window=window, out=out)
    assert result is out
    torch.testing.assert_close(result, wanted, **TOLERANCE[case.q.dtype])
    again = cpu.paged_attention(*arguments, scale=0.2, sliding_window=window)
    assert torch.equal(again, result), "the memo changed the result"


@pytest.mark.parametrize(
    ("cache", "block_size", "heads"),
    values_then_pairs(
        [*product([torch.float32, torch.bfloat16], [False, True])],
        [1, 16],
        [Heads(9, 3, 64), Heads(8, 1, 80), Heads(4, 4, 96), Heads(8, 2, 128), Heads(1, 1, 64)],
    ),
)
def test_mixed_batch(heads: Heads, block_size: int, cache: tuple[torch.dtype, bool]) -> None:
    dtype, in_fp8 = cache
    case = attention_case(
        [1, 100, 16, 17, 33, 64, 40],
        [1, 1, 16, 17, 1, 30, 3],
        heads=heads,
        block_size=block_size,
        dtype=dtype,
        in_fp8=in_fp8,
    )
    compare(case)


@pytest.mark.parametrize(
    ("dtype", "window"), values_then_pairs([torch.float32, torch.bfloat16], [1, 7, 32, 1000])
)
def test_sliding_window(window: int, dtype: torch.dtype) -> None:
    case = attention_case(
        [90, 5, 40, 300], [1, 5, 20, 1], heads=Heads(4, 2, 64), block_size=16, dtype=dtype
    )
    compare(case, window=window)


@pytest.mark.parametrize("context_len", [1, 2, 15, 16, 17, 100])
def test_one_decode_row(context_len: int) -> None:
    compare(attention_case([context_len], [1], heads=Heads(6, 2, 64), block_size=16))


@pytest.mark.parametrize("committed", [0, 70])
def test_slices_longer_than_a_chunk(committed: int) -> None:
    """300 rows are cut into 128, 128 and 44; 140 into 128 and a short rest that joins others."""
    lens = [committed + 300, 9, committed + 140]
    case = attention_case(lens, [300, 1, 140], heads=Heads(4, 2, 64), block_size=16)
    compare(case)
    compare(case, window=50)


def test_pieces_too_different_for_one_group() -> None:
    case = attention_case([3000, 9, 9, 900, 10], [9] * 5, heads=Heads(4, 4, 64), block_size=16)
    compare(case)


def test_more_keys_than_one_group_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case([1500] * 5, [9] * 5, heads=Heads(8, 8, 64), block_size=16)
    gathered = []

    def watched(q: Tensor, keys: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        gathered.append(keys.numel())
        return attend(q, keys, *rest, **options)

    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    compare(case)
    assert sum(gathered) == 2 * 5 * 1500 * 8 * 64, "compare runs it twice"
    assert max(gathered) <= MAX_GROUP_ELEMENTS


@pytest.mark.parametrize(
    ("window", "dtype_and_is_new"),
    values_then_pairs([None, 1, 3, 12], [*product([torch.float32, torch.bfloat16], [True, False])]),
)
def test_trees(window: int | None, dtype_and_is_new: tuple[torch.dtype, bool]) -> None:
    dtype, is_new = dtype_and_is_new
    wide: list[int | None] = [None, *(n // 3 for n in range(20))]
    trees = ((None, 0, 0, 1, 1, 4, 2), (None,), (None, None, 1, 0), wide)
    lens = [c + len(t) for c, t in zip((10, 0, 37, 3), trees, strict=True)]
    case = attention_case(
        lens,
        [len(t) if is_new else (len(t) + 1) // 2 for t in trees],
        heads=Heads(4, 2, 64),
        block_size=4,
        dtype=dtype,
        parents=trees,
    )
    compare(case, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_small_trees_are_computed_row_by_row_and_renewed(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that is renewed is that of the other trees, and of chains, but for the caches."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tree of few rows became a group")

    monkeypatch.setattr("kernels.cpu.attention._make_group", refuse)
    shapes: tuple[Any, ...] = (
        ((None, 0, 0, 1, 1, 4, 2, None), (None, 0, None)),
        ((None, None, 1, 0, 3, 2, 2, 5), (None, 0, 1)),
        None,
    )
    cases = [
        attention_case(
            [90 + turn, 9],
            [8, 3],
            heads=Heads(4, 2, 64),
            block_size=4,
            dtype=dtype,
            parents=parents,
            seed=turn,
        )
        for turn, parents in enumerate(shapes)
    ]
    kept = cases[0]
    for other in cases:
        compare(other, window=window)
        renew(kept.meta, other.meta)
        arguments = (other.q, other.k_cache, other.v_cache)
        wanted = cpu.paged_attention(*arguments, other.meta, scale=0.2, sliding_window=window)
        renewed = cpu.paged_attention(*arguments, kept.meta, scale=0.2, sliding_window=window)
        assert torch.equal(renewed, wanted)


def test_empty_slices_and_padding_rows() -> None:
    case = attention_case(
        [20, 7, 5], [0, 1, 0], heads=Heads(4, 2, 64), block_size=4, padding_rows=4
    )
    compare(case)


def test_no_sequence_at_all() -> None:
    case = attention_case([], [], heads=Heads(4, 2, 64), block_size=4)
    result = cpu.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, scale=1.0)
    assert result.shape == (0, 4, 64)


def test_a_query_inside_a_wider_buffer() -> None:
    case = attention_case([30, 8], [1, 1], heads=Heads(4, 2, 64), block_size=4)
    wide = torch.zeros(2, 8, 64)
    wide[:, 2:6] = case.q
    compare(case._replace(q=wide[:, 2:6]))


def test_layers_with_different_windows_share_one_meta() -> None:
    case = attention_case([50, 60], [1, 2], heads=Heads(4, 2, 64), block_size=4)
    for window in (None, 8, None, 8):
        compare(case, window=window)


def test_the_plan_is_made_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case([50, 60], [9, 10], heads=Heads(4, 2, 64), block_size=4)
    compare(case)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr("kernels.cpu.attention._make_group", refuse)
    compare(case)
    fresh = AttentionMeta(
        case.meta.query_start, case.meta.context_lens, case.meta.block_tables, 10, 60
    )
    with pytest.raises(AssertionError, match="planned again"):
        cpu.paged_attention(case.q, case.k_cache, case.v_cache, fresh, scale=1.0)
