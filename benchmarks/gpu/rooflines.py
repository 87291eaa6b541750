"""Every kernel compared with the limits of the GPU, and with torch's kernel if there is one.

The second part of `make gpu`. A kernel's time comes from CUDA graphs and the device's events
(benchmarks.gpu.timing), its bytes and operations from benchmarks.kernels.roofline; the share
is of the least time that the bandwidth and matmul rates measured in the same run allow. Weights
and cached keys that are cold in a step are cold here: calls rotate over copies larger than any L2
cache. Bytes of experts count the experts that the routing touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.part import Part, open_part, parse, parser
from benchmarks.gpu.timing import matmul_rate, measure_bandwidths, time_call
from benchmarks.kernels import roofline
from benchmarks.kernels.roofline import BF16, FP32, OpWork, Roofline
from kernels.contracts import AttentionMeta, RoutingRule
from kernels.runtime import Runtime
from kernels.sampling import SamplingBatch
from kernels.triton.attention.launches import attend
from kernels.triton.grouped_mlp.weights import FORMATS, GROUP, GpuWeight, pack_weight
from kernels.triton.linear.launches import linear
from kernels.triton.norm import add_rms_norm
from kernels.triton.ops import TritonOps
from kernels.triton.rotary import rotate_and_store
from kernels.triton.router.launches import permute, route
from kernels.triton.sampling.launches import draw, plan_sampling
from topspin.plan.precision import UNQUANTISED, Format

SECONDS: Final = 110.0
BLOCK_SIZE: Final = 16
EPS: Final = 1e-6


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model's layer, and the numbers of rows to time."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    experts: int
    top_k: int
    ffn: int
    vocabulary: int
    rows: tuple[int, ...]
    contexts: tuple[tuple[int, int, int], ...]
    """(sequences, new rows of each, context)."""
    cache_bytes: int
    """A size larger than the device's last-level cache."""


QWEN3_30B: Final = Sizes(
    *(32, 4, 128, 2048, 128, 8, 768, 151_936),
    rows=(1, 32, 128, 8192),
    contexts=((64, 1, 8192), (128, 1, 2048), (1, 1, 2048), (1, 8192, 8192), (1, 2048, 32_768)),
    cache_bytes=128 << 20,
)
TINY: Final = Sizes(4, 2, 16, 32, 4, 2, 16, 64, (3,), ((2, 1, 20), (1, 3, 3)), 4096)


@dataclass(frozen=True, eq=False)
class GpuCase:
    """One kernel at one size. `call(i)` uses copy i % copies of the cold tensors."""

    op: str
    shape: str
    work: OpWork
    call: Callable[[int], object]
    copies: int = 1
    product: str = "bf16"
    """The kind of product whose measured rate is the limit of the operations."""
    library: Callable[[int], object] | None = None
    """The same call by torch's kernel."""
    goal: float | None = None
    """The project's goal on one H200, as a share of the roofline."""


GpuCases = Iterator[tuple[str, Callable[[], GpuCase]]]
"""Names and makers of cases: a case's tensors live while it is timed."""


def num_copies(cold_bytes: float, cache_bytes: int) -> int:
    """Return the smallest number of copies of `cold_bytes` that exceeds the cache."""
    return int(cache_bytes // max(cold_bytes, 1)) + 1


def randn(*shape: int, device: torch.device) -> Tensor:
    """Return normal numbers in bf16."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def attention_case(
    sizes: Sizes, num_seqs: int, new_rows: int, context: int, device: torch.device
) -> GpuCase:
    """Attend `new_rows` of each sequence to scattered blocks; SDPA gets contiguous keys."""
    per_seq = -(-context // BLOCK_SIZE)
    tables = torch.randperm(num_seqs * per_seq).view(-1, per_seq)
    meta = AttentionMeta(
        query_start=(torch.arange(num_seqs + 1) * new_rows).to(device, torch.int32),
        context_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=device),
        block_tables=tables.to(device, torch.int32),
        max_query_len=new_rows,
        max_context_len=context,
    )
    kv_bytes = 2 * num_seqs * context * sizes.kv_heads * sizes.head_dim * BF16
    copies = num_copies(kv_bytes, sizes.cache_bytes)
    blocks = (2, tables.numel(), BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
    caches = [randn(*blocks, device=device) for _ in range(copies)]
    q = randn(num_seqs * new_rows, sizes.heads, sizes.head_dim, device=device)
    out = torch.empty_like(q)
    scale = sizes.head_dim**-0.5
    whole = [
        cache.view(2, num_seqs, -1, sizes.kv_heads, sizes.head_dim)[:, :, :context].transpose(2, 3)
        for cache in caches
    ]
    queries = q.view(num_seqs, new_rows, sizes.heads, sizes.head_dim).transpose(1, 2)
    is_causal = new_rows == context > 1

    def library(idx: int) -> object:
        keys, values = whole[idx % copies]
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=is_causal, scale=scale, enable_gqa=True
        )

    def call(idx: int) -> object:
        keys, values = caches[idx % copies]
        return attend(q, keys, values, meta, scale=scale, out=out)

    return GpuCase(
        "attention",
        f"{num_seqs} x {new_rows} rows, context {context}",
        roofline.paged_attention(
            [new_rows] * num_seqs,
            [context] * num_seqs,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
        ),
        call,
        copies,
        # SDPA's causal mask fits the first rows; a prompt's chunk is its last rows.
        library=library if is_causal or new_rows == 1 else None,
        goal=0.8 if (num_seqs, new_rows) == (64, 1) else 0.6 if new_rows > 1 else None,
    )


def expert_bytes(sizes: Sizes, weight_format: Format) -> int:
    """Count the bytes of one expert: its weights, and their scales, or steps and minima."""
    hidden_groups, ffn_groups = (-(-size // GROUP) for size in (sizes.hidden, sizes.ffn))
    numbers = 3 * sizes.hidden * sizes.ffn
    if weight_format == UNQUANTISED:
        return numbers * BF16
    if weight_format == "fp8":
        return numbers + 3 * hidden_groups * ffn_groups * FP32
    padded = GROUP * (2 * sizes.ffn * hidden_groups + sizes.hidden * ffn_groups)
    codes = padded if weight_format == "int8" else padded // 2
    return codes + padded // GROUP * 2 * BF16


def draw_routings(sizes: Sizes, num_rows: int, weight_format: Format) -> list[Tensor]:
    """Return routings, distinct experts per row, enough that the weights read exceed the cache."""
    scores = torch.rand(num_rows, sizes.experts, generator=torch.Generator().manual_seed(0))
    first = scores.topk(sizes.top_k, dim=-1).indices.int()
    touched_bytes = len(set(first.flatten().tolist())) * expert_bytes(sizes, weight_format)
    copies = num_copies(touched_bytes, sizes.cache_bytes)
    # The same routing with experts renamed touches as many, but different ones.
    step = sizes.experts // copies or 1
    return [(first + idx * step) % sizes.experts for idx in range(copies)]


def expert_case(
    sizes: Sizes, num_rows: int, weight_format: Format, device: torch.device
) -> GpuCase:
    """Run the routed experts of a layer; torch's grouped_mm does the two products alone."""
    drawn = draw_routings(sizes, num_rows, weight_format)
    touched = len(set(drawn[0].flatten().tolist()))
    routings, copies = [each.to(device) for each in drawn], len(drawn)
    gate_up = randn(sizes.experts, 2 * sizes.ffn, sizes.hidden, device=device) / sizes.hidden**0.5
    down = randn(sizes.experts, sizes.hidden, sizes.ffn, device=device) / sizes.ffn**0.5
    ops = TritonOps()
    experts = ops.pack_experts(gate_up, down, formats=[weight_format] * sizes.experts)
    hidden = randn(num_rows, sizes.hidden, device=device)
    weights = torch.full((num_rows, sizes.top_k), 1 / sizes.top_k, device=device)
    out = torch.empty_like(hidden)
    groups = [permute(each, sizes.experts) for each in routings]
    ends = [each.offsets[1:].int() for each in groups]
    rows = randn(num_rows * sizes.top_k, sizes.hidden, device=device)
    units = randn(num_rows * sizes.top_k, sizes.ffn, device=device)
    # Its name in torch 2.10 and later, and before.
    multiply: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

    def library(idx: int) -> object:
        multiply(rows, gate_up.transpose(1, 2), offs=ends[idx % copies])
        return multiply(units, down.transpose(1, 2), offs=ends[idx % copies])

    pairs = num_rows * sizes.top_k
    return GpuCase(
        f"experts {weight_format}",
        f"{num_rows} rows, {touched} experts touched",
        OpWork(
            touched * expert_bytes(sizes, weight_format) + 2 * num_rows * sizes.hidden * BF16,
            6 * pairs * sizes.hidden * sizes.ffn,
        ),
        lambda idx: ops.grouped_mlp(hidden, routings[idx % copies], weights, experts, out=out),
        copies,
        product="fp8" if weight_format == "fp8" else "bf16",
        library=library if weight_format == UNQUANTISED else None,
        goal={32: 0.75, 8192: 0.65}.get(num_rows) if weight_format == UNQUANTISED else None,
    )


def linear_case(
    sizes: Sizes, num_rows: int, weight_format: Format, device: torch.device
) -> GpuCase:
    """Multiply by a layer's qkv projection; a plain weight is torch's product, for comparison."""
    num_out = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    matrix = randn(num_out, sizes.hidden, device=device) / sizes.hidden**0.5

    def size_bytes(weight: GpuWeight) -> int:
        return weight.data.nbytes + (0 if weight.scales is None else weight.scales.nbytes)

    first = pack_weight(matrix, weight_format)
    copies = num_copies(size_bytes(first), sizes.cache_bytes)
    packed = [first, *(pack_weight(matrix.clone(), weight_format) for _ in range(copies - 1))]
    x = randn(num_rows, sizes.hidden, device=device)
    out = randn(num_rows, num_out, device=device)
    row_bytes = num_rows * (sizes.hidden + num_out) * BF16
    return GpuCase(
        f"linear {weight_format}",
        f"{num_rows} rows, {num_out} x {sizes.hidden}",
        OpWork(size_bytes(first) + row_bytes, 2 * num_rows * num_out * sizes.hidden),
        lambda idx: linear(x, packed[idx % copies], out=out),
        copies,
    )


def norm_case(sizes: Sizes, num_rows: int, device: torch.device) -> GpuCase:
    """Add and norm rows just written by the previous kernel."""
    residual, x = randn(2, num_rows, sizes.hidden, device=device)
    x.zero_()  # The residual would grow over many calls.
    weight = torch.ones(sizes.hidden, dtype=torch.bfloat16, device=device)
    return GpuCase(
        "add_rms_norm",
        f"{num_rows} x {sizes.hidden}",
        roofline.add_rms_norm(num_rows, sizes.hidden),
        lambda _: add_rms_norm(x, residual, weight, eps=EPS),
    )


def rotary_case(sizes: Sizes, num_rows: int, device: torch.device) -> GpuCase:
    """Norm, rotate and store the heads of a projection's rows."""
    counts = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
    qkv = randn(num_rows, sum(counts), sizes.head_dim, device=device)
    q, k, v = torch.split(qkv, counts, dim=1)
    angles = torch.rand(num_rows, sizes.head_dim, device=device) * 100
    cos, sin = angles.cos(), angles.sin()
    num_blocks = -(-num_rows // BLOCK_SIZE)
    cache_shape = (num_blocks, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
    k_cache, v_cache = (randn(*cache_shape, device=device) for _ in range(2))
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:num_rows].to(device)
    norm = torch.ones(sizes.head_dim, dtype=torch.bfloat16, device=device)
    return GpuCase(
        "rotate_and_store",
        f"{num_rows} rows",
        roofline.rotate_and_store(
            num_rows,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            has_norms=True,
        ),
        lambda _: rotate_and_store(
            q, k, v, cos, sin, k_cache, v_cache, slots, q_norm=norm, k_norm=norm, eps=EPS
        ),
    )


def route_case(sizes: Sizes, num_rows: int, device: torch.device) -> GpuCase:
    """Choose the experts of rows, and group the pairs."""
    logits = randn(num_rows, sizes.experts, device=device)
    alone = roofline.route(num_rows, sizes.experts, sizes.top_k)
    grouping = roofline.permute(num_rows, sizes.experts, sizes.top_k)
    rule = RoutingRule(sizes.top_k, renormalise=True)
    slots = route(logits, rule).experts.int()

    def call(_: int) -> None:
        route(logits, rule)
        permute(slots, sizes.experts)

    work = OpWork(alone.num_bytes + grouping.num_bytes, alone.flops + grouping.flops)
    return GpuCase("route and permute", f"{num_rows} x {sizes.experts}", work, call)


def sampling_case(
    sizes: Sizes, num_rows: int, temperature: float, top_p: float, device: torch.device
) -> GpuCase:
    """Sample from rows of logits just written by the LM head."""
    ids, zeros, ones = torch.arange(num_rows), torch.zeros(num_rows), torch.ones(num_rows)
    none = torch.zeros_like(ids)
    batch = SamplingBatch(
        *(ones * temperature, none, ones * top_p, zeros, zeros, zeros, ones),
        seeds=ids,
        choices=none,
        positions=ids,
    )
    logits = torch.randn(num_rows, sizes.vocabulary, device=device) * 3
    plan = plan_sampling(batch, sizes.vocabulary, device)
    return GpuCase(
        f"sample, temperature {temperature}, top_p {top_p}",
        f"{num_rows} x {sizes.vocabulary}",
        roofline.sample(num_rows, sizes.vocabulary, draws=temperature > 0),
        lambda _: draw(logits, plan),
    )


def all_cases(sizes: Sizes, device: torch.device) -> GpuCases:
    """Yield every case, the most important first: time may be short for the others."""
    for num_seqs, new_rows, context in sizes.contexts:
        name = f"attention, {num_seqs} x {new_rows} rows, context {context}"
        yield name, partial(attention_case, sizes, num_seqs, new_rows, context, device)
    for weight_format, rows in product(FORMATS, sizes.rows):
        name = f"experts {weight_format}, {rows} rows"
        yield name, partial(expert_case, sizes, rows, weight_format, device)
    for rows in sizes.rows:
        yield f"route and permute, {rows} rows", partial(route_case, sizes, rows, device)
        yield f"rotate_and_store, {rows} rows", partial(rotary_case, sizes, rows, device)
        yield f"add_rms_norm, {rows} rows", partial(norm_case, sizes, rows, device)
    for rows, (temperature, top_p) in product(sizes.rows[:3], ((0.0, 1.0), (0.7, 0.8))):
        name = f"sample, {rows} rows"
        yield name, partial(sampling_case, sizes, rows, temperature, top_p, device)
    for weight_format, rows in product(FORMATS, sizes.rows):
        name = f"linear {weight_format}, {rows} rows"
        yield name, partial(linear_case, sizes, rows, weight_format, device)


def measure_ceilings(part: Part, runtime: Runtime, *, is_quick: bool) -> dict[str, Roofline]:
    """Measure the bandwidths, and the rate of each product that the device supports."""
    # Kernels of a decode step mostly read, and reading may be faster than copying.
    bytes_per_s = measure_bandwidths(part, runtime, is_quick=is_quick)
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        try:
            rate = matmul_rate(runtime, dtype, is_quick=is_quick)
        except (RuntimeError, NotImplementedError) as error:
            part.figure(f"{name} product: none here: {error}", of="ceiling", name=name, per_s=None)
            continue
        line = f"{name} product: {rate / 1e12:.1f} TFLOP/s"
        part.figure(line, of="ceiling", name=name, per_s=rate)
        found[name] = Roofline(bytes_per_s, rate)
    return found


def time_library(runtime: Runtime, case: GpuCase) -> tuple[float | None, str]:
    """Return the seconds of torch's kernel, or the reason why there are none."""
    if case.library is None:
        return None, ""
    try:
        return time_call(runtime, case.library, case.copies).median_s, ""
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return None, str(error).splitlines()[0]


def measure(part: Part, runtime: Runtime, case: GpuCase, rooflines: dict[str, Roofline]) -> None:
    """Time one case and keep its figures."""
    limit = rooflines.get(case.product, rooflines["bf16"])
    timed = time_call(runtime, case.call, case.copies)
    library_s, why = time_library(runtime, case)
    fraction = limit.fraction(case.work, timed.median_s)
    beside = "" if library_s is None else f", torch {library_s * 1e6:.1f} us"
    part.figure(
        f"{case.op}, {case.shape}: {timed.median_s * 1e6:.1f} us, {fraction:.1%} of the "
        f"{limit.bound(case.work)} limit{beside}"
        + (f", goal {case.goal:.0%}" if case.goal is not None else ""),
        of="kernel",
        op=case.op,
        shape=case.shape,
        bytes=case.work.num_bytes,
        flops=case.work.flops,
        us=timed.median_s * 1e6,
        timed_by=timed.by,
        bytes_per_s=case.work.num_bytes / timed.median_s,
        flops_per_s=case.work.flops / timed.median_s,
        bound=limit.bound(case.work),
        floor_us=limit.least_s(case.work) * 1e6,
        fraction=fraction,
        goal=case.goal,
        library_us=None if library_s is None else library_s * 1e6,
        no_library=why or None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    args = parse(parser("rooflines", SECONDS), argv)
    part, runtime = open_part("rooflines", args)
    with part.attempt("ceilings"):
        rooflines = measure_ceilings(part, runtime, is_quick=args.quick)
        for name, make in all_cases(TINY if args.quick else QWEN3_30B, runtime.device):
            with part.attempt(name) as is_time:
                if is_time:
                    measure(part, runtime, make(), rooflines)
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
