"""Compiled retrieval: what it selects, attention to that, and batches with other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import deterministic, reference
from kernels.cpu import ops as cpu
from kernels.cpu.attention import renew
from tests.kernels.cases.attention import Heads, attention_case
from tests.kernels.cases.retrieval import check_selection, coded
from tests.kernels.cases.searches import SCALE, attend, mixed_case


def test_of_equal_summaries_the_first_are_searched() -> None:
    case = attention_case([6000], [1], heads=Heads(4, 2, 32), block_size=16)
    case, codes = coded(case, {0: (5900, 1200)}, kept=2)
    codes.summaries[:] = 1
    _, (selected,) = attend(case, codes)
    assert set((selected // 1024).flatten().tolist()) <= {0, 1, 5}


@pytest.mark.parametrize("ops", [cpu, reference])
def test_what_was_selected_can_be_asked(ops: Any) -> None:
    case, codes = mixed_case(torch.float32)
    assert case.meta.retrieval is not None
    ops.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, scale=SCALE, codes=codes)
    _, expected = attend(case, codes)
    for idx in range(3):
        found = ops.selected_keys(case.q, codes, case.meta, idx)
        check_selection(case, codes, idx, found)
        if ops is cpu:
            assert torch.equal(found, expected[idx])


def test_of_equal_scores_the_lowest_positions_win() -> None:
    case = attention_case([3000], [1], heads=Heads(4, 2, 32), block_size=16)
    case, codes = coded(case, {0: (2900, 1300)}, num_sinks=10)
    assert case.meta.retrieval is not None
    case.meta.retrieval.segments[:] = 0
    codes.codes[:] = 5
    _, (selected,) = attend(case, codes)
    assert torch.equal(selected, torch.arange(10, 1310).expand(2, -1))
    # One key is worse than all others: it has the codes of another centroid, whose part points
    # away from what is asked.
    codes.centroids[0, :, :, 6] = 0
    codes.centroids[0, :, :, 5] = (case.q[0].view(2, 2, 8, 4).sum(1) * 3).bfloat16()
    codes.codes[0, 1, :, 100] = 6
    _, (selected,) = attend(case, codes)
    assert torch.equal(selected[0], torch.arange(10, 1310))
    # Key 100 of each segment.
    rest = [key for key in range(10, 1312) if key not in (100, 1124)]
    assert selected[1].tolist() == rest


def test_threads_do_not_change_a_bit() -> None:
    case, codes = mixed_case(torch.bfloat16)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(attend(case, codes))
    for out, selected in results[1:]:
        assert torch.equal(out.nan_to_num(), results[0][0].nan_to_num())
        assert all(torch.equal(a, b) for a, b in zip(selected, results[0][1], strict=True))


@pytest.mark.parametrize(("heads", "window"), [(Heads(4, 2, 80), None), (Heads(4, 2, 64), 900)])
def test_what_is_not_compiled_is_the_reference(heads: Heads, window: int | None) -> None:
    case = attention_case([1300, 20], [2, 1], heads=heads, block_size=16)
    case, codes = coded(case, {0: (1200, 100)})
    results = [
        ops.paged_attention(
            case.q,
            case.k_cache,
            case.v_cache,
            case.meta,
            scale=SCALE,
            sliding_window=window,
            sinks=torch.ones(4),
            codes=codes,
        )
        for ops in (cpu, reference)
    ]
    assert torch.equal(*results)


def test_layers_without_codes_attend_to_all() -> None:
    case, codes = mixed_case(torch.float32)
    arguments = (case.q, case.k_cache, case.v_cache)
    cpu.paged_attention(*arguments, case.meta, scale=SCALE, codes=codes)
    plain = replace(case.meta, retrieval=None, memo={})
    results = [
        cpu.paged_attention(*arguments, meta, scale=SCALE, codes=None)
        for meta in (case.meta, plain)
    ]
    results.append(cpu.paged_attention(*arguments, plain, scale=SCALE, codes=codes))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_renewed_plan_is_that_of_the_other_batch(dtype: torch.dtype) -> None:
    """Other sequences retrieve, more of them, or all, among more segments and among fewer."""
    lens = ((1300, 2500, 60), (2400, 1300, 2600), (1100, 30, 40), (1100, 1300))
    query_lens = ((1, 2, 3), (1, 2, 3), (2, 1, 3), (2, 4))
    ends: tuple[dict[int, tuple[int, int]], ...] = (
        {1: (2400, 333)},
        {0: (2100, 50), 1: (1200, 400), 2: (2048, 9)},
        {0: (1025, 200)},
        {1: (1200, 30)},
    )
    cases = [
        coded(
            attention_case(
                context_lens,
                query_lens[turn],
                heads=Heads(6, 2, 64),
                block_size=16,
                dtype=dtype,
                seed=turn,
            ),
            ends[turn],
        )
        for turn, context_lens in enumerate(lens)
    ]
    kept = cases[0][0].meta
    for case, codes in cases:
        arguments = (case.q, case.k_cache, case.v_cache)
        wanted = cpu.paged_attention(*arguments, case.meta, scale=SCALE, codes=codes)
        renew(kept, case.meta)
        renewed = cpu.paged_attention(*arguments, kept, scale=SCALE, codes=codes)
        assert torch.equal(renewed, wanted)


def test_deterministic_kernels_refuse() -> None:
    case, codes = mixed_case(torch.float32)
    arguments = (case.q, case.k_cache, case.v_cache, case.meta)
    with pytest.raises(ValueError, match="all keys"):
        deterministic.paged_attention(*arguments, scale=SCALE, codes=codes)
    deterministic.paged_attention(*arguments, scale=SCALE)
