"""Kernels that search codes: what they select, attention to that, and batches with other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import AttentionMeta, HostKeys, KeyCodes, Retrieval, SearchBounds
from kernels.triton.attention.launches import paged_attention
from kernels.triton.retrieval.launches import select_slots
from tests.kernels.cases import AttentionCase, Heads, attention_case
from tests.kernels.retrieval_cases import attended, check_selection, coded
from tests.kernels.triton.test_attention import place

SCALE = 0.2
ENDS = {0: (1024, 100), 1: (1290, 33), 3: (1090, 2000), 5: (1100, 7)}


def bounded(case: AttentionCase) -> Retrieval:
    """Return a case's retrieval with the least bounds."""
    retrieval, meta = case.meta.retrieval, case.meta
    assert retrieval is not None
    seqs, end = retrieval.seqs.long(), retrieval.coded_end
    selected = torch.minimum(retrieval.budgets, end - retrieval.num_sinks)
    bounds = SearchBounds(
        rows=int((meta.query_start[seqs + 1] - meta.query_start[seqs]).max()),
        segments=int(((end + 1023) // 1024 - retrieval.summarised + retrieval.kept).max()),
        budget=int(retrieval.budgets.max()),
        keys=int((meta.context_lens[seqs] - end + selected).max()) + retrieval.num_sinks,
    )
    return retrieval._replace(bounds=bounds)


def placed(
    case: AttentionCase, codes: KeyCodes, device: torch.device
) -> tuple[AttentionCase, KeyCodes]:
    retrieval = bounded(case)
    there = [each.to(device) if isinstance(each, Tensor) else each for each in retrieval]
    moved = place(case, device)
    meta = replace(moved.meta, retrieval=Retrieval(*there))
    codes = KeyCodes(*(x.to(device) for x in (codes.centroids, codes.codes, codes.summaries)))
    return moved._replace(meta=meta), codes


def arguments(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor, AttentionMeta]:
    return case.q, case.k_cache, case.v_cache, case.meta


def check(case: AttentionCase, codes: KeyCodes, device: torch.device) -> Tensor:
    """Compare with the plain selection, and attention to what was selected; return the output."""
    there, its_codes = placed(case, codes, device)
    out = torch.full_like(there.q, float("nan"))
    found = paged_attention(*arguments(there), scale=SCALE, codes=its_codes, out=out)
    assert found is out
    retrieval, block_size = case.meta.retrieval, case.k_cache.shape[1]
    assert retrieval is not None
    lists = select_slots(there.q, block_size, its_codes, there.meta, score_bytes=1)
    tolerance = 1e-5 if case.q.dtype == torch.float32 else 2e-2
    for idx, seq in enumerate(retrieval.seqs.tolist()):
        start, end = case.meta.query_start[seq : seq + 2].tolist()
        if start == end:
            continue
        coded_end, sinks = int(retrieval.coded_end[idx]), retrieval.num_sinks
        last = int(case.meta.context_lens[seq])
        slots = lists.block_tables[seq, :, : int(lists.context_lens[seq])].cpu()
        table = case.meta.block_tables[seq, : -(-last // block_size)].tolist()
        key_of = {
            block * block_size + offset: number * block_size + offset
            for number, block in enumerate(table)
            for offset in range(block_size)
        }
        keys = torch.tensor([[key_of[slot] for slot in own] for own in slots.tolist()])
        count = keys.shape[1] - sinks - (last - coded_end)
        assert (keys[:, :sinks] == torch.arange(sinks)).all()
        assert (keys[:, sinks + count :] == torch.arange(coded_end, last)).all()
        selected = keys[:, sinks : sinks + count].sort(1).values
        check_selection(case, codes, idx, selected)
        wanted = attended(case, idx, selected, SCALE).to(case.q.dtype)
        torch.testing.assert_close(found[start:end].cpu(), wanted, rtol=tolerance, atol=tolerance)
    return found.cpu()


@pytest.mark.parametrize(
    ("heads", "dtype", "num_rows", "block_size", "end_and_budget", "num_sinks"),
    [
        (Heads(9, 3, 32), torch.float32, 1, 16, (1300, 90), 4),
        (Heads(8, 1, 80), torch.bfloat16, 3, 48, (1025, 300), 0),
        (Heads(2, 2, 16), torch.bfloat16, 1, 1, (5, 1), 1),
        (Heads(17, 1, 64), torch.float32, 2, 32, (1390, 77), 1100),
    ],
)
def test_the_best_keys_are_selected(
    heads: Heads,
    dtype: torch.dtype,
    num_rows: int,
    block_size: int,
    end_and_budget: tuple[int, int],
    num_sinks: int,
    device: torch.device,
) -> None:
    """Segments that are full or hardly begun; rows of more tiles than one; sinks beyond one."""
    case = attention_case([1400], [num_rows], heads=heads, block_size=block_size, dtype=dtype)
    check(*coded(case, {0: end_and_budget}, num_sinks=num_sinks), device)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (Heads(9, 3, 32), torch.float32),
        pytest.param(Heads(17, 1, 80), torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_only_the_best_segments_are_searched(
    heads: Heads, dtype: torch.dtype, device: torch.device
) -> None:
    """Of more summaries than a tile, of few, and of none; rows of more tiles than one."""
    case = attention_case(
        [18500, 1200, 3200, 3090], [1, 1, 2, 1], heads=heads, block_size=16, dtype=dtype
    )
    ends = {0: (18440, 90), 1: (1100, 30), 2: (3072, 700), 3: (3073, 100)}
    check(*coded(case, ends, kept=1), device)


def test_queries_that_cannot_be_compared_search_segments_that_exist(device: torch.device) -> None:
    case = attention_case([3200, 3200], [1, 1], heads=Heads(2, 1, 16), block_size=16)
    case, codes = placed(*coded(case, {0: (3190, 50), 1: (3190, 50)}, kept=1), device)
    other = select_slots(case.q, 16, codes, case.meta).block_tables[1].tolist()
    case.q[0] = float("nan")
    lists = select_slots(case.q, 16, codes, case.meta)
    assert lists.block_tables[1].tolist() == other
    slots, known = lists.block_tables[0, 0].tolist(), case.meta.block_tables[0].tolist()
    assert len(slots) == len(set(slots)) == lists.context_lens[0] == 4 + 50 + 10
    assert all(slot // 16 in known for slot in slots)


@pytest.mark.parametrize(
    ("dtype", "trees"),
    [
        (torch.float32, True),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
    ],
)
def test_other_rows_of_a_batch_attend_as_without(
    dtype: torch.dtype, trees: bool, device: torch.device
) -> None:
    """Beside them a chunk of a prompt, a tree, a sequence without rows, and padding.

    The prompt and one of the drafts are longer than what the split kernel takes.
    """
    counts = [1, 65, 68, 1, 4, 0]
    chains = [[None, *range(count - 1)] for count in (*counts[:5], 1)]
    case = attention_case(
        [1300, 1400, 90, 1100, 70, 1200],
        counts,
        heads=Heads(6, 2, 32),
        block_size=16,
        dtype=dtype,
        padding_rows=2,
        parents=[*chains[:4], [None, 0, 0, 1], chains[5]] if trees else None,
    )
    case, codes = coded(case, ENDS)
    dense = reference.paged_attention(*arguments(case), scale=SCALE)
    found = check(case, codes, device)
    assert not found[139:].any(), "padding"
    assert not torch.allclose(found[:66], dense[:66], rtol=2e-2, atol=2e-2)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for rows in (slice(66, 134), slice(135, 139)):
        torch.testing.assert_close(found[rows], dense[rows], rtol=tolerance, atol=tolerance)


def test_a_budget_for_all_keys_is_attention_to_all(device: torch.device) -> None:
    """Codes behind the last key do not matter, even those of no centroid."""
    case = attention_case([1300, 40], [4, 1], heads=Heads(9, 3, 32), block_size=16)
    case, codes = coded(case, {0: (1111, 5000)})
    assert case.meta.retrieval is not None
    codes.codes[case.meta.retrieval.segments[0, 1], :, :, 1111 - 1024 :] = 255
    wanted = reference.paged_attention(*arguments(case), scale=SCALE)
    there, its_codes = placed(case, codes, device)
    found = paged_attention(*arguments(there), scale=SCALE, codes=its_codes)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_a_row_that_cannot_be_compared_selects_keys_that_exist(device: torch.device) -> None:
    case = attention_case([1100, 1100], [1, 1], heads=Heads(2, 1, 16), block_size=16)
    case, codes = placed(*coded(case, {0: (1090, 50), 1: (1090, 50)}), device)
    other = select_slots(case.q, 16, codes, case.meta).block_tables[1].tolist()
    case.q[0] = float("nan")
    lists = select_slots(case.q, 16, codes, case.meta)
    assert lists.block_tables[1].tolist() == other
    slots, known = lists.block_tables[0, 0].tolist(), case.meta.block_tables[0, :69].tolist()
    assert len(slots) == len(set(slots)) == lists.context_lens[0] == 4 + 50 + 10
    assert all(slot // 16 in known for slot in slots)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
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
