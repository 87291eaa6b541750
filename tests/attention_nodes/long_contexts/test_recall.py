"""The best keys by brute force, in Python."""

from __future__ import annotations

import pytest
import torch

from attention_nodes.long_contexts import recall
from attention_nodes.long_contexts.recall import best_keys, share_found
from tests.kernels.cases.attention import Heads, attention_case
from tests.kernels.cases.retrieval import coded, queries_of
from tests.pairwise import few

SINKS, COUNT = 4, 50


@pytest.mark.parametrize("chunk", [64, 4096])
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], torch.bfloat16))
def test_the_best_keys_have_the_greatest_products(
    monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(recall, "CHUNK_KEYS", chunk)
    heads = Heads(6, 2, 32)
    case = attention_case([40, 1200, 600], [1, 3, 1], heads=heads, block_size=16, dtype=dtype)
    ends = {1: 1090, 2: 500}
    case, _ = coded(case, {seq: (end, COUNT) for seq, end in ends.items()}, num_sinks=SINKS)
    for idx, (seq, end) in enumerate(ends.items()):
        best = best_keys(case.q, case.k_cache, case.meta, idx, count=COUNT)
        queries, keys = queries_of(case, seq), case.keys[seq].float()
        for group in range(2):
            products = [
                max(
                    float(queries[row, head] @ keys[key, group])
                    for row in range(len(queries))
                    for head in range(3 * group, 3 * group + 3)
                )
                for key in range(end)
            ]
            ranked = sorted(range(SINKS, end), key=lambda key: products[key], reverse=True)
            assert set(best[group].tolist()) == set(ranked[:COUNT])


def test_the_share_is_of_each_heads_own_keys() -> None:
    best = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    selected = torch.tensor([[2, 4, 5, 6], [1, 6, 7, 8]])
    assert share_found(selected, best) == 5 / 8
    assert share_found(best, best) == 1.0
