"""A GPU's ops through the interface, called as the nodes call them, against the reference.

Every op runs under NoSync, as in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import AttentionMeta, ExpertMatrices, HeadRows
from kernels.dispatch import Ops, select_ops
from kernels.runtime import NoSync
from kernels.triton.grouped_mlp.weights import GpuWeight, unpack_weight
from kernels.triton.sampling.launches import draw as draw_tokens
from kernels.triton.sampling.launches import plan_sampling
from tests.kernels.generators import finish
from tests.kernels.test_sampling import batch
from tests.pairwise import cover_values
from topspin.plan.precision import Format

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_ends_of_the_model(dtype: torch.dtype, ops: Ops, device: torch.device) -> None:
    table, norm = draw(50, HIDDEN, dtype=dtype), draw(HIDDEN, dtype=dtype, seed=1)
    tokens = torch.tensor([3, 49, 0, 3])
    head = ops.pack_linear(draw(50, HIDDEN, dtype=dtype, seed=2).to(device))
    out = torch.empty(4, 50, device=device)
    with NoSync():
        residual = ops.embed(tokens.to(device), table.to(device))
        normed = ops.rms_norm(residual, norm.to(device), eps=1e-5)
        logits = ops.linear(normed, head, out=out)
        again = ops.embed(tokens.to(device), table.to(device), out=torch.empty_like(residual))
    assert logits is out
    wide = reference.rms_norm(reference.embed(tokens, table), norm, eps=1e-5)
    assert torch.equal(residual.cpu(), table[tokens])
    assert torch.equal(again, residual)
    # Sums of bf16 products are not rounded to bf16.
    wanted = wide.float() @ draw(50, HIDDEN, dtype=dtype, seed=2).float().T
    assert_close(logits, wanted, dtype)
    if dtype == torch.bfloat16:
        assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize(("num_rows", "dtype"), cover_values([0, 1, 5], DTYPES))
def test_linear(dtype: torch.dtype, num_rows: int, ops: Ops, device: torch.device) -> None:
    x, matrix = draw(num_rows, 24, dtype=dtype), draw(10, 24, dtype=dtype, seed=1)
    bias = draw(10, dtype=dtype, seed=2)
    packed = ops.pack_linear(matrix.to(device))
    theirs = reference.pack_linear(matrix)
    for given in (None, bias):
        wanted = reference.linear(x, theirs, given)
        for out_dtype in (None, dtype, torch.float32):
            out = None if out_dtype is None else torch.empty(num_rows, 10, dtype=out_dtype)
            with NoSync():
                found = ops.linear(
                    x.to(device),
                    packed,
                    None if given is None else given.to(device),
                    None if out is None else (out := out.to(device)),
                )
            assert out is None or found is out
            assert_close(found, wanted.to(found.dtype), dtype)


@pytest.mark.parametrize(("num_rows", "dtype"), cover_values([0, 1, 7], DTYPES))
def test_swiglu(dtype: torch.dtype, num_rows: int, ops: Ops, device: torch.device) -> None:
    units = draw(num_rows, 74, dtype=dtype)
    with NoSync():
        found = ops.swiglu(units.to(device))
    assert_close(found, reference.swiglu(units), dtype)


def test_swiglu_refuses_what_does_not_fit(ops: Ops, device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"gate_up is \(2, 5\)"):
        ops.swiglu(draw(2, 5).to(device))
    with pytest.raises(ValueError, match=r"out is \(2, 4\).*2 rows of 3"):
        ops.swiglu(draw(2, 6).to(device), out=draw(2, 4).to(device))


def test_the_shared_experts_gate(ops: Ops, device: torch.device) -> None:
    x, gate = draw(5, 24), draw(5, 1)
    found = x.clone().to(device)
    with NoSync():
        assert ops.sigmoid_gate(found, gate.to(device)) is found
    assert_close(found, x * gate.sigmoid(), torch.float32)


@pytest.mark.parametrize("num_experts", [1, 5, 128])
def test_counts_add_up(num_experts: int, ops: Ops, device: torch.device) -> None:
    totals = torch.zeros(num_experts + 2, dtype=torch.int64)
    found = totals.to(device)
    for turn in range(3):
        # The second batch has no rows.
        counts = torch.arange(num_experts).add(turn).remainder(3) * (turn != 1)
        with NoSync():
            ops.add_counts(found, counts.to(device))
        reference.add_counts(totals, counts)
    assert torch.equal(found.cpu(), totals)


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


@pytest.mark.parametrize(("num_rows", "dtype"), cover_values([0, 1, 6], DTYPES))
def test_from_the_router_to_the_experts(
    dtype: torch.dtype, num_rows: int, ops: Ops, device: torch.device
) -> None:
    """Padding rows reach no expert, and experts of other nodes contribute nothing."""
    num_experts, top_k, ffn = 5, 2, 24
    hidden = draw(num_rows, HIDDEN, dtype=dtype)
    router = draw(num_experts, HIDDEN, dtype=dtype, seed=1)
    gate_up = draw(num_experts, 2 * ffn, HIDDEN, dtype=dtype, seed=2) / 4
    down = draw(num_experts, HIDDEN, ffn, dtype=dtype, seed=3) / 4
    ours = ops.pack_experts(gate_up.to(device), down.to(device), share_per_row=0.4)
    theirs = reference.pack_experts(gate_up, down)
    out = torch.empty(num_rows, HIDDEN, device=device)
    with NoSync():
        logits = ops.linear(hidden.to(device), ops.pack_linear(router.to(device)))
        routing = ops.route(logits, top_k=top_k, renormalise=True, weights_dtype=dtype)
        slots = routing.experts.int().masked_fill(routing.experts == 3, -1)
        slots[num_rows // 2 :] = -1
        found = ops.grouped_mlp(hidden.to(device), slots, routing.weights, ours, out=out)
    wanted = reference.route(logits.cpu(), top_k=top_k, renormalise=True, weights_dtype=dtype)
    assert torch.equal(routing.experts.cpu(), wanted.experts)
    assert_close(routing.weights, wanted.weights, dtype)
    summed = reference.grouped_mlp(
        hidden, slots.cpu(), wanted.weights, theirs, out=torch.empty(num_rows, HIDDEN)
    )
    assert found.out is out
    assert_close(found.out, summed.out, dtype)
    assert torch.equal(found.counts.cpu(), summed.counts)
    assert not found.out[num_rows // 2 :].any()


def test_experts_are_exchanged(ops: Ops, device: torch.device) -> None:
    gate_up, down = draw(3, 16, HIDDEN) / 4, draw(3, HIDDEN, 8, seed=1) / 4
    first = ops.pack_experts(gate_up[:2].to(device), down[:2].to(device))
    new = ExpertMatrices(gate_up[2].to(device), down[2].to(device))
    second = finish(ops.rebuild_experts(first, [1, new]))
    hidden, weights = draw(4, HIDDEN, seed=2), torch.ones(4, 1)
    slots = torch.tensor([[0], [1], [1], [0]], dtype=torch.int32)
    found = ops.grouped_mlp(hidden.to(device), slots.to(device), weights.to(device), second)
    theirs = reference.pack_experts(gate_up[1:], down[1:])
    wanted = reference.grouped_mlp(hidden, slots, weights, theirs)
    assert_close(found.out, wanted.out, torch.float32)


@pytest.mark.parametrize("mode", ["none", "fp8", "int4", "int8"])
def test_products_follow_the_format_of_the_weight(
    mode: Format, ops: Ops, device: torch.device
) -> None:
    x, matrix = draw(3, HIDDEN).to(device), (draw(10, HIDDEN, seed=1) / 6).to(device)
    packed = ops.pack_linear(matrix, mode)
    assert isinstance(packed, GpuWeight)
    assert packed.weight_format == mode
    wanted = x @ unpack_weight(packed).T
    torch.testing.assert_close(ops.linear(x, packed), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "formats",
    [
        # One format for all is what test_grouped_mlp.py multiplies.
        *(
            pytest.param([mode] * 4, marks=pytest.mark.slow, id=mode)
            for mode in ("fp8", "int4", "int8")
        ),
        ["int4", "none", "int8", "int4"],
        ["none", "fp8", "none", "int8"],
    ],
)
def test_experts_of_any_formats(formats: list[Format], ops: Ops, device: torch.device) -> None:
    """Also after one is exchanged for one of another format; counts are by slot."""
    gate_up, down = draw(4, 16, HIDDEN) / 6, draw(4, HIDDEN, 8, seed=1) / 3
    gate_up, down = gate_up.to(device), down.to(device)
    first = ops.pack_experts(gate_up, down, formats=formats)
    new = ExpertMatrices(gate_up[3], down[3], formats[0])
    second = finish(ops.rebuild_experts(first, [2, new, 0]))
    x, weights = draw(5, HIDDEN).to(device), torch.linspace(0.1, 1, 10).view(5, 2).to(device)
    for experts, order in ((first, [0, 1, 2, 3]), (second, [2, 3, 0])):
        assert [weight.weight_format for weight in experts.down] == [
            formats[0] if slot == 1 and experts is second else formats[expert]
            for slot, expert in enumerate(order)
        ]
        slots = (torch.arange(10, dtype=torch.int32).view(5, 2) % len(order)).to(device)
        slots[1, 0] = slots[4, 0] = slots[4, 1] = -1
        with NoSync():
            found = ops.grouped_mlp(x, slots, weights, experts)
        plain = reference.pack_experts(
            map(unpack_weight, experts.gate_up), map(unpack_weight, experts.down)
        )
        wanted = reference.grouped_mlp(x, slots, weights, plain)
        # fp8 experts round their rows too.
        error = (found.out - wanted.out).norm() / wanted.out.norm()
        assert error < (0.08 if "fp8" in formats else 1e-5)
        assert torch.equal(found.counts, wanted.counts)
        assert not found.out[4].any()


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
