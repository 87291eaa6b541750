"""Compiled retrieval: what it selects, attention to that, and batches with other rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import deterministic, reference
from kernels.contracts import KeyCodes
from kernels.cpu import ops as cpu
from kernels.cpu.attention import renew
from kernels.cpu.compiled.attention import HeadShape
from kernels.cpu.compiled.retrieval import attend_selected, can_search
from kernels.cpu.compiled.retrieval_words import RetrievalWords
from kernels.cpu.simd.lanes import PORTABLE_VARIABLE
from tests.kernels.cases import AttentionCase, Heads, attention_case
from tests.kernels.matrices import values_then_pairs
from tests.kernels.retrieval_cases import attended, check_selection, coded

SCALE = 0.2
HEADS = [
    Heads(9, 3, 64),
    Heads(8, 1, 64),
    Heads(4, 4, 32),
    Heads(10, 2, 128),
    Heads(2, 2, 16),
    Heads(7, 1, 256),
]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(case: AttentionCase, codes: KeyCodes) -> tuple[Tensor, list[Tensor]]:
    """Run the kernels; return their output and, by sequence of the retrieval, what is selected."""
    num_groups = case.k_cache.shape[2]
    retrieval = case.meta.retrieval
    assert retrieval is not None
    assert can_search(codes, case.k_cache)
    words = RetrievalWords(HeadShape(case.q.shape[1], num_groups, case.q.shape[2]))
    words.fill(case.meta, retrieval)
    out = torch.full_like(case.q, float("nan"))
    attend_selected(case.q, case.k_cache, case.v_cache, codes, words, out, scale=SCALE)
    counts = torch.minimum(retrieval.budgets, retrieval.coded_end - retrieval.num_sinks)
    starts, seqs = case.meta.query_start, retrieval.seqs.long()
    counts[starts[seqs + 1] == starts[seqs]] = 0
    found = words.positions.long().split([num_groups * count for count in counts.tolist()])
    return out, [each.view(num_groups, -1) for each in found]


def check(case: AttentionCase, codes: KeyCodes) -> None:
    assert case.meta.retrieval is not None
    out, selected = attend(case, codes)
    tolerance = 1e-5 if case.q.dtype == torch.float32 else 2.0**-8
    for idx, seq in enumerate(case.meta.retrieval.seqs.tolist()):
        start, end = case.meta.query_start[seq : seq + 2].tolist()
        if start == end:
            continue
        check_selection(case, codes, idx, selected[idx])
        wanted = attended(case, idx, selected[idx], SCALE)
        torch.testing.assert_close(out[start:end].float(), wanted, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "cache", "num_rows", "end_and_budget"),
    values_then_pairs(
        HEADS,
        [*product([torch.float32, torch.bfloat16], [False, True])],
        [3, 1],
        [(2048, 300), (2100, 1), (1500, 640), (5, 1), (1025, 100)],
    ),
)
def test_the_best_keys_are_selected(
    heads: Heads,
    cache: tuple[torch.dtype, bool],
    num_rows: int,
    end_and_budget: tuple[int, int],
) -> None:
    """Segments that are full, hardly begun, and one with less keys than a vector."""
    dtype, in_fp8 = cache
    case = attention_case(
        [2200], [num_rows], heads=heads, block_size=16, dtype=dtype, in_fp8=in_fp8
    )
    check(*coded(case, {0: end_and_budget}))


@pytest.mark.parametrize(
    ("heads", "dtype", "num_rows", "kept", "end_and_budget"),
    values_then_pairs(
        HEADS,
        [torch.float32, torch.bfloat16],
        [1, 3],
        [1, 2, 17],
        [(19 * 1024 + 5, 300), (20 * 1024, 900)],
    ),
)
def test_only_the_best_segments_are_searched(
    heads: Heads, dtype: torch.dtype, num_rows: int, kept: int, end_and_budget: tuple[int, int]
) -> None:
    """Of more summaries than a vector has lanes; the last segment may be short or full."""
    case = attention_case([20500], [num_rows], heads=heads, block_size=16, dtype=dtype)
    check(*coded(case, {0: end_and_budget}, kept=kept))


def test_each_sequence_chooses_its_segments() -> None:
    case = attention_case(
        [3100, 40, 4200, 1200], [1, 1, 4, 1], heads=Heads(6, 2, 64), block_size=16
    )
    check(*coded(case, {0: (3000, 100), 2: (4100, 333), 3: (1100, 7)}, kept=1))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e38])
def test_queries_that_cannot_be_compared_search_segments_that_exist(number: float) -> None:
    case = attention_case([5000, 5000], [1, 1], heads=Heads(4, 2, 64), block_size=16)
    case, codes = coded(case, {0: (4900, 1500), 1: (4900, 1500)}, kept=2)
    _, (_, other) = attend(case, codes)
    case.q[0] = number
    _, (selected, again) = attend(case, codes)
    assert torch.equal(again, other)
    assert bool((selected.diff(dim=1) > 0).all())
    assert selected.min() >= 4
    assert selected.max() < 4900
    assert all(len(each.unique()) <= 3 for each in selected // 1024)


def test_of_equal_summaries_the_first_are_searched() -> None:
    case = attention_case([6000], [1], heads=Heads(4, 2, 32), block_size=16)
    case, codes = coded(case, {0: (5900, 1200)}, kept=2)
    codes.summaries[:] = 1
    _, (selected,) = attend(case, codes)
    assert set((selected // 1024).flatten().tolist()) <= {0, 1, 5}


@pytest.mark.parametrize("num_sinks", [0, 1, 100, 1100])
@pytest.mark.parametrize("block_size", [1, 48])
def test_sinks(num_sinks: int, block_size: int) -> None:
    case = attention_case([1400], [2], heads=Heads(4, 2, 32), block_size=block_size)
    check(*coded(case, {0: (1300, 90)}, num_sinks=num_sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [2096, 5000])
def test_a_budget_for_all_keys_is_attention_to_all(budget: int, dtype: torch.dtype) -> None:
    case = attention_case([2300, 40], [4, 1], heads=Heads(9, 3, 64), block_size=16, dtype=dtype)
    case, codes = coded(case, {0: (2100, budget)})
    wide = (x.float() for x in (case.q, case.k_cache, case.v_cache))
    wanted = reference.paged_attention(*wide, case.meta, scale=SCALE)
    result = cpu.paged_attention(
        case.q, case.k_cache, case.v_cache, case.meta, scale=SCALE, codes=codes
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(result.float(), wanted, rtol=tolerance, atol=1e-5)


def mixed_case(dtype: torch.dtype, *, trees: bool = False) -> tuple[AttentionCase, KeyCodes]:
    query_lens = [1, 2, 20, 1, 4, 0]
    parents = None
    if trees:
        chains = [[None, *range(count - 1)] for count in (1, 2, 20, 1, 4, 1)]
        parents = [*chains[:4], [None, 0, 0, 1], chains[5]]
    case = attention_case(
        [1300, 2500, 60, 1100, 700, 1200],
        query_lens,
        heads=Heads(6, 2, 64),
        block_size=16,
        dtype=dtype,
        padding_rows=2,
        parents=parents,
    )
    return coded(case, {0: (1024, 100), 1: (2400, 333), 3: (1090, 2000), 5: (1100, 7)})


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rows_of_a_batch_attend_as_without(dtype: torch.dtype, trees: bool) -> None:
    case, codes = mixed_case(dtype, trees=trees)
    arguments = (case.q, case.k_cache, case.v_cache)
    dense = cpu.paged_attention(*arguments, case.meta, scale=SCALE)
    out = torch.full_like(case.q, float("nan"))
    result = cpu.paged_attention(*arguments, case.meta, scale=SCALE, codes=codes, out=out)
    assert result is out
    assert not result[28:].any(), "padding"
    expected, _ = attend(case, codes)
    check(case, codes)
    for rows in (slice(0, 3), slice(23, 24)):
        assert torch.equal(result[rows], expected[rows])
        assert not torch.equal(result[:3], dense[:3])
    assert expected[3:23].isnan().all()
    for rows in (slice(3, 23), slice(24, 28)):
        torch.testing.assert_close(result[rows], dense[rows], rtol=1e-5, atol=1e-5)
    again = cpu.paged_attention(*arguments, case.meta, scale=SCALE, codes=codes)
    assert torch.equal(again, result), "the memo changed the result"


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


def test_codes_behind_the_last_key_do_not_matter() -> None:
    case = attention_case([1300], [1], heads=Heads(9, 3, 64), block_size=16)
    case, codes = coded(case, {0: (1111, 60)})
    assert case.meta.retrieval is not None
    before = attend(case, codes)[0]
    codes.codes[case.meta.retrieval.segments[0, 1], :, :, 1111 - 1024 :] = 255
    assert torch.equal(attend(case, codes)[0], before)


@pytest.mark.usefixtures("threads")
def test_threads_do_not_change_a_bit() -> None:
    case, codes = mixed_case(torch.bfloat16)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(attend(case, codes))
    for out, selected in results[1:]:
        assert torch.equal(out.nan_to_num(), results[0][0].nan_to_num())
        assert all(torch.equal(a, b) for a, b in zip(selected, results[0][1], strict=True))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0, 1e38])
def test_a_row_that_cannot_be_compared_spoils_no_other(number: float) -> None:
    case, codes = mixed_case(torch.float32)
    wanted, _ = attend(case, codes)
    case.q[0] = number
    out, selected = attend(case, codes)
    assert torch.equal(out[1:].nan_to_num(), wanted[1:].nan_to_num())
    assert selected[0].shape[1] == 100
    assert bool((selected[0].diff(dim=1) > 0).all())
    assert bool((selected[0] >= 4).all())
    assert bool((selected[0] < 1024).all())


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


@pytest.mark.slow
def test_processors_without_wide_vectors() -> None:
    """The same checks with the portable operations, in a separate process."""
    program = (
        "import torch; from tests.kernels.cpu.test_retrieval import *\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    check(*mixed_case(dtype))\n"
        "test_each_sequence_chooses_its_segments()\n"
        "test_of_equal_scores_the_lowest_positions_win()\n"
        "test_codes_behind_the_last_key_do_not_matter()\n"
    )
    environment = os.environ | {PORTABLE_VARIABLE: "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env=environment,
        cwd=Path(__file__).parents[3],
        timeout=300,
    )
