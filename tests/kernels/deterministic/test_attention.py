"""Deterministic attention: equal to the reference, and a token's bits depend on no other token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import deterministic, reference
from kernels.deterministic_attention import CHUNK_KEYS, MAX_GROUP_ELEMENTS
from tests.kernels.cases.attention import AttentionCase, Heads, attention_case
from tests.kernels.cases.matrices import values_then_pairs

DTYPES = (torch.float32, torch.bfloat16)
# The default model, Qwen3-MoE of the benchmarks, a tiny one, more query heads than rows.
HEADS = (Heads(9, 3, 64), Heads(16, 4, 64), Heads(4, 2, 16), Heads(20, 1, 8))


def attend(case: AttentionCase, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    arguments = (case.q, case.k_cache, case.v_cache, case.meta)
    return deterministic.paged_attention(*arguments, scale=0.2, sliding_window=window, sinks=sinks)


def test_more_keys_than_one_group_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []
    product = torch.bmm

    def watched(first: Tensor, second: Tensor) -> Tensor:
        gathered.append(second.numel())
        return product(first, second)

    monkeypatch.setattr(torch, "bmm", watched)
    case = attention_case([1500] * 5, [1] * 5, heads=Heads(8, 8, 64), block_size=16)
    wanted = reference.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, scale=0.2)
    torch.testing.assert_close(attend(case), wanted, rtol=1e-5, atol=1e-5)
    assert len(gathered) > 4
    assert max(gathered) <= MAX_GROUP_ELEMENTS


class Plain:
    """One sequence in plain order, for any chunking and storage. With a window it has sinks."""

    def __init__(
        self, length: int, heads: Heads, dtype: torch.dtype, *, window: int | None
    ) -> None:
        generator = torch.Generator().manual_seed(length)
        self.heads, self.dtype, self.length = heads, dtype, length
        self.q = torch.randn(length, heads.query, heads.dim, generator=generator).to(dtype)
        self.k = torch.randn(length, heads.kv, heads.dim, generator=generator).to(dtype)
        self.v = torch.randn(length, heads.kv, heads.dim, generator=generator).to(dtype)
        self.window = window
        self.sinks = None if window is None else torch.randn(heads.query, generator=generator)

    def among(self, start: int, end: int, others: Sequence[int], *, place: int, bs: int) -> Tensor:
        """Return the attention of positions start..end-1 batched with decode rows of `others`."""
        context = [*others[:place], end, *others[place:]]
        counts = [1] * len(context)
        counts[place] = end - start
        case = attention_case(
            context, counts, heads=self.heads, block_size=bs, dtype=self.dtype, seed=sum(others)
        )
        table = case.meta.block_tables[place, : -(-end // bs)].long()
        positions = torch.arange(end)
        slots = table[positions // bs] * bs + positions % bs
        case.k_cache.view(-1, *self.k.shape[1:])[slots] = self.k[:end]
        case.v_cache.view(-1, *self.v.shape[1:])[slots] = self.v[:end]
        first = int(case.meta.query_start[place])
        case.q[first : first + end - start] = self.q[start:end]
        return attend(case, self.window, self.sinks)[first : first + end - start]


@pytest.mark.parametrize(
    ("dtype_and_window", "heads"), values_then_pairs([*product(DTYPES, [None, 30])], HEADS)
)
def test_a_tokens_bits_are_the_same_however_it_is_computed(
    heads: Heads, dtype_and_window: tuple[torch.dtype, int | None]
) -> None:
    dtype, window = dtype_and_window
    check_tokens(heads, window, dtype, examples=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("heads", HEADS)
def test_a_tokens_bits_thoroughly(heads: Heads, window: int | None, dtype: torch.dtype) -> None:
    check_tokens(heads, window, dtype, examples=60)


def check_tokens(heads: Heads, window: int | None, dtype: torch.dtype, *, examples: int) -> None:
    plain = Plain(3 * CHUNK_KEYS + 9, heads, dtype, window=window)
    torch.set_num_threads(1)
    whole = plain.among(0, plain.length, [], place=0, bs=16)

    @settings(max_examples=examples, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        end = data.draw(st.integers(1, plain.length))
        start = data.draw(st.one_of(st.just(end - 1), st.integers(0, end - 1)))
        others = data.draw(st.lists(st.integers(1, 400), max_size=5))
        place = data.draw(st.integers(0, len(others)))
        block_size = data.draw(st.sampled_from((1, 4, 16, 48)))
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        result = plain.among(start, end, others, place=place, bs=block_size)
        assert torch.equal(result, whole[start:end])

    check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 30])
def test_a_branch_of_a_tree_has_the_bits_of_plain_decoding(
    window: int | None, dtype: torch.dtype
) -> None:
    """The branch crosses a chunk border; its keys are not contiguous in the cache."""
    heads, committed = Heads(4, 2, 16), CHUNK_KEYS - 3
    plain = Plain(committed + 6, heads, dtype, window=window)
    parents: list[int | None] = [None, 0, 0, 1, 2, 4, 3, 5, 7]
    branch = [0, 2, 4, 5, 7, 8]
    case = attention_case(
        [committed + len(parents)],
        [len(parents)],
        heads=heads,
        block_size=4,
        dtype=dtype,
        parents=[parents],
    )
    places = torch.tensor([*range(committed), *(committed + node for node in branch)])
    slots = case.meta.block_tables[0].long()[places // 4] * 4 + places % 4
    case.k_cache.view(-1, heads.kv, heads.dim)[slots] = plain.k
    case.v_cache.view(-1, heads.kv, heads.dim)[slots] = plain.v
    case.q[branch] = plain.q[committed:]
    wanted = plain.among(committed, plain.length, [], place=0, bs=16)
    assert torch.equal(attend(case, window, plain.sinks)[branch], wanted)
