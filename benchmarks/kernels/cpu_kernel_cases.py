"""The calls that cpu_kernels times: the ops of one step, at the shapes of two models.

Owns the shapes, the tensors (random numbers: the values do not change these kernels' speed), and
which of them are cold. Weights and cached keys have enough copies that a rotation over them does
not fit in the processor's cache, as in a step, which reads every layer once; activations were just
written by the previous op and stay in the cache. Weights are packed by the ops, as in the nodes.
Knows no clock.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels import roofline
from benchmarks.kernels.roofline import Work
from kernels.contracts import AttentionMeta, HeadRows, LinearWeight, PackedExperts
from kernels.cpu.sampling import sample
from kernels.dispatch import Ops, select_ops
from kernels.reference import permute
from kernels.sampling import SamplingBatch
from topspin.plan.precision import UNQUANTISED, Format

PRECISIONS = {"bf16": 16, "int8": 8, "int4": 4}
FORMATS: dict[str, Format] = {"bf16": UNQUANTISED, "int8": "int8", "int4": "int4"}
CONTEXTS = (160, 1024, 4096)
# Decode attention at these only for few rows, by dtype and by query heads that share a key.
LONG_CONTEXTS = (8192, 32768)
LONG_ROWS = 4
SHARING_HEADS = (1, 3, 8)
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


class Shape(NamedTuple):
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
    Shape("smollm2-moe", 576, 9, 3, 64, 16, 8, 192, 49152, False),
    Shape("qwen3-moe-686m", 1024, 16, 4, 64, 32, 4, 512, 49152, True),
)


@dataclass(frozen=True, eq=False)
class Case:
    """One op at one size. `call(i)` runs it on the i-th copy of the cold tensors."""

    op: str
    model: str
    precision: str
    num_rows: int
    work: Work
    call: Callable[[int], object]
    context: int | None = None
    cold: bool = True


Call = Callable[[int], object]
Build = Callable[[Shape, Sequence[int]], Iterator[Case]]


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


def _linear(ops: Ops, x: Tensor, copies: list[LinearWeight], out: Tensor | None = None) -> Call:
    return lambda i: ops.linear(x, copies[i % len(copies)], out=out)


def projections(shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
    """QKV and output projections, in every precision."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for name, num_in, num_out in (("qkv", shape.hidden, q + 2 * kv), ("o", q, shape.hidden)):
        matrix = _random(num_out, num_in)
        for precision, bits in PRECISIONS.items():
            ops = ops_of(precision)
            copies = num_copies(roofline.weight_bytes(num_out, num_in, bits))
            packed = [ops.pack_linear(matrix.clone(), FORMATS[precision]) for _ in range(copies)]
            for num_rows in rows:
                x = _random(num_rows, num_in)
                yield Case(
                    op=name,
                    model=shape.model,
                    precision=precision,
                    num_rows=num_rows,
                    work=roofline.linear(num_rows, num_in, num_out, bits=bits),
                    call=_linear(ops, x, packed),
                )


def lm_head(shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
    """The LM head, to fp32, in every precision; a model's has 4 bits only if a rule says so."""
    num_out, num_in = shape.vocabulary, shape.hidden
    matrix = _random(num_out, num_in)
    for precision, bits in PRECISIONS.items():
        ops = ops_of(precision)
        copies = num_copies(roofline.weight_bytes(num_out, num_in, bits))
        packed = [ops.pack_linear(matrix.clone(), FORMATS[precision]) for _ in range(copies)]
        for num_rows in rows:
            x, out = _random(num_rows, num_in), torch.empty(num_rows, num_out)
            yield Case(
                op="lm_head",
                model=shape.model,
                precision=precision,
                num_rows=num_rows,
                work=roofline.linear(num_rows, num_in, num_out, bits=bits, out_bytes=4),
                call=_linear(ops, x, packed, out),
            )


def experts(shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
    """A layer's routed experts on one node, chosen at random, in every precision."""
    gate_up = _random(shape.num_experts, 2 * shape.ffn, shape.hidden)
    down = _random(shape.num_experts, shape.hidden, shape.ffn)
    share = shape.top_k / shape.num_experts
    routes = {num_rows: _routes(shape, num_rows) for num_rows in rows}
    for precision, bits in PRECISIONS.items():
        ops = ops_of(precision)
        size = roofline.grouped_mlp(
            0, shape.hidden, shape.ffn, num_pairs=0, num_touched=shape.num_experts, bits=bits
        )
        formats = [FORMATS[precision]] * shape.num_experts
        packed = [
            ops.pack_experts(gate_up.clone(), down.clone(), formats=formats, share_per_row=share)
            for _ in range(num_copies(size.num_bytes))
        ]
        for num_rows in rows:
            hidden, slots = _random(num_rows, shape.hidden), routes[num_rows]
            weights = torch.full((num_rows, shape.top_k), 1 / shape.top_k)
            touched = sum(len(torch.unique(chosen)) for chosen in slots) / len(slots)
            yield Case(
                op="experts",
                model=shape.model,
                precision=precision,
                num_rows=num_rows,
                work=roofline.grouped_mlp(
                    num_rows,
                    shape.hidden,
                    shape.ffn,
                    num_pairs=num_rows * shape.top_k,
                    num_touched=touched,
                    bits=bits,
                ),
                call=_grouped_mlp(ops, hidden, slots, weights, packed),
            )


def _grouped_mlp(
    ops: Ops, hidden: Tensor, slots: list[Tensor], weights: Tensor, copies: list[PackedExperts]
) -> Call:
    return lambda i: ops.grouped_mlp(
        hidden, slots[i % len(slots)], weights, copies[i % len(copies)]
    )


def _routes(shape: Shape, num_rows: int) -> list[Tensor]:
    """Return slots i32[R, K] for each of several calls; a row's experts differ."""
    chances = torch.rand(MAX_COPIES, num_rows, shape.num_experts)
    return list(chances.topk(shape.top_k, dim=-1).indices.int())


class _Cache(NamedTuple):
    """One layer's keys and values [B, block_size, G, D]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, shape: Shape, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> _Cache:
        size = (-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        keys = torch.empty(size, dtype=dtype).uniform_(-1, 1)
        return cls(keys, keys.clone())


def decode_attention(shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
    """One new row for each of several sequences of equal context."""
    sizes = [([1] * num_rows, context) for context in CONTEXTS for num_rows in rows]
    yield from _attention("decode attention", shape, sizes)


def prefill_attention(shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
    """Many new rows of one sequence; `rows` is ignored."""
    yield from _attention("prefill attention", shape, [([n], context) for n, context in PREFILLS])


def long_attention(shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
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


def _attention(
    op: str, shape: Shape, sizes: Sequence[tuple[list[int], int]], precision: str = "bf16"
) -> Iterator[Case]:
    """Cases of (new rows per sequence, context of all of them), on blocks in random order."""
    dtype = DTYPES[precision]
    ops = select_ops("cpu", dtype)
    token_bytes = 2 * dtype.itemsize * shape.num_kv_heads * shape.head_dim
    least = CACHE_FILLS * cache_bytes() // token_bytes
    most = max((len(new) * context for new, context in sizes), default=0)
    cache = _Cache.of(shape, max(least, most), dtype)
    for new_rows, context in sizes:
        q = _random(sum(new_rows), shape.num_heads, shape.head_dim).to(dtype)
        metas = _metas(new_rows, context, num_blocks=len(cache.keys))
        yield Case(
            op=op,
            model=shape.model,
            precision=precision,
            num_rows=len(q),
            context=context,
            work=roofline.paged_attention(
                new_rows,
                [context] * len(new_rows),
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                number_bytes=dtype.itemsize,
            ),
            call=_attend(ops, q, cache, metas),
        )


def _attend(ops: Ops, q: Tensor, cache: _Cache, metas: list[AttentionMeta]) -> Call:
    scale = q.shape[-1] ** -0.5
    return lambda i: ops.paged_attention(
        q, cache.keys, cache.values, metas[i % len(metas)], scale=scale
    )


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


def small_ops(shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
    """Norms, rotation with storing, the router, permutation: on activations, which are warm."""
    for num_rows in rows:
        for case in (
            *_norms(shape, num_rows),
            _rotation(shape, num_rows),
            *_routing(shape, num_rows),
        ):
            yield replace(case, cold=False)


def _norms(shape: Shape, num_rows: int) -> Iterator[Case]:
    ops, hidden = ops_of("bf16"), shape.hidden
    x, residual, weight = _random(num_rows, hidden), _random(num_rows, hidden), _random(hidden)
    zeros = torch.zeros_like(x)
    about = (shape.model, "bf16", num_rows)
    work = roofline.rms_norm(num_rows, hidden)
    yield Case("rms_norm", *about, work, lambda i: ops.rms_norm(x, weight, eps=EPS))
    work = roofline.add_rms_norm(num_rows, hidden)
    # Every call adds to the residual: zeros keep it in range.
    yield Case(
        *("add_rms_norm", *about, work),
        lambda i: ops.add_rms_norm(zeros, residual, weight, eps=EPS),
    )


def _rotation(shape: Shape, num_rows: int) -> Case:
    ops = ops_of("bf16")
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Views of one product's rows, as in a step.
    qkv = _random(num_rows, q + 2 * kv).view(num_rows, -1, shape.head_dim)
    keys, values = shape.num_heads, shape.num_heads + shape.num_kv_heads
    q_rows, k_rows, v_rows = qkv[:, :keys], qkv[:, keys:values], qkv[:, values:]
    angles = torch.rand(num_rows, shape.head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    cache = _Cache.of(shape, num_rows * BLOCK_SIZE)
    slots = torch.arange(num_rows) * BLOCK_SIZE
    norm = _random(shape.head_dim) if shape.has_head_norms else None
    work = roofline.rotate_and_store(
        num_rows,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        has_norms=shape.has_head_norms,
    )

    def call(i: int) -> None:
        ops.rotate_and_store(
            HeadRows(
                *(q_rows, k_rows, v_rows, cos, sin, cache.keys, cache.values, slots),
                q_norm=norm,
                k_norm=norm,
                eps=EPS,
            )
        )

    return Case("rotate_and_store", shape.model, "bf16", num_rows, work, call)


def _routing(shape: Shape, num_rows: int) -> Iterator[Case]:
    ops, about = ops_of("bf16"), (shape.model, "bf16", num_rows)
    num_experts, top_k = shape.num_experts, shape.top_k
    x, logits = _random(num_rows, shape.hidden), _random(num_rows, num_experts)
    router = ops.pack_linear(_random(num_experts, shape.hidden))
    slots = _routes(shape, num_rows)[0]
    work = roofline.linear(num_rows, shape.hidden, num_experts)
    yield Case("router", *about, work, lambda i: ops.linear(x, router))
    work = roofline.route(num_rows, num_experts, top_k)
    yield Case(
        *("route", *about, work),
        lambda i: ops.route(logits, top_k=top_k, renormalise=True, weights_dtype=torch.bfloat16),
    )
    work = roofline.permute(num_rows, num_experts, top_k)
    yield Case("permute", *about, work, lambda i: permute(slots, num_experts))


def sampling(shape: Shape, rows: Sequence[int]) -> Iterator[Case]:
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
            batch = _sampling_batch(num_rows, shape.vocabulary, settings)
            work = roofline.sample(num_rows, shape.vocabulary, draws=name != "greedy")
            yield Case(
                *(name, shape.model, "bf16", num_rows, work),
                _sample(logits, batch),
                cold=False,
            )


def _sample(logits: Tensor, batch: SamplingBatch) -> Call:
    return lambda i: sample(logits, batch)


def _sampling_batch(num_rows: int, vocabulary: int, settings: Mapping[str, float]) -> SamplingBatch:
    def column(name: str, neutral: float) -> Tensor:
        return torch.full((num_rows,), settings.get(name, neutral))

    ids = torch.arange(num_rows)
    history = list(torch.randint(vocabulary, (num_rows, HISTORY), dtype=torch.int32))
    return SamplingBatch(
        temperature=column("temperature", 0.8),
        top_k=column("top_k", 0).long(),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        presence_penalty=column("presence_penalty", 0.0),
        frequency_penalty=column("frequency_penalty", 0.0),
        repetition_penalty=column("repetition_penalty", 1.0),
        seeds=ids,
        choices=torch.zeros_like(ids),
        positions=ids,
        prompts=history,
        outputs=history,
    )


# The cases of one builder are in memory together and are timed in turn.
BUILDERS: dict[str, Build] = {
    "projections": projections,
    "lm_head": lm_head,
    "experts": experts,
    "decode_attention": decode_attention,
    "long_attention": long_attention,
    "prefill_attention": prefill_attention,
    "small_ops": small_ops,
    "sampling": sampling,
}
