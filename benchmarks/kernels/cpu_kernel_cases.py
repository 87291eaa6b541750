"""The calls that cpu_kernels times: the ops of one step, at the shapes of two models.

Owns the shapes, the tensors (random numbers: the values do not change these kernels' speed), and
which of them are cold. Weights and cached keys have enough copies that a rotation over them does
not fit in the processor's cache, as in a step, which reads every layer once; activations were just
written by the previous op and stay in the cache. Weights are packed by the ops, as in the nodes.
Knows no clock.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels import roofline
from benchmarks.kernels.roofline import OpWork
from kernels.contracts import AttentionMeta, HeadRows, RoutingRule
from kernels.cpu.sampling import sample
from kernels.dispatch import Ops, select_ops
from kernels.reference import permute
from kernels.sampling import SamplingBatch
from topspin.plan.precision import MXFP4_BITS, UNQUANTISED, Format

PRECISIONS = {"bf16": 16, "int8": 8, "int4": 4, "mxfp4": MXFP4_BITS}
FORMATS: dict[str, Format] = {
    "bf16": UNQUANTISED,
    "int8": "int8",
    "int4": "int4",
    "mxfp4": "mxfp4",
}
CONTEXTS = (160, 1024, 4096)
# Decode attention at these only for few rows, by dtype and by query heads that share a key.
LONG_CONTEXTS = (8192, 32768)
LONG_ROWS = 4
SHARING_HEADS = (1, 3, 8)
# Latents of DeepSeek's size, which all query heads share, and a product of as many rows as heads of
# a node: as many operations for each number read.
LATENT_DIM, LATENT_RANK = 576, 512
LATENT_HEADS = (16, 128)
MOST_LATENT_ROWS = 16
PRODUCT_SIZE = 4096
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# New rows and context of one sequence: whole prompts, and the last chunk of a longer one.
PREFILLS = ((128, 128), (512, 512), (128, 1024))
BLOCK_SIZE = 16
EPS = 1e-5
# Tokens of a prompt, and of an output, that penalties look at.
HISTORY = 400
# Copies of cold tensors fill the last-level cache so many times, up to this many copies.
CACHE_FILLS = 3
MAX_COPIES = 48
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_DEFAULT_CACHE_BYTES = 32 << 20


class KernelShape(NamedTuple):
    """The sizes of a model that its kernels depend on."""

    model: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    ffn: int
    vocabulary: int
    has_head_norms: bool


SHAPES = (
    KernelShape("smollm2-moe", 576, 9, 3, 64, 16, 8, 192, 49152, False),
    KernelShape("qwen3-moe-686m", 1024, 16, 4, 64, 32, 4, 512, 49152, True),
)


@dataclass(frozen=True, eq=False)
class KernelCase:
    """One op at one size. `call(i)` runs it on the i-th copy of the cold tensors."""

    op: str
    model: str
    precision: str
    num_rows: int
    work: OpWork
    call: Callable[[int], object]
    context: int | None = None
    cold: bool = True


SmallOp = tuple[str, OpWork, Callable[[int], object]]
Build = Callable[[KernelShape, Sequence[int]], Iterator[KernelCase]]


def cache_bytes() -> int:
    """Return the size of the last-level cache; 32 MiB if unknown."""
    try:
        text = _CACHE_SIZE.read_text().strip()
    except OSError:
        return _DEFAULT_CACHE_BYTES
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
    return int(text.rstrip("KM")) * unit


def num_copies(size_bytes: float) -> int:
    """Return the number of copies of `size_bytes` that a cold case rotates over, at least 3."""
    return max(3, min(MAX_COPIES, -int(-CACHE_FILLS * cache_bytes() // max(size_bytes, 1))))


def ops_of(precision: str) -> Ops:
    """Return the CPU's ops with weights in `precision`, a key of PRECISIONS."""
    return select_ops("cpu", torch.bfloat16, {FORMATS[precision]} - {UNQUANTISED})


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[int], object]:
    return lambda i: calls[i % len(calls)]()


def _sizes(shape: KernelShape) -> tuple[int, int]:
    """Return the widths of queries and of keys or values."""
    return shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim


def projections(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """QKV and output projections, in every precision."""
    q, kv = _sizes(shape)
    yield from _linear("qkv", shape, rows, shape.hidden, q + 2 * kv)
    yield from _linear("o", shape, rows, q, shape.hidden)


def lm_head(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """The LM head, to fp32, in every precision; a model's has 4 bits only if a rule says so."""
    yield from _linear("lm_head", shape, rows, shape.hidden, shape.vocabulary, torch.float32)


def _linear(
    op: str,
    shape: KernelShape,
    rows: Sequence[int],
    num_in: int,
    num_out: int,
    dtype: torch.dtype | None = None,
) -> Iterator[KernelCase]:
    matrix = _random(num_out, num_in)
    for precision, bits in PRECISIONS.items():
        ops = ops_of(precision)
        copies = num_copies(roofline.weight_bytes(num_out, num_in, bits))
        packed = [ops.pack_linear(matrix.clone(), FORMATS[precision]) for _ in range(copies)]
        for num_rows in rows:
            x = _random(num_rows, num_in)
            out = None if dtype is None else torch.empty(num_rows, num_out, dtype=dtype)
            out_bytes = roofline.BF16 if dtype is None else dtype.itemsize
            work = roofline.linear(num_rows, num_in, num_out, bits=bits, out_bytes=out_bytes)
            call = _in_turn([partial(ops.linear, x, each, out=out) for each in packed])
            yield KernelCase(op, shape.model, precision, num_rows, work, call)


def experts(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """A layer's routed experts on one node, chosen at random, in every precision."""
    gate_up = _random(shape.num_experts, 2 * shape.ffn, shape.hidden)
    down = _random(shape.num_experts, shape.hidden, shape.ffn)
    share = shape.top_k / shape.num_experts
    routes = {num_rows: _routes(shape, num_rows) for num_rows in rows}
    for precision, bits in PRECISIONS.items():
        ops = ops_of(precision)
        work_of = partial(roofline.grouped_mlp, shape.hidden, shape.ffn, bits=bits)
        size = work_of(num_rows=0, num_pairs=0, num_touched=shape.num_experts)
        formats = [FORMATS[precision]] * shape.num_experts
        packed = [
            ops.pack_experts(gate_up.clone(), down.clone(), formats=formats, share_per_row=share)
            for _ in range(num_copies(size.num_bytes))
        ]
        for num_rows, slots in routes.items():
            weights = torch.full((num_rows, shape.top_k), 1 / shape.top_k)
            touched = sum(len(torch.unique(chosen)) for chosen in slots) / len(slots)
            pairs = num_rows * shape.top_k
            work = work_of(num_rows=num_rows, num_pairs=pairs, num_touched=touched)
            hidden = _random(num_rows, shape.hidden)
            compute = partial(ops.grouped_mlp, hidden)
            call = _in_turn(
                [
                    partial(compute, each, weights, packed[idx % len(packed)])
                    for idx, each in enumerate(slots)
                ]
            )
            yield KernelCase("experts", shape.model, precision, num_rows, work, call)


def _routes(shape: KernelShape, num_rows: int) -> list[Tensor]:
    """Return slots i32[R, K] for each of several calls; a row's experts differ."""
    chances = torch.rand(MAX_COPIES, num_rows, shape.num_experts)
    return list(chances.topk(shape.top_k, dim=-1).indices.int())


class _Cache(NamedTuple):
    """One layer's keys and values [B, block_size, G, D]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, shape: KernelShape, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> _Cache:
        size = (-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        keys = torch.empty(size, dtype=dtype).uniform_(-1, 1)
        return cls(keys, keys.clone())


def decode_attention(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """One new row for each of several sequences of equal context."""
    sizes = [([1] * num_rows, context) for context in CONTEXTS for num_rows in rows]
    yield from _attention("decode attention", shape, sizes)


def prefill_attention(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """Many new rows of one sequence; `rows` is ignored."""
    yield from _attention("prefill attention", shape, [([n], context) for n, context in PREFILLS])


def long_attention(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """One new row for each of few sequences of a long context."""
    sizes = [
        ([1] * num_rows, at) for at in LONG_CONTEXTS for num_rows in rows if num_rows <= LONG_ROWS
    ]
    for precision in DTYPES:
        for heads in SHARING_HEADS:
            sharing = shape._replace(num_heads=heads * shape.num_kv_heads)
            yield from _attention(
                f"decode attention, {heads} heads a key, {precision}", sharing, sizes, precision
            )


def latent_attention(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """One new row for each of several sequences that attend to latents; a product beside it."""
    least = LONG_CONTEXTS[0]
    for heads in LATENT_HEADS:
        sharing = shape._replace(num_heads=heads, num_kv_heads=1, head_dim=LATENT_DIM)
        sizes = [([1] * num_rows, least) for num_rows in rows if num_rows <= MOST_LATENT_ROWS]
        yield from _attention(
            f"decode attention, {heads} heads a latent", sharing, sizes, rank=LATENT_RANK
        )
    product = _linear("product", shape, LATENT_HEADS[:1], PRODUCT_SIZE, PRODUCT_SIZE)
    yield next(product)


def _attention(
    op: str,
    shape: KernelShape,
    sizes: Sequence[tuple[list[int], int]],
    precision: str = "bf16",
    *,
    rank: int | None = None,
) -> Iterator[KernelCase]:
    """Cases of (new rows per sequence, context of all of them), on blocks in random order.

    `rank`: so many first numbers of a key are its value (latents); None: it has one of its own.
    """
    dtype = DTYPES[precision]
    ops = select_ops("cpu", dtype)
    token_bytes = 2 * dtype.itemsize * shape.num_kv_heads * shape.head_dim
    least = CACHE_FILLS * cache_bytes() // token_bytes
    blocks = [len(new) * -(-context // BLOCK_SIZE) for new, context in sizes]
    most = BLOCK_SIZE * max(blocks, default=0)
    cache = _Cache.of(shape, max(least, most), dtype)
    for new_rows, context in sizes:
        q = _random(sum(new_rows), shape.num_heads, shape.head_dim).to(dtype)
        metas = _metas(new_rows, context, num_blocks=len(cache.keys))
        work = roofline.paged_attention(
            new_rows,
            [context] * len(new_rows),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            number_bytes=dtype.itemsize,
            rank=rank,
        )
        values = cache.values if rank is None else cache.keys[..., :rank]
        attend = partial(ops.paged_attention, q, cache.keys, values)
        scale = shape.head_dim**-0.5
        call = _in_turn([partial(attend, meta, scale=scale) for meta in metas])
        yield KernelCase(op, shape.model, precision, len(q), work, call, context)


def _metas(new_rows: Sequence[int], context: int, *, num_blocks: int) -> list[AttentionMeta]:
    """Distribute the cache's blocks, in random order, to as many batches as possible."""
    per_sequence = -(-context // BLOCK_SIZE)
    per_batch = per_sequence * len(new_rows)
    order = torch.randperm(num_blocks).int()
    starts = torch.tensor([0, *new_rows]).cumsum(0).int()
    metas = []
    for number in range(min(MAX_COPIES, num_blocks // per_batch)):
        blocks = order[number * per_batch : (number + 1) * per_batch]
        metas.append(
            AttentionMeta(
                query_start=starts,
                context_lens=torch.full((len(new_rows),), context, dtype=torch.int32),
                block_tables=blocks.view(len(new_rows), per_sequence),
                max_query_len=max(new_rows),
                max_context_len=context,
            )
        )
    return metas


def small_ops(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """Norms, rotation with storing, the router, permutation: on activations, which are warm."""
    for num_rows in rows:
        for name, work, call in (
            *_norms(shape, num_rows),
            _rotation(shape, num_rows),
            *_routing(shape, num_rows),
        ):
            yield KernelCase(name, shape.model, "bf16", num_rows, work, call, cold=False)


def _norms(shape: KernelShape, num_rows: int) -> Iterator[SmallOp]:
    ops, hidden = ops_of("bf16"), shape.hidden
    x, residual, weight = _random(num_rows, hidden), _random(num_rows, hidden), _random(hidden)
    zeros = torch.zeros_like(x)
    work = roofline.rms_norm(num_rows, hidden)
    yield "rms_norm", work, lambda i: ops.rms_norm(x, weight, eps=EPS)
    work = roofline.add_rms_norm(num_rows, hidden)
    # Every call adds to the residual: zeros keep it in range.
    yield "add_rms_norm", work, lambda i: ops.add_rms_norm(zeros, residual, weight, eps=EPS)


def _rotation(shape: KernelShape, num_rows: int) -> SmallOp:
    ops = ops_of("bf16")
    q, kv = _sizes(shape)
    # Views of one product's rows, as in a step.
    qkv = _random(num_rows, q + 2 * kv).view(num_rows, -1, shape.head_dim)
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    angles = torch.rand(num_rows, shape.head_dim // 2)
    cache = _Cache.of(shape, num_rows * BLOCK_SIZE)
    slots = torch.arange(num_rows) * BLOCK_SIZE
    norm = _random(shape.head_dim) if shape.has_head_norms else None
    q_rows, k_rows, v_rows = torch.split(qkv, heads, dim=1)
    places = (angles.cos(), angles.sin(), cache.keys, cache.values, slots)
    rows = HeadRows(q_rows, k_rows, v_rows, *places, q_norm=norm, k_norm=norm, eps=EPS)
    work = roofline.rotate_and_store(
        num_rows,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        has_norms=shape.has_head_norms,
    )
    return "rotate_and_store", work, lambda i: ops.rotate_and_store(rows)


def _routing(shape: KernelShape, num_rows: int) -> Iterator[SmallOp]:
    ops = ops_of("bf16")
    num_experts, top_k = shape.num_experts, shape.top_k
    x, logits = _random(num_rows, shape.hidden), _random(num_rows, num_experts)
    router = ops.pack_linear(_random(num_experts, shape.hidden))
    slots = _routes(shape, num_rows)[0]
    work = roofline.linear(num_rows, shape.hidden, num_experts)
    yield "router", work, lambda i: ops.linear(x, router)
    rule = RoutingRule(top_k, renormalise=True, weights_dtype=torch.bfloat16)
    yield "route", roofline.route(num_rows, num_experts, top_k), lambda i: ops.route(logits, rule)
    work = roofline.permute(num_rows, num_experts, top_k)
    yield "permute", work, lambda i: permute(slots, num_experts)


def sampling(shape: KernelShape, rows: Sequence[int]) -> Iterator[KernelCase]:
    """The choice of tokens: greedy, and drawn with temperature 0.8 and filters.

    Scores of a small spread are the hard case of top_p: nearly all tokens are in the nucleus.
    """
    for name, spread, settings in (
        ("greedy", 3.0, {"temperature": 0.0}),
        ("draw", 3.0, {}),
        ("top_k draw", 3.0, {"top_k": 50}),
        ("top_p draw", 3.0, {"top_p": 0.95}),
        ("flat top_p draw", 0.5, {"top_p": 0.95}),
        ("penalised draw", 3.0, {"repetition_penalty": 1.1, "frequency_penalty": 0.5}),
    ):
        for num_rows in rows:
            logits = torch.randn(num_rows, shape.vocabulary) * spread
            history = list(torch.randint(shape.vocabulary, (num_rows, HISTORY), dtype=torch.int32))
            batch = sampling_batch(num_rows, **{"temperature": 0.8, **settings})
            batch = replace(batch, prompts=history, outputs=history)
            work = roofline.sample(num_rows, shape.vocabulary, draws=name != "greedy")
            call = _in_turn([partial(sample, logits, batch)])
            yield KernelCase(name, shape.model, "bf16", num_rows, work, call, cold=False)


def sampling_batch(num_rows: int, **settings: float) -> SamplingBatch:
    """Return rows that are sampled by `settings`, and neutrally by all others."""
    ids, zeros, ones = torch.arange(num_rows), torch.zeros(num_rows), torch.ones(num_rows)
    neutral = SamplingBatch(
        *(zeros, torch.zeros_like(ids), ones, zeros, zeros, zeros, ones),
        seeds=ids,
        choices=torch.zeros_like(ids),
        positions=ids,
    )
    columns: dict[str, Any] = {
        name: torch.full((num_rows,), each) for name, each in settings.items()
    }
    return replace(neutral, **columns)


# The cases of one builder are in memory together and are timed in turn.
BUILDERS: dict[str, Build] = {
    "projections": projections,
    "lm_head": lm_head,
    "experts": experts,
    "decode_attention": decode_attention,
    "long_attention": long_attention,
    "latent_attention": latent_attention,
    "prefill_attention": prefill_attention,
    "small_ops": small_ops,
    "sampling": sampling,
}
