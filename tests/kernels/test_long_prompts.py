"""The division of a micro-batch's rows by the length of their prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.contracts import AttentionMeta
from kernels.long_prompts import rows_by_length

BLOCK_SIZE = 4
# Five rows of a sequence with 8 positions in blocks 7 and 40, one of another with 3 in block 1.
META = AttentionMeta(
    query_start=torch.tensor([0, 5, 6], dtype=torch.int32),
    context_lens=torch.tensor([8, 3], dtype=torch.int32),
    block_tables=torch.tensor([[7, 40], [1, 0]], dtype=torch.int32),
    max_query_len=5,
    max_context_len=8,
)


def test_rows_of_long_prompts_are_told_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.long_prompts.MIN_LONG_ROWS", 5)
    by_length = rows_by_length(META)
    assert by_length is not None
    (long,) = by_length.long
    assert (long.rows, long.num_keys) == (slice(0, 5), 8)
    places = [7 * BLOCK_SIZE + each for each in range(4)], [40 * BLOCK_SIZE + e for e in range(4)]
    assert long.slots(BLOCK_SIZE).tolist() == [*places[0], *places[1]]
    assert by_length.others.tolist() == [5]
    meta = by_length.meta
    assert (meta.query_start.tolist(), meta.context_lens.tolist()) == ([0, 1], [3])
    assert meta.block_tables[0, 0] == 1
    assert (meta.max_query_len, meta.max_context_len) == (1, 3)
    assert rows_by_length(META) is by_length


def test_without_a_long_prompt_or_with_trees_there_is_no_division(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernels.long_prompts.MIN_LONG_ROWS", 6)
    assert rows_by_length(replace(META, memo={})) is None
    # An upper bound may be above every length.
    assert rows_by_length(replace(META, max_query_len=9, memo={})) is None
    monkeypatch.setattr("kernels.long_prompts.MIN_LONG_ROWS", 5)
    mask = torch.ones(6, 5, dtype=torch.bool).tril()
    assert rows_by_length(replace(META, tree_mask=mask, memo={})) is None
