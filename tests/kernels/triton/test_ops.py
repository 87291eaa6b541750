"""A GPU's ops through the interface, called as the nodes call them, against the reference.

Every op runs under NoSync, as in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import AttentionMeta, HeadRows
from kernels.dispatch import Ops, select_ops
from kernels.runtime import NoSync
from kernels.triton.attention import launches
from kernels.triton.sampling.launches import draw as draw_tokens
from kernels.triton.sampling.launches import plan_sampling
from tests.kernels.cases.against_reference import compare_all
from tests.kernels.cases.ops import OPS
from tests.kernels.cases.sampling import batch
from tests.kernels.triton.tiles import SMALL_TILES
from tests.pairwise import cover_pairs, cover_values

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
}
HIDDEN, HEADS, KV_HEADS, DIM, BLOCK = 32, 4, 2, 16, 4


@pytest.fixture
def ops(device: torch.device) -> Ops:
    return select_ops("triton", torch.float32, device=str(device))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("cover", "name"),
    [
        *((cover_values, name) for name in OPS),
        *(pytest.param(cover_pairs, name, marks=pytest.mark.slow) for name in OPS),
    ],
)
def test_an_op_gives_the_numbers_of_the_reference(
    cover: Any, name: str, ops: Ops, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value of its factors, and slow each pair of values."""
    monkeypatch.setattr(launches, "attention_tiles", lambda *_: SMALL_TILES)
    op = OPS[name]
    compare_all(op, ops, device, cover(*op.factors.values()))


class Batch(NamedTuple):
    """A micro-batch with padding rows: they have no query, and slots in a scratch block."""

    meta: AttentionMeta
    slots: Tensor
    num_rows: int
    num_padded: int


SCRATCH = 9


def decode_batch(lengths: list[int], num_padded: int, device: torch.device) -> Batch:
    """Make a batch of one new row per sequence, padded as for a CUDA graph's bucket.

    Bounds are those of the graph, far above the lengths; padding sequences have no row.
    """
    num_rows = len(lengths)
    free = list(range(SCRATCH))
    tables = torch.full((num_padded, 4), SCRATCH, dtype=torch.int32)
    slots = [SCRATCH * BLOCK + row % BLOCK for row in range(num_padded)]
    for row, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(-(-length // BLOCK))]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots[row] = blocks[(length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK
    starts = torch.arange(num_padded + 1).clamp(max=num_rows).int()
    context = torch.tensor(lengths + [0] * (num_padded - num_rows), dtype=torch.int32)
    meta = AttentionMeta(
        query_start=starts.to(device),
        context_lens=context.to(device),
        block_tables=tables.to(device),
        max_query_len=1,
        max_context_len=4096,
    )
    return Batch(meta, torch.tensor(slots).to(device), num_rows, num_padded)


def attention_half(
    ops: Ops,
    qkv: Tensor,
    delta: Tensor,
    residual: Tensor,
    tables: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    batch: Batch,
    norms: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Run the part of a decoder layer between its products; the residual is changed."""
    normed = ops.add_rms_norm(delta, residual, norms[0], eps=1e-5)
    q = qkv[:, : HEADS * DIM].view(-1, HEADS, DIM)
    k, v = (part.view(-1, KV_HEADS, DIM) for part in qkv[:, HEADS * DIM :].chunk(2, dim=1))
    ops.rotate_and_store(HeadRows(q, k, v, *tables, *caches, batch.slots, *norms[1:], eps=1e-5))
    return normed, ops.paged_attention(q, *caches, batch.meta, scale=0.25)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_a_padded_decode_step(dtype: torch.dtype, ops: Ops, device: torch.device) -> None:
    """The same launches give right results for other contents, as in a graph."""
    width = (HEADS + 2 * KV_HEADS) * DIM
    on_host = torch.device("cpu")
    for lengths in ([1, 9, 4], [5]):
        num_rows = len(lengths)
        found, wanted = [], []
        for each, place, kept in ((ops, device, found), (reference, on_host, wanted)):
            batch = decode_batch(lengths, 4, place)
            caches = tuple(
                draw(SCRATCH + 1, BLOCK, KV_HEADS, DIM, dtype=dtype, seed=s).to(place)
                for s in (1, 2)
            )
            residual = draw(4, HIDDEN, dtype=dtype, seed=3).to(place)
            norms = tuple(draw(size, dtype=dtype, seed=4).to(place) for size in (HIDDEN, DIM, DIM))
            # Experts' sums are fp32.
            delta = draw(4, HIDDEN, seed=5).to(place)
            qkv = draw(4, width, dtype=dtype, seed=6 + num_rows).to(place)
            angles = torch.arange(4 * DIM / 2).view(4, -1).to(place)
            tables = angles.cos(), angles.sin()
            arguments = qkv, delta, residual, tables, caches, batch, norms
            if each is reference:
                result = attention_half(each, *arguments)
            else:
                with NoSync():
                    result = attention_half(each, *arguments)
            kept += [*result, residual, *(cache[:SCRATCH] for cache in caches)]
        for ours, theirs in zip(found, wanted, strict=True):
            assert_close(ours, theirs, dtype)
        assert not found[1][num_rows:].any()


def test_tokens_are_the_hosts(ops: Ops, device: torch.device) -> None:
    """Greedy, drawn, filtered and penalised rows at once; only the plan reads the batch."""
    pytest.importorskip("numba", reason="the host's sampling needs numba")
    logits = draw(4, 60) * 2
    rows = batch(
        4,
        temperature=[0.0, 0.7, 1.3, 1.0],
        top_k=[0, 0, 5, 0],
        top_p=[1.0, 1.0, 1.0, 0.8],
        repetition_penalty=[1.2, 1.0, 1.0, 1.0],
        prompts=[[1, 2], [], [], []],
        outputs=[[int(logits[0].argmax())], [], [], []],
    )
    wanted = reference.sample(logits, rows, num_top_logprobs=2)
    found = ops.sample(logits.to(device), rows, num_top_logprobs=2)
    assert torch.equal(found.tokens.cpu(), wanted.tokens)
    assert torch.equal(found.valid.cpu(), wanted.valid)
    assert wanted.logprobs is not None
    assert found.logprobs is not None
    torch.testing.assert_close(found.logprobs.cpu(), wanted.logprobs, rtol=1e-5, atol=1e-5)
    plan = plan_sampling(rows, 60, device)
    on_device = logits.to(device)
    with NoSync():
        again = draw_tokens(on_device, plan)
    assert torch.equal(again.tokens, found.tokens)
