"""CPU attention against the reference over odd shapes, mixed lengths, trees and windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import AttentionMeta
from kernels.cpu import ops as cpu
from kernels.cpu.attention import MAX_GROUP_ELEMENTS, renew
from tests.kernels.cases.attention import AttentionCase, Heads, attention_case

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def compare(case: AttentionCase, *, window: int | None = None) -> None:
    arguments = (case.q, case.k_cache, case.v_cache, case.meta)
    wanted = reference.paged_attention(*arguments, scale=0.2, sliding_window=window)
    out = torch.full_like(wanted, float("nan"))
    result = cpu.paged_attention(*arguments, scale=0.2, sliding_window=window, out=out)
    assert result is out
    torch.testing.assert_close(result, wanted, **TOLERANCE[case.q.dtype])
    again = cpu.paged_attention(*arguments, scale=0.2, sliding_window=window)
    assert torch.equal(again, result), "the memo changed the result"


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
    monkeypatch.setattr("kernels.cpu.attention.SINGLE_ROWS", 8)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(20, 1, 96, rank=64)])
@pytest.mark.parametrize("window", [None, 5])
def test_small_trees_are_computed_row_by_row_and_renewed(
    window: int | None, heads: Heads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
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
            heads=heads,
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
        options: dict[str, Any] = {
            "scale": 0.2,
            "sliding_window": window,
            "sinks": torch.ones(heads.query),
        }
        wanted = cpu.paged_attention(*arguments, other.meta, **options)
        renewed = cpu.paged_attention(*arguments, kept.meta, **options)
        assert torch.equal(renewed, wanted)


@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(4, 2, 21)])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("num_rows", [3, 40])
def test_trees_and_chains_in_groups(num_rows: int, heads: Heads, window: int | None) -> None:
    """Rows of heads of an odd size are never computed one by one, nor those of long pieces."""
    tree = (None, *((node - 1) // 2 for node in range(1, num_rows)))
    for parents in (None, (tree, (None, 0))):
        compare(
            attention_case(
                [num_rows + 30, 9], [num_rows, 2], heads=heads, block_size=4, parents=parents
            ),
            window=window,
        )


@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(4, 2, 21), Heads(20, 1, 96, rank=64)])
@pytest.mark.parametrize("window", [None, 7])
def test_groups_are_renewed(
    heads: Heads, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other pieces, rows that are computed one by one beside them, and trees."""
    monkeypatch.setattr("kernels.cpu.attention.SINGLE_ROWS", 8)
    tree = (None, *((node - 1) // 2 for node in range(1, 17)))
    steps: Sequence[tuple[list[int], list[int], Any]] = (
        ([40, 30], [14, 10], None),
        ([50, 90, 9], [20, 1, 3], None),
        ([33, 9], [17, 7], (tree, (None, 0, 0, 1, 1, 4, 2))),
        ([24], [24], None),
    )
    cases = [
        attention_case(lens, rows, heads=heads, block_size=4, parents=parents, seed=turn)
        for turn, (lens, rows, parents) in enumerate(steps)
    ]
    kept = cases[0]
    for other in cases:
        compare(other, window=window)
        renew(kept.meta, other.meta)
        arguments = (other.q, other.k_cache, other.v_cache)
        options: dict[str, Any] = {"scale": 0.2, "sliding_window": window}
        wanted = cpu.paged_attention(*arguments, other.meta, **options)
        assert torch.equal(cpu.paged_attention(*arguments, kept.meta, **options), wanted)


def test_layers_with_different_windows_share_one_meta() -> None:
    case = attention_case([50, 60], [1, 2], heads=Heads(4, 2, 64), block_size=4)
    for window in (None, 8, None, 8):
        compare(case, window=window)


def test_the_plan_is_made_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.attention.SINGLE_ROWS", 8)
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
