"""Reference attention against transformers' eager attention and a walk along each branch.

Heads with sinks are gpt-oss', all others Llama's.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from kernels import reference
from kernels.retrieval import select
from tests.kernels.cases.attention import Heads, attention_case, path
from tests.kernels.cases.matrices import values_then_pairs
from tests.kernels.cases.retrieval import attended, coded

SINKS = [None, 0.0, 50.0, -50.0, float("-inf")]
"""What is added to random ones."""


def sinks_of(heads: Heads, shift: float | None) -> Tensor | None:
    return None if shift is None else torch.randn(heads.query) + shift


def eager(q, keys, values, *, scale, seen, sinks=None):  # type: ignore[no-untyped-def]
    """Transformers' attention of q [n, N, D] over keys, values [L, G, D]."""
    module = SimpleNamespace(
        num_key_value_groups=q.shape[1] // keys.shape[1], training=False, sinks=sinks
    )
    family = modeling_llama if sinks is None else modeling_gpt_oss
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
    out, _ = family.eager_attention_forward(
        module,
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        mask[None, None],
        scaling=scale,
    )
    return out[0]


@pytest.mark.parametrize(
    ("window", "heads", "shift", "blocks"),
    values_then_pairs(
        [None, 1, 7, 64],
        [Heads(9, 3, 64), Heads(8, 1, 80), Heads(4, 4, 96), Heads(6, 1, 40, rank=24)],
        SINKS,
        [*product([1, 16], [False, True])],
    ),
)
def test_equals_transformers(
    heads: Heads, blocks: tuple[int, bool], window: int | None, shift: float | None
) -> None:
    block_size, in_fp8 = blocks
    context_lens, query_lens = [1, 17, 100, 33, 40], [1, 17, 1, 5, 0]
    case = attention_case(
        context_lens, query_lens, heads=heads, block_size=block_size, in_fp8=in_fp8
    )
    sinks = sinks_of(heads, shift)
    out = reference.paged_attention(
        *(case.q, case.k_cache, case.v_cache, case.meta),
        scale=0.2,
        sliding_window=window,
        sinks=sinks,
    )
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    row = 0
    for idx, (length, num_new) in enumerate(zip(context_lens, query_lens, strict=True)):
        positions = torch.arange(length)
        seen = rule(0, 0, positions[length - num_new :, None], positions[None])
        wanted = eager(
            *(case.q[row : row + num_new], case.keys[idx], case.values[idx]),
            scale=0.2,
            seen=seen,
            sinks=sinks,
        )
        torch.testing.assert_close(out[row : row + num_new], wanted, rtol=1e-5, atol=1e-5)
        row += num_new


TREES = ((None, 0, 0, 1, 1, 4, 2), (None,), (None, None, 1, 0))


@pytest.mark.parametrize(
    ("window", "num_new", "shift"),
    values_then_pairs([None, 1, 3, 12], [(7, 1, 4), (3, 1, 0), (1, 1, 2)], SINKS[:2]),
)
def test_each_tree_node_attends_as_if_its_branch_were_the_text(
    num_new: tuple[int, ...], window: int | None, shift: float | None
) -> None:
    committed = [10, 0, 37]
    lens = [c + len(t) for c, t in zip(committed, TREES, strict=True)]
    heads = Heads(4, 2, 8)
    case = attention_case(lens, num_new, heads=heads, block_size=4, parents=TREES)
    sinks = sinks_of(heads, shift)
    out = reference.paged_attention(
        *(case.q, case.k_cache, case.v_cache, case.meta),
        scale=0.5,
        sliding_window=window,
        sinks=sinks,
    )
    row = 0
    for idx, tree in enumerate(TREES):
        for node in range(len(tree) - num_new[idx], len(tree)):
            branch = [*range(committed[idx]), *(committed[idx] + n for n in path(tree, node))]
            branch = branch if window is None else branch[-window:]
            wanted = eager(
                case.q[row : row + 1],
                case.keys[idx][branch],
                case.values[idx][branch],
                scale=0.5,
                seen=torch.ones(1, len(branch), dtype=torch.bool),
                sinks=sinks,
            )
            torch.testing.assert_close(out[row : row + 1], wanted, rtol=1e-5, atol=1e-5)
            row += 1


def test_a_chain_shaped_tree_is_causal_attention() -> None:
    chain: list[int | None] = [None, *range(5)]
    tree = attention_case([20], [6], heads=Heads(2, 1, 8), block_size=4, parents=[chain])
    plain = attention_case([20], [6], heads=Heads(2, 1, 8), block_size=4)
    results = [
        reference.paged_attention(c.q, c.k_cache, c.v_cache, c.meta, scale=1.0, sliding_window=4)
        for c in (tree, plain)
    ]
    assert torch.equal(*results)


def test_padding_rows_are_zero_and_out_is_used() -> None:
    case = attention_case([5], [2], heads=Heads(2, 1, 8), block_size=4, padding_rows=3)
    out = torch.full_like(case.q, 7.0)
    result = reference.paged_attention(
        case.q, case.k_cache, case.v_cache, case.meta, scale=1.0, out=out
    )
    assert result is out
    assert not out[2:].any()
    assert out[:2].all()


def test_written_keys_are_read_back() -> None:
    """write_kv and paged_attention agree about the meaning of a slot."""
    heads = Heads(2, 1, 4)
    case = attention_case([6], [6], heads=heads, block_size=4)
    k_cache, v_cache = torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache)
    table = case.meta.block_tables[0]
    slots = torch.tensor([int(table[p // 4]) * 4 + p % 4 for p in range(6)])
    reference.write_kv(case.keys[0], case.values[0], k_cache, v_cache, slots)
    assert torch.equal(
        reference.paged_attention(case.q, k_cache, v_cache, case.meta, scale=1.0),
        reference.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, scale=1.0),
    )
    untouched = torch.ones(k_cache.shape[0] * 4, dtype=torch.bool)
    untouched[slots] = False
    assert not k_cache.view(-1, 4)[untouched].any()


@pytest.mark.parametrize("shift", SINKS[:2])
def test_sequences_that_retrieve_attend_to_what_they_select(shift: float | None) -> None:
    case = attention_case([1300, 20, 1200], [2, 1, 1], heads=Heads(4, 2, 32), block_size=16)
    case, codes = coded(case, {0: (1100, 50), 2: (1150, 2000)})
    arguments = (case.q, case.k_cache, case.v_cache, case.meta)
    sinks = sinks_of(Heads(4, 2, 32), shift)
    out = reference.paged_attention(*arguments, scale=0.2, sinks=sinks, codes=codes)
    assert case.meta.retrieval is not None
    for idx, rows in enumerate((slice(0, 2), slice(3, 4))):
        selected = select(case.q[rows], codes, case.meta.retrieval, idx)
        wanted = attended(case, idx, selected, 0.2, sinks)
        torch.testing.assert_close(out[rows], wanted, rtol=1e-5, atol=1e-5)
    dense = reference.paged_attention(*arguments, scale=0.2, sinks=sinks)
    assert torch.equal(out[2], dense[2])
    assert not torch.equal(out[0], dense[0])
    # A budget for all keys.
    torch.testing.assert_close(out[3], dense[3], rtol=1e-5, atol=1e-5)
