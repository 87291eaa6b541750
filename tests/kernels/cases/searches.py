"""The search for keys on the CPU and on a GPU: its output, and what it selected."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contracts import AttentionMeta, KeyCodes, Retrieval, SearchBounds
from kernels.cpu.compiled.attention.rows import HeadShape
from kernels.cpu.compiled.retrieval.search import attend_selected, can_search
from kernels.cpu.compiled.retrieval.words import RetrievalWords
from kernels.triton.attention.launches import paged_attention
from kernels.triton.retrieval.launches import select_slots
from tests.kernels.cases.attention import AttentionCase, Heads, attention_case
from tests.kernels.cases.attention import placed as placed_case
from tests.kernels.cases.retrieval import attended, check_selection, coded

SCALE = 0.2


def mixed_case(dtype: torch.dtype, *, trees: bool = False) -> tuple[AttentionCase, KeyCodes]:
    """Return a batch in which sequences 0, 1, 3 and 5, which has no rows, select keys.

    Beside them are a chunk of a prompt, a draft (of branches, or a chain) and padding. The prompt
    and one of the selecting drafts have more rows than what kernels compute one by one.
    """
    counts = [1, 9, 12, 1, 4, 0]
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
    return coded(case, {0: (1024, 100), 1: (1290, 33), 3: (1090, 2000), 5: (1100, 7)})


class Found(NamedTuple):
    out: Tensor
    selected: list[Tensor]
    """By sequence of the retrieval i64[G, k], ascending; empty for one without rows."""


def attend(
    case: AttentionCase,
    codes: KeyCodes,
    device: torch.device | None = None,
    sinks: Tensor | None = None,
) -> Found:
    """Attend with the CPU's kernels, or with Triton's on a device."""
    if device is None:
        return _on_cpu(case, codes, sinks)
    return _by_triton(case, codes, device, None if sinks is None else sinks.to(device))


def _on_cpu(case: AttentionCase, codes: KeyCodes, sinks: Tensor | None) -> Found:
    num_groups = case.k_cache.shape[2]
    retrieval = case.meta.retrieval
    assert retrieval is not None
    assert can_search(codes, case.k_cache)
    words = RetrievalWords(HeadShape(case.q.shape[1], num_groups, case.q.shape[2]))
    words.fill(case.meta, retrieval)
    out = torch.full_like(case.q, float("nan"))
    arguments = (case.q, case.k_cache, case.v_cache, codes, words, out)
    attend_selected(*arguments, scale=SCALE, sinks=sinks)
    counts = torch.minimum(retrieval.budgets, retrieval.coded_end - retrieval.num_sinks)
    starts, seqs = case.meta.query_start, retrieval.seqs.long()
    counts[starts[seqs + 1] == starts[seqs]] = 0
    found = words.positions.long().split([num_groups * count for count in counts.tolist()])
    return Found(out, [each.view(num_groups, -1) for each in found])


def arguments(case: AttentionCase) -> tuple[Tensor, Tensor, Tensor, AttentionMeta]:
    return case.q, case.k_cache, case.v_cache, case.meta


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
    moved = placed_case(case, device)
    meta = replace(moved.meta, retrieval=Retrieval(*there))
    codes = KeyCodes(*(x.to(device) for x in (codes.centroids, codes.codes, codes.summaries)))
    return moved._replace(meta=meta), codes


def _by_triton(
    case: AttentionCase, codes: KeyCodes, device: torch.device, sinks: Tensor | None
) -> Found:
    """Also check that the lists have the sinks first and the keys behind the coded ones last."""
    there, its_codes = placed(case, codes, device)
    out = torch.full_like(there.q, float("nan"))
    options = {"codes": its_codes, "sinks": sinks, "out": out}
    found = paged_attention(*arguments(there), scale=SCALE, **options)
    assert found is out
    retrieval, block_size = case.meta.retrieval, case.k_cache.shape[1]
    assert retrieval is not None
    lists = select_slots(there.q, block_size, its_codes, there.meta, score_bytes=1)
    selected = []
    for idx, seq in enumerate(retrieval.seqs.tolist()):
        start, end = case.meta.query_start[seq : seq + 2].tolist()
        if start == end:
            selected.append(torch.empty(case.k_cache.shape[2], 0, dtype=torch.int64))
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
        selected.append(keys[:, sinks : sinks + count].sort(1).values)
    return Found(found.cpu(), selected)


def check(
    case: AttentionCase,
    codes: KeyCodes,
    device: torch.device | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compare with the plain selection, and attention to what was selected; return the output."""
    assert case.meta.retrieval is not None
    out, selected = attend(case, codes, device, sinks)
    bf16 = 2.0**-8 if device is None else 2e-2
    rtol = 1e-5 if case.q.dtype == torch.float32 else bf16
    atol = 1e-5 if device is None else rtol
    for idx, seq in enumerate(case.meta.retrieval.seqs.tolist()):
        start, end = case.meta.query_start[seq : seq + 2].tolist()
        if start == end:
            continue
        check_selection(case, codes, idx, selected[idx])
        wanted = attended(case, idx, selected[idx], SCALE, sinks)
        torch.testing.assert_close(out[start:end].float(), wanted, rtol=rtol, atol=atol)
    return out
