"""Each kernel once, at its own tiles and at Qwen3-30B-A3B's shapes, against the reference.

The reference runs on the same device in fp32. Without a GPU the sizes are tiny and the kernels
are interpreted. Other shapes, views, bad arguments and exact rounding: tests/kernels/triton.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.rooflines import QWEN3_30B, TINY
from kernels import reference
from kernels.contracts import (
    NUM_CENTROIDS,
    NUM_SUBSPACES,
    SEGMENT_KEYS,
    AttentionMeta,
    HeadRows,
    KeyCodes,
    Retrieval,
    RoutingRule,
    SearchBounds,
)
from kernels.retrieval import code_keys, encode
from kernels.sampling import SamplingBatch
from kernels.triton.attention.launches import attend, paged_attention
from kernels.triton.grouped_mlp.weights import GpuWeight, pack_weight, unpack_weight
from kernels.triton.linear.launches import linear
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.ops import TritonOps
from kernels.triton.rotary import rotate_and_store
from kernels.triton.router.launches import local_slots, permute, route
from kernels.triton.sampling.launches import draw, plan_sampling
from kernels.triton.swiglu import swiglu
from tests.kernels.cases import attention as cases
from tests.kernels.cases.ops import CLAMPED
from topspin.plan.precision import Format

ON_GPU = torch.cuda.is_available()
SIZES = QWEN3_30B if ON_GPU else TINY
ROWS = (1, 32, 1024) if ON_GPU else (1, 3)
# Interpreted, each format once: tests/kernels/triton has the other sizes.
FORMAT_ROWS = ROWS if ON_GPU else (3,)
CONTEXTS = ((2048,), (100, 4096, 1, 257)) if ON_GPU else ((20,), (3, 40))
PROMPT = 1000 if ON_GPU else 70
BLOCK = 16
EPS = 1e-6
BF16 = {"rtol": 2e-2, "atol": 2e-2}


def randn(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    rng = torch.Generator(device).manual_seed(sum(shape))
    made = torch.randn(shape, generator=rng, device=device) * scale
    return made.bfloat16()


@pytest.mark.parametrize("num_rows", ROWS)
def test_norm(num_rows: int, device: torch.device) -> None:
    x, residual = randn(2, num_rows, SIZES.hidden, device=device)
    weight = randn(SIZES.hidden, device=device)
    wanted = reference.rms_norm(x, weight, eps=EPS)
    torch.testing.assert_close(rms_norm(x, weight, eps=EPS), wanted, **BF16)
    theirs = residual.clone()
    wanted = reference.add_rms_norm(x, theirs, weight, eps=EPS)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, eps=EPS), wanted, **BF16)
    assert torch.equal(residual, theirs)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rotation_and_kv_write(cache_dtype: torch.dtype, device: torch.device) -> None:
    num_rows = ROWS[-1]
    counts = (SIZES.heads, SIZES.kv_heads, SIZES.kv_heads)
    qkv = randn(num_rows, sum(counts), SIZES.head_dim, device=device)
    theirs = qkv.clone()
    angles = torch.rand(num_rows, SIZES.head_dim // 2, device=device) * 100
    tables = angles.cos(), angles.sin()
    num_blocks = -(-num_rows // BLOCK)
    shape = (2, num_blocks, BLOCK, SIZES.kv_heads, SIZES.head_dim)
    caches = torch.zeros(shape, device=device, dtype=torch.bfloat16)
    ours = caches.to(cache_dtype)
    slots = torch.randperm(num_blocks * BLOCK)[:num_rows].to(device)
    norms = {"q_norm": randn(SIZES.head_dim, device=device), "eps": EPS}
    norms["k_norm"] = randn(SIZES.head_dim, device=device)
    q, k, v = torch.split(theirs, counts, dim=1)
    reference.rotate_and_store(HeadRows(q, k, v, *tables, *caches, slots, **norms))
    mine = torch.split(qkv, counts, dim=1)
    rotate_and_store(*mine, *tables, *ours, slots, **norms)
    torch.testing.assert_close(mine[0], q, **BF16)
    is_fp8 = cache_dtype == torch.float8_e4m3fn
    wanted = caches.clamp(-448, 448).float()
    # Rotated numbers near 0 are differences of rounded ones, in either dtype of the cache.
    tolerance = {**BF16, "rtol": 2**-3} if is_fp8 else BF16
    torch.testing.assert_close(ours.float(), wanted, **tolerance)


def attention_case(
    new: tuple[int, ...], contexts: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, AttentionMeta]:
    per_seq = -(-max(contexts) // BLOCK)
    tables = torch.randperm(len(contexts) * per_seq).view(-1, per_seq)
    caches = randn(2, tables.numel(), BLOCK, SIZES.kv_heads, SIZES.head_dim, device=device)
    starts = torch.tensor([0, *new]).cumsum(0)
    meta = AttentionMeta(
        query_start=starts.to(device, torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device, torch.int32),
        max_query_len=max(new),
        max_context_len=max(contexts),
    )
    q = randn(int(starts[-1]), SIZES.heads, SIZES.head_dim, device=device)
    return q, caches, meta


def check_attention(new: tuple[int, ...], contexts: tuple[int, ...], device: torch.device) -> None:
    q, caches, meta = attention_case(new, contexts, device)
    scale = SIZES.head_dim**-0.5
    found = attend(q, *caches, meta, scale=scale)
    wanted = reference.paged_attention(q.float(), *caches.float(), meta, scale=scale)
    torch.testing.assert_close(found.float(), wanted, **BF16)


@pytest.mark.parametrize("contexts", CONTEXTS)
def test_attention_of_decode(contexts: tuple[int, ...], device: torch.device) -> None:
    check_attention((1,) * len(contexts), contexts, device)


def test_attention_of_a_prompt_beside_a_decode(device: torch.device) -> None:
    check_attention((PROMPT, 1), (PROMPT, CONTEXTS[0][0]), device)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.slow
def test_attention_to_latents_of_deepseek(in_fp8: bool, device: torch.device) -> None:
    """Decode rows whose keys are split, a chunk of a prompt beside one, and trees."""
    heads, length = cases.Heads(128 if ON_GPU else 16, 1, 576, rank=512), CONTEXTS[-1][1]
    tree = (None, 0, 0, 1, 1, 4, 2)
    for lens, new, parents in (
        ([length + 300, 20], [1, 1], None),
        ([length + 2 * PROMPT, 300], [PROMPT, 1], None),
        ([length + 7, 47], [7, 7], (tree, tree)),
    ):
        case = cases.attention_case(
            lens, new, heads=heads, block_size=BLOCK, dtype=torch.bfloat16, parents=parents,
            in_fp8=in_fp8,
        )  # fmt: skip
        case = cases.placed(case, device)
        found = attend(case.q, case.k_cache, case.v_cache, case.meta, scale=0.02)
        keys = case.k_cache.float()
        wanted = reference.paged_attention(
            case.q.float(), keys, keys[..., :512], case.meta, scale=0.02
        )
        torch.testing.assert_close(found.float(), wanted, **BF16)


@pytest.mark.parametrize("window", [None, pytest.param(10, marks=pytest.mark.slow)])
def test_attention_of_trees_that_grow(window: int | None, device: torch.device) -> None:
    """Of each tree's nodes the last ones are rows; a node follows any node before it, or none.

    Beside a window the heads have sinks.
    """
    new, lens = (1, 5, PROMPT // 10), (3, 5, PROMPT // 10 + 4)
    q, caches, meta = attention_case(new, tuple(n + CONTEXTS[0][0] for n in lens), device)
    mask = torch.zeros(sum(new), max(lens), dtype=torch.bool)
    begin = 0
    for num_rows, num_nodes in zip(new, lens, strict=True):
        seen = torch.eye(num_nodes, dtype=torch.bool)
        for node in range(1, num_nodes):
            parent = int(torch.randint(-1, node, ()))
            seen[node] |= seen[parent] if parent >= 0 else seen[node]
        mask[begin : begin + num_rows, :num_nodes] = seen[num_nodes - num_rows :]
        begin += num_rows
    meta = replace(
        meta,
        tree_mask=mask.to(device),
        tree_lens=torch.tensor(lens, dtype=torch.int32, device=device),
    )
    sinks = None if window is None else torch.randn(SIZES.heads, device=device)
    options: dict[str, Any] = {
        "scale": SIZES.head_dim**-0.5,
        "sliding_window": window,
        "sinks": sinks,
    }
    found = attend(q, *caches, meta, **options)
    wanted = reference.paged_attention(q.float(), *caches.float(), meta, **options)
    torch.testing.assert_close(found.float(), wanted, **BF16)


@pytest.mark.slow
def test_attention_of_decode_with_retrieval(device: torch.device) -> None:
    """Of three sequences two select keys, one of them with the rows of a draft."""
    longest = 5000 if ON_GPU else 1040
    contexts, ends, num_sinks, budget = (longest, 90, longest // 2), (longest - 40, 400), 16, 300
    q, caches, meta = attention_case((1, 2, 3), contexts, device)
    num_segments = -(-ends[0] // SEGMENT_KEYS)
    summarised, kept = num_segments - 1, num_segments // 2
    shape = (2 * num_segments, SIZES.kv_heads, NUM_SUBSPACES)
    codes = KeyCodes(
        randn(*shape, NUM_CENTROIDS, SIZES.head_dim // NUM_SUBSPACES, device=device),
        torch.randint(NUM_CENTROIDS, (*shape, SEGMENT_KEYS), dtype=torch.uint8, device=device),
        randn(*shape[:2], 2, SIZES.head_dim, device=device),
    )
    retrieval = Retrieval(
        seqs=torch.tensor([0, 2], dtype=torch.int32, device=device),
        segments=torch.arange(len(codes.codes), dtype=torch.int32, device=device).view(2, -1),
        coded_end=torch.tensor(ends, dtype=torch.int32, device=device),
        budgets=torch.tensor([budget, 7], dtype=torch.int32, device=device),
        summarised=torch.tensor([summarised, 0], dtype=torch.int32, device=device),
        kept=torch.tensor([kept, 0], dtype=torch.int32, device=device),
        num_sinks=num_sinks,
        bounds=SearchBounds(rows=3, segments=1 + kept, budget=budget, keys=longest),
    )
    meta = replace(meta, retrieval=retrieval)
    scale = SIZES.head_dim**-0.5
    found = paged_attention(q, *caches, meta, scale=scale, codes=codes)
    wanted = reference.paged_attention(q.float(), *caches.float(), meta, scale=scale, codes=codes)
    torch.testing.assert_close(found.float(), wanted, **BF16)
    slots = torch.arange(SEGMENT_KEYS, device=device)
    for num_iterations in (2, None):
        code_keys(
            caches[0], slots, codes.centroids[0], codes.codes[0], num_iterations=num_iterations
        )
    keys = caches[0].flatten(0, 1)[:SEGMENT_KEYS].transpose(0, 1).cpu()
    again = encode(keys, codes.centroids[0].cpu())
    assert (codes.codes[0].cpu() == again).float().mean() > 0.999, "but for nearly equal distances"


@pytest.mark.parametrize("num_rows", ROWS)
def test_router(num_rows: int, device: torch.device) -> None:
    logits = randn(num_rows, SIZES.experts, device=device).float()
    found = route(logits, RoutingRule(SIZES.top_k, renormalise=True))
    # The reference's topk orders equal logits, of which there are some, as it likes.
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, : SIZES.top_k]
    weights = logits.softmax(dim=-1).gather(-1, order)
    assert torch.equal(found.experts, order)
    torch.testing.assert_close(found.weights, weights / weights.sum(dim=-1, keepdim=True))
    slot_of = torch.arange(SIZES.experts, dtype=torch.int32, device=device)[None]
    slots = local_slots(found.experts, slot_of)
    assert torch.equal(slots[0].long(), found.experts)
    groups = permute(slots[0], SIZES.experts)
    for mine, theirs in zip(groups, reference.permute(slots[0], SIZES.experts), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("weight_format", ["none", "fp8", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("num_rows", FORMAT_ROWS)
def test_experts(num_rows: int, weight_format: Format, device: torch.device) -> None:
    sizes = (SIZES.experts, 2 * SIZES.ffn, SIZES.hidden)
    gate_up = randn(*sizes, device=device, scale=SIZES.hidden**-0.5)
    down = randn(sizes[0], SIZES.hidden, SIZES.ffn, device=device, scale=SIZES.ffn**-0.5)
    ops = TritonOps()
    own: dict[str, Any] = {}
    if weight_format in ("none", "mxfp4"):  # with gpt-oss's form
        widths = (2 * SIZES.ffn, SIZES.hidden)
        own["biases"] = tuple(randn(SIZES.experts, each, device=device) for each in widths)
        own["activation"] = CLAMPED
    experts = ops.pack_experts(gate_up, down, formats=[weight_format] * SIZES.experts, **own)
    hidden = randn(num_rows, SIZES.hidden, device=device)
    scores = torch.rand(num_rows, SIZES.experts, device=device)
    slots = scores.topk(SIZES.top_k, dim=-1).indices.int()
    slots[:, -1] = -1
    weights = torch.full((num_rows, SIZES.top_k), 1 / SIZES.top_k, device=device)
    found = ops.grouped_mlp(hidden, slots, weights, experts)

    def unpacked(packed: list[GpuWeight]) -> list[Tensor]:
        return [unpack_weight(each).float() for each in packed]

    plain = reference.pack_experts(unpacked(experts.gate_up), unpacked(experts.down))
    plain = plain.completed(experts.biases, experts.activation)
    wanted = reference.grouped_mlp(hidden.float(), slots, weights, plain)
    # fp8 experts also round their rows; bf16 rounds a pair's sum.
    error = (found.out.float() - wanted.out).norm() / wanted.out.norm()
    assert error < (0.06 if weight_format == "fp8" else 0.01)
    assert torch.equal(found.counts, wanted.counts)


@pytest.mark.parametrize("weight_format", ["none", "fp8", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("num_rows", FORMAT_ROWS)
def test_linear(num_rows: int, weight_format: Format, device: torch.device) -> None:
    num_out = (SIZES.heads + 2 * SIZES.kv_heads) * SIZES.head_dim
    matrix = randn(num_out, SIZES.hidden, device=device, scale=SIZES.hidden**-0.5)
    weight = pack_weight(matrix, weight_format)
    x = randn(num_rows, SIZES.hidden, device=device)
    wanted = x.float() @ unpack_weight(weight).float().T
    torch.testing.assert_close(linear(x, weight).float(), wanted, **BF16)
    wide = torch.empty(num_rows, num_out, device=device)
    torch.testing.assert_close(linear(x, weight, out=wide), wanted, rtol=1e-2, atol=1e-2)


def test_swiglu(device: torch.device) -> None:
    gate_up = randn(ROWS[-1], 2 * SIZES.ffn, device=device)
    torch.testing.assert_close(swiglu(gate_up), reference.swiglu(gate_up), **BF16)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 0.8)])
def test_sampling(temperature: float, top_p: float, device: torch.device) -> None:
    pytest.importorskip("numba", reason="the host's sampling needs numba")
    zeros, ones = torch.zeros(4), torch.ones(4)
    batch = SamplingBatch(
        temperature=ones * temperature,
        top_k=torch.zeros(4, dtype=torch.int64),
        top_p=ones * top_p,
        min_p=zeros,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        repetition_penalty=ones,
        seeds=torch.arange(4),
        choices=torch.zeros(4, dtype=torch.int64),
        positions=torch.arange(4),
    )
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4, SIZES.vocabulary, generator=rng) * 3
    found = draw(logits.to(device), plan_sampling(batch, SIZES.vocabulary, device))
    assert torch.equal(found.tokens.cpu(), reference.sample(logits, batch).tokens)
