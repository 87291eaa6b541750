"""Tiles of a prompt's rows against the reference, and bit for bit however a prompt is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import attention
from kernels.cpu.attention import paged_attention, renew
from kernels.cpu.compiled.attention.prompts import (
    MAX_DIM,
    PromptRows,
    PromptWords,
    attend_prompts,
    can_attend_prompts,
)
from tests.kernels.cases.attention import (
    BATCHES,
    AttentionCase,
    Heads,
    attention_case,
)

BF16 = torch.bfloat16
ROUNDING = {"rtol": 2e-2, "atol": 2e-2}
SCALE = 0.2


@pytest.fixture(autouse=True)
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plan choose tiles for pieces of nine rows and more."""
    monkeypatch.setattr(attention, "SINGLE_ROWS", 8)


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("rows of a prompt became a group")

    monkeypatch.setattr(attention, "_make_group", refuse)


def case_of(
    context_lens: Sequence[int], query_lens: Sequence[int], heads: Heads, **more: Any
) -> AttentionCase:
    return attention_case(context_lens, query_lens, heads=heads, block_size=16, dtype=BF16, **more)


def compare(case: AttentionCase, *, window: int | None = None, has_sinks: bool = False) -> Tensor:
    arguments = (case.q, case.k_cache, case.v_cache, case.meta)
    sinks = torch.linspace(-2, 3, case.q.shape[1]) if has_sinks else None
    options: dict[str, Any] = {"scale": SCALE, "sliding_window": window, "sinks": sinks}
    wanted = reference.paged_attention(*arguments, **options)
    out = torch.full_like(wanted, float("nan"))
    assert paged_attention(*arguments, **options, out=out) is out
    torch.testing.assert_close(out, wanted, **ROUNDING)
    return out


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(9, 3, 16), Heads(4, 4, 128)])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_prompts_attend_as_the_reference_says(
    heads: Heads, window: int | None, has_sinks: bool
) -> None:
    """Prompts from the start, behind a context, of a key more than a block, and of few rows."""
    lens, rows = [300, 129, 65, 40, 9], [300, 60, 65, 9, 3]
    compare(case_of(lens, rows, heads), window=window, has_sinks=has_sinks)


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("name", ["mixed", "long", "no rows", "nothing"])
def test_micro_batches_of_all_kinds(name: str) -> None:
    lens, rows, _ = BATCHES[name]
    compare(case_of(lens, rows, Heads(4, 2, 32), padding_rows=2))


@pytest.mark.usefixtures("no_groups")
def test_what_lies_before_the_window_is_not_read() -> None:
    """Its blocks may hold another sequence by now, or nothing yet."""
    case = case_of([300], [40], Heads(4, 2, 64))
    gone = 300 - 40 + 1 - 70
    wanted = compare(case, window=70)
    slots = case.meta.block_tables[0, :-1].long()
    for cache in (case.k_cache, case.v_cache):
        kept = cache[slots].flatten(0, 1)
        kept[:gone] = float("nan")
        cache[slots] = kept.view(len(slots), *cache.shape[1:])
    out = paged_attention(
        case.q, case.k_cache, case.v_cache, replace(case.meta, memo={}), scale=SCALE,
        sliding_window=70,
    )  # fmt: skip
    assert torch.equal(out, wanted)


def test_a_sum_over_many_blocks_forgets_none() -> None:
    """A factor of each block that is not quite 1 would weigh late keys more than early ones."""
    num_keys = 16_384
    case = case_of([num_keys], [9], Heads(2, 1, 16))
    case.q.zero_()
    values = torch.linspace(-1, 1, num_keys).bfloat16().view(-1, 16, 1, 1)
    case.v_cache[case.meta.block_tables[0, :-1].long()] = values.expand(-1, -1, 1, 16)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.meta, scale=SCALE)
    assert out.abs().max() < 1e-3


@pytest.mark.usefixtures("no_groups")
def test_the_widest_heads_fit() -> None:
    compare(case_of([200], [200], Heads(2, 1, MAX_DIM)))


def attend(case: AttentionCase, first: int, count: int, *, window: int | None) -> Tensor:
    """Return the rows `first` to `first + count` of the case's only prompt."""
    rows = case.q[first : first + count].contiguous()
    words = PromptWords(case.q.shape[1], case.k_cache.shape[2], window)
    words.fill([PromptRows(0, 0, count, first)], case.meta.block_tables)
    out = torch.empty_like(rows)
    attend_prompts(rows, case.k_cache, case.v_cache, words, out, scale=SCALE)
    return out


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_depend_neither_on_parts_nor_on_threads(
    window: int | None, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of([333], [333], Heads(8, 2, 64))
    whole = attend(case, 0, 333, window=window)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    parts = [attend(case, begin, end - begin, window=window) for begin, end in
             ((0, 1), (1, 130), (130, 200), (200, 333))]  # fmt: skip
    assert torch.equal(torch.cat(parts), whole)


def test_a_recorded_plan_attends_as_the_fresh_one_says() -> None:
    """Other lengths, other rows of each sequence, a tree, and prompts again."""
    heads, tree = Heads(4, 2, 32), ((None, *range(29)), (None, 0, *range(1, 9)))
    cases = [
        case_of([60, 20], [30, 10], heads, seed=0),
        case_of([90, 44], [10, 30], heads, seed=1),
        case_of([90, 44], [30, 10], heads, seed=2, parents=tree),
        case_of([31, 200], [31, 9], heads, seed=3),
    ]
    kept = cases[0]
    for case in cases:
        wanted = compare(case)
        arguments = (case.q, case.k_cache, case.v_cache)
        renew(kept.meta, case.meta)
        options: dict[str, Any] = {"scale": SCALE, "sinks": None}
        assert torch.equal(paged_attention(*arguments, kept.meta, **options), wanted)


def test_what_tiles_do_not_know_is_refused() -> None:
    case = case_of([20], [20], Heads(4, 2, 32))
    assert can_attend_prompts(case.q, case.k_cache, case.v_cache)
    fp32 = attention_case([20], [20], heads=Heads(4, 2, 32), block_size=16)
    in_fp8 = case_of([20], [20], Heads(4, 2, 32), in_fp8=True)
    latents = case_of([20], [20], Heads(4, 1, 64, rank=32))
    odd = case_of([20], [20], Heads(4, 2, 24))
    wide = case_of([20], [20], Heads(4, 2, MAX_DIM + 16))
    for other in (fp32, in_fp8, latents, odd, wide):
        assert not can_attend_prompts(other.q, other.k_cache, other.v_cache)
        compare_any(other)


def compare_any(case: AttentionCase) -> None:
    arguments = (case.q, case.k_cache, case.v_cache, replace(case.meta, memo={}))
    wanted = reference.paged_attention(*arguments, scale=SCALE)
    torch.testing.assert_close(paged_attention(*arguments, scale=SCALE), wanted, **ROUNDING)
