"""Cases of every op: shapes, dtypes, layouts and edge sizes, and how exact a result must be.

A case calls one op through the interface, with inputs that are the same for every implementation.
Knows no implementation; `against_reference` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.contracts import HeadRows, RoutingRule
from kernels.dispatch import Ops
from tests.kernels.cases.attention import BATCHES, Heads, attention_case, placed
from topspin.expert_activation import SWIGLU, ExpertActivation

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
DTYPES = [BF16, FP32]
Run = Callable[[], Sequence[Tensor]]
"""Calls the op, and returns all that it computes or changes, with what lies around that."""
Tolerance = Mapping[torch.dtype, tuple[float, float]]
"""By dtype, relative and absolute."""


class Maker:
    """Draws inputs on a device; two makers draw the same."""

    def __init__(self, device: torch.device) -> None:
        self._rng = torch.Generator().manual_seed(0)
        self.device = device

    def __call__(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.randn(shape, generator=self._rng).to(self.device, dtype)

    def inside(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        """Draw numbers between others in wider rows."""
        return self(*shape[:-1], shape[-1] + 13, dtype=dtype)[..., 5:-8]

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._rng).to(self.device)

    def order(self, num_rows: int, count: int) -> Tensor:
        """Draw a permutation of `count` per row, i64[num_rows, count]."""
        return torch.rand(num_rows, count, generator=self._rng).argsort(-1).to(self.device)


class Op(NamedTuple):
    """An op's cases: one per row of values of its factors."""

    prepare: Callable[[Ops, Maker, Any], Run]
    """Called with the implementation, and an object whose attributes are the factors' values."""
    factors: Mapping[str, Sequence[Any]]
    tolerance: Tolerance
    """By the factor `dtype`, or the first part of `kind`; all that is not floating is equal."""


OPS: dict[str, Op] = {}
EXACT: Tolerance = dict.fromkeys((BF16, FP32), (0.0, 0.0))
# A mean summed in another order may move a quotient over one bf16 boundary.
ONE_UNIT: Tolerance = {FP32: (2e-6, 1e-6), BF16: (2.0**-7, 1e-6)}


def op(tolerance: Tolerance, **factors: Sequence[Any]) -> Callable[[Any], Any]:
    """Make a function the cases of the op that has its name."""

    def enter(prepare: Callable[[Ops, Maker, Any], Run]) -> Callable[[Ops, Maker, Any], Run]:
        OPS[prepare.__name__] = Op(prepare, factors, tolerance)
        return prepare

    return enter


def around(part: Tensor | None) -> list[Tensor]:
    """Return the whole memory that a tensor is a part of; nothing for None."""
    if part is None:
        return []
    return [part if part._base is None else part._base]


def delivered(found: Tensor, out: Tensor | None) -> list[Tensor]:
    """Return a result that must be in `out` if that is given, and what lies around it."""
    assert out is None or found is out
    return [found, *around(out)]


@op(EXACT, dtype=DTYPES, num_rows=[4, 0, 1], has_out=[False, True])
def embed(ops: Ops, make: Maker, case: Any) -> Run:
    tokens, table = make.integers(0, 50, case.num_rows), make(50, 33, dtype=case.dtype)
    out = make(case.num_rows, 33, dtype=case.dtype) if case.has_out else None
    return lambda: delivered(ops.embed(tokens, table, out=out), out)


@op(
    ONE_UNIT,
    shape=[
        *((7, 37), (0, 8), (1, 576), (70, 15), (16, 16), (2, 1)),
        *((33,), (3, 5, 64), (2, 2, 3, 10)),
    ],
    dtype=DTYPES,
    target=["new", "out", "in place"],
)
def rms_norm(ops: Ops, make: Maker, case: Any) -> Run:
    x = make.inside(*case.shape, dtype=case.dtype)
    weight = make(case.shape[-1], dtype=case.dtype)
    out = {"new": None, "out": make.inside(*case.shape, dtype=case.dtype), "in place": x}[
        case.target
    ]
    return lambda: [*delivered(ops.rms_norm(x, weight, eps=0.3, out=out), out), *around(x)]


@op(
    ONE_UNIT,
    x_dtype=DTYPES,
    dtype=DTYPES,
    shape=[(7, 33), (0, 16), (1, 1), (70, 15), (2, 576)],
    is_inside=[False, True],
    has_out=[False, True],
)
def add_rms_norm(ops: Ops, make: Maker, case: Any) -> Run:
    draw = make.inside if case.is_inside else make
    x, residual = draw(*case.shape, dtype=case.x_dtype), draw(*case.shape, dtype=case.dtype)
    weight = make(case.shape[1], dtype=case.dtype)
    out = make.inside(*case.shape, dtype=case.dtype) if case.has_out else None

    def run() -> Sequence[Tensor]:
        found = ops.add_rms_norm(x, residual, weight, eps=0.3, out=out)
        return [*delivered(found, out), *around(residual), x]

    return run


HEADS = [Heads(9, 3, 64), Heads(8, 1, 80), Heads(4, 4, 96), Heads(1, 1, 8), Heads(2, 1, 6)]


def rotated(ops: Ops, make: Maker, case: Any, *norms: Tensor) -> Run:
    heads, num_rows = case.heads, case.num_rows
    qkv = make(num_rows, heads.query + 2 * heads.kv, heads.dim, dtype=case.dtype) * 3
    q, k, v = qkv.split((heads.query, heads.kv, heads.kv), dim=1)
    v[:1] *= 1000  # beyond the greatest number of fp8
    angles = make(num_rows, heads.dim // 2) * 100
    if not case.has_half_tables:
        angles = torch.cat((angles, angles), -1)
    kept = FP8 if case.is_fp8 else case.dtype
    caches = torch.zeros(2, num_rows + 1, 4, heads.kv, heads.dim, device=make.device).to(kept)
    slots = make.order(1, 4 * num_rows + 4)[0, :num_rows]
    rows = HeadRows(q, k, v, angles.cos(), angles.sin(), *caches, slots, *norms, eps=0.3)

    def run() -> Sequence[Tensor]:
        ops.rotate_and_store(rows)
        return [q, v, caches]

    return run


@op(
    EXACT,
    dtype=DTYPES,
    is_fp8=[False, True],
    heads=HEADS,
    num_rows=[5, 1, 0, 17],
    has_half_tables=[True, False],
)
def rotate_and_store(ops: Ops, make: Maker, case: Any) -> Run:
    return rotated(ops, make, case)


# Two rotated numbers that each moved by a unit.
@op(
    {FP32: (1e-5, 1e-5), BF16: (2.0**-6, 0.1)},
    dtype=DTYPES,
    is_fp8=[False],
    heads=HEADS,
    num_rows=[1, 5],
    has_half_tables=[True],
)
def norm_rotate_and_store(ops: Ops, make: Maker, case: Any) -> Run:
    norms = (make(case.heads.dim, dtype=case.dtype) for _ in range(2))
    return rotated(ops, make, case, *norms)


@op(
    EXACT,
    dtype=DTYPES,
    is_fp8=[False, True],
    sizes=[(3, 8, 24), (1, 64, 512), (5, 6, 17)],
    num_rows=[5, 1, 0, 17],
)
def rotate_and_store_latents(ops: Ops, make: Maker, case: Any) -> Run:
    """Keys and values are parts of one vector, and queries the ends of longer ones."""
    num_heads, turned, rank = case.sizes
    queries = make(case.num_rows, num_heads, turned + 4, dtype=case.dtype)
    latents = make(case.num_rows, rank + turned + 3, dtype=case.dtype)[:, 3:]
    cache = torch.zeros(case.num_rows + 1, 4, 1, rank + turned, device=make.device)
    cache = cache.to(FP8 if case.is_fp8 else case.dtype)
    angles = make(case.num_rows, turned // 2) * 100
    rows = HeadRows(
        q=queries[..., 4:],
        k=latents[:, None, rank:],
        v=latents[:, None, :rank],
        cos=angles.cos(),
        sin=angles.sin(),
        k_cache=cache[..., rank:],
        v_cache=cache[..., :rank],
        slots=make.order(1, 4 * case.num_rows + 4)[0, : case.num_rows],
    )

    def run() -> Sequence[Tensor]:
        ops.rotate_and_store(rows)
        return [queries, latents[:, :rank], cache]

    return run


@op(
    {FP32: (1e-5, 1e-5), BF16: (2.0**-7, 1e-5)},
    dtype=DTYPES,
    shape=[(3, 40, 24), (1, 512, 128), (4, 70, 6)],
    num_rows=[5, 1, 0, 140],
    num_copied=[0, 64, 3],
    has_out=[False, True],
    is_shared=[False, True],
)
def multiply_heads(ops: Ops, make: Maker, case: Any) -> Run:
    """Also where all heads have the same rows, and the output is part of longer rows."""
    num_heads, num_out, num_in = case.shape
    weight = ops.pack_heads(make(*case.shape, dtype=case.dtype))
    width = num_in + case.num_copied
    x = make(case.num_rows, 1 if case.is_shared else num_heads, width, dtype=case.dtype)
    x = x.expand(-1, num_heads, -1)
    out = None
    if case.has_out:
        out = make(case.num_rows, num_heads, num_out + case.num_copied + 5, dtype=case.dtype)
        out = out[..., 5:]
    return lambda: delivered(ops.multiply_heads(x, weight, out=out), out)


@op(
    {FP32: (1e-4, 1e-5), BF16: (2.0**-6, 2e-2)},
    dtype=DTYPES,
    lengths=[(1, 1), (17, 17), (40, 600), (530, 530), (520, 1100)],
    heads=[(1, 16), (4, 24), (3, 192)],
)
def attend_prompt(ops: Ops, make: Maker, case: Any) -> Run:
    """Keys and values lie between others, as they are made together."""
    (num_rows, num_keys), (num_heads, dim) = case.lengths, case.heads
    q = make(num_rows, num_heads + 2, dim, dtype=case.dtype)[:, 1:-1]
    made = make(num_keys, 2, num_heads, dim, dtype=case.dtype)
    return lambda: [ops.attend_prompt(q, made[:, 0], made[:, 1], scale=dim**-0.5)]


@op(
    {FP32: (2e-6, 1e-6), BF16: (2.0**-7, 1e-30)},
    dtype=DTYPES,
    shape=[(5, 70), (0, 16), (1, 192), (3, 1), (3, 4096)],
    has_out=[False, True],
)
def swiglu(ops: Ops, make: Maker, case: Any) -> Run:
    num_rows, width = case.shape
    gate_up = 3 * make(num_rows, 2 * width, dtype=case.dtype)
    out = make(num_rows, width, dtype=case.dtype) if case.has_out else None
    return lambda: [*delivered(ops.swiglu(gate_up, out=out), out), gate_up]


@op(
    {FP32: (2e-6, 1e-6), BF16: (2.0**-7, 1e-30)},
    dtype=DTYPES,
    shape=[(5, 70), (0, 16), (1, 7), (3, 4096)],
    gate_dtype=[None, FP32],
)
def sigmoid_gate(ops: Ops, make: Maker, case: Any) -> Run:
    x = make(*case.shape, dtype=case.dtype)
    gate = 4 * make(case.shape[0], 1, dtype=case.gate_dtype or case.dtype)
    gate[:1], gate[1:2] = float("inf"), -200.0
    return lambda: [*delivered(ops.sigmoid_gate(x, gate), x), gate]


@op(
    {FP32: (1e-5, 1e-7), BF16: (2.0**-7, 1e-7)},
    shape=[(16, 8), (1, 1), (60, 4), (128, 8), (33, 33), (500, 4)],
    num_rows=[5, 0, 1, 40],
    logits_dtype=DTYPES,
    dtype=DTYPES,
    renormalise=[True, False],
    scores=["softmax", "sigmoid", "logits"],
    has_bias=[False, True],
    groups=[(1, 1, 2), (4, 2, 2), (4, 3, 1)],
)
def route(ops: Ops, make: Maker, case: Any) -> Run:
    """Distinct logits: nearly equal scores may be in any order."""
    num_experts, top_k = case.shape
    logits = make.inside(case.num_rows, num_experts, dtype=case.logits_dtype)
    logits.copy_((make.order(case.num_rows, num_experts) - num_experts // 2) / 16)
    num_groups, top_groups, best_of_group = case.groups
    if num_experts % num_groups or top_groups * (num_experts // num_groups) < top_k:
        num_groups = top_groups = 1
    rule = RoutingRule(
        top_k,
        scores=case.scores,
        bias=make.order(1, num_experts)[0].float() if case.has_bias else None,
        num_groups=num_groups,
        top_groups=top_groups,
        best_of_group=best_of_group,
        renormalise=case.renormalise,
        epsilon=1e-20,
        least_sum=0.5,
        scale=1.5,
        weights_dtype=case.dtype,
    )
    return lambda: ops.route(logits, rule)


@op(EXACT, dtype=[FP32], num_experts=[5, 1, 128])
def add_counts(ops: Ops, make: Maker, case: Any) -> Run:
    totals = make.integers(0, 9, case.num_experts + 2)
    # The second batch has no rows.
    batches = [make.integers(0, 3, case.num_experts) * (turn != 1) for turn in range(3)]

    def run() -> Sequence[Tensor]:
        for counts in batches:
            ops.add_counts(totals, counts)
        return [totals]

    return run


@op(
    # Sums in another order may round differently near a tie.
    {FP32: (1e-5, 1e-5), BF16: (2.0**-7, 1e-4)},
    shape=[(13, 38), (1, 1), (13, 37), (64, 32), (100, 72), (65, 1024)],
    num_rows=[*range(14), 16, 17, 40, 70],
    kind=[*product(DTYPES, [True, False])],
    target=["new", "out", "wider", "across"],
    is_across=[False, True],
)
def linear(ops: Ops, make: Maker, case: Any) -> Run:
    """Also rows whose numbers are not next to each other."""
    (num_out, num_in), num_rows, (dtype, has_bias) = case.shape, case.num_rows, case.kind
    weight = ops.pack_linear((make(num_out, num_in) / num_in**0.5).to(dtype))
    x, bias = make.inside(num_rows, num_in, dtype=dtype), make(num_out, dtype=dtype)
    if case.is_across:
        x = make(num_in, num_rows, dtype=dtype).t()
    out = {
        "new": None,
        "out": make.inside(num_rows, num_out, dtype=dtype),
        "wider": make.inside(num_rows, num_out),
        "across": make(num_out, num_rows, dtype=dtype).t(),
    }[case.target]
    return lambda: delivered(ops.linear(x, weight, bias if has_bias else None, out), out)


CLAMPED = ExpertActivation(alpha=1.702, offset=1.0, limit=0.8)
"""A limit that normal numbers pass."""


def routed(make: Maker, num_rows: int, num_experts: int, *, routes: str) -> tuple[Tensor, Tensor]:
    """Return slots i32[R, 3] and weights."""
    slots = make.order(num_rows, num_experts)[:, :3].int()
    if routes == "partly absent":
        slots[make(num_rows, 3) < 0] = -1
    elif routes == "all absent":
        slots[:] = -3
    elif routes == "empty experts":
        slots = slots.where(slots < num_experts // 2, -1)
    elif routes == "one expert":
        slots[:, 0], slots[:, 1:] = num_experts - 1, -1
    return slots, make(num_rows, 3).sigmoid()


@op(
    # Units are rounded to bf16, and so are contributions to a bf16 result.
    {FP32: (1e-5, 1e-5), BF16: (2e-2, 2e-2)},
    routes=["all here", "partly absent", "all absent", "empty experts", "one expert"],
    num_rows=[7, 0, 1, 90],
    dtype=DTYPES,
    sizes=[(38, 64), (20, 13), (96, 64)],
    share=[0.0, 0.5],
    out_dtype=[None, *DTYPES],
    form=[(False, SWIGLU), (True, CLAMPED), (True, SWIGLU), (False, CLAMPED)],
)
def grouped_mlp(ops: Ops, make: Maker, case: Any) -> Run:
    (hidden, width), num_rows, dtype = case.sizes, case.num_rows, case.dtype
    gate_up = (make(6, 2 * width, hidden) / hidden**0.5).to(dtype)
    down = (make(6, hidden, width) / width**0.5).to(dtype)
    has_biases, activation = case.form
    biases = (make(6, 2 * width, dtype=dtype), make(6, hidden, dtype=dtype))
    experts = ops.pack_experts(
        gate_up,
        down,
        share_per_row=case.share,
        biases=biases if has_biases else None,
        activation=activation,
    )
    x = make.inside(num_rows, hidden, dtype=dtype)
    slots, weights = routed(make, num_rows, 6, routes=case.routes)
    weights[slots < 0] = float("nan")
    kept = case.out_dtype
    out = None if kept is None else make.inside(num_rows, hidden, dtype=kept)

    def run() -> Sequence[Tensor]:
        found = ops.grouped_mlp(x, slots, weights, experts, out=out)
        is_absent = (slots < 0).all(1, keepdim=True)
        return [*delivered(found.out, out), found.counts, is_absent & (found.out != 0)]

    return run


@op(
    {FP32: (1e-5, 1e-5), BF16: (2e-2, 2e-2)},
    rows=list(BATCHES),
    kind=[*product(DTYPES, [False, True])],
    window=[None, 1, 7, 32],
    heads=[
        *(Heads(6, 2, 16), Heads(3, 1, 64), Heads(4, 4, 96), Heads(8, 1, 80), Heads(20, 1, 8)),
        *(Heads(16, 1, 576, rank=512), Heads(5, 1, 40, rank=24), Heads(18, 1, 96, rank=64)),
    ],
    block_size=[16, 1, 48],
    num_padding=[0, 3],
    # What is added to random ones; the exponentials of 200 and of -200 are no numbers of fp32.
    sinks=[0.0, None, 200.0, -200.0, float("-inf"), 3.0],
    target=["new", "out"],
)
def paged_attention(ops: Ops, make: Maker, case: Any) -> Run:
    lens, counts, trees = BATCHES[case.rows]
    dtype, in_fp8 = case.kind
    made = attention_case(
        lens,
        counts,
        heads=case.heads,
        block_size=case.block_size,
        dtype=dtype,
        in_fp8=in_fp8,
        parents=trees,
        padding_rows=case.num_padding,
    )
    if made.meta.tree_mask is not None:
        # Buffers are used again: bits beyond a sequence's own columns are not of its tree.
        starts = made.meta.query_start.tolist()
        for start, end, tree in zip(starts, starts[1:], trees or (), strict=False):
            made.meta.tree_mask[start:end, len(tree) :] = True
    made = placed(made, make.device)
    q = make(len(made.q), case.heads.query + 4, case.heads.dim, dtype=dtype)[:, 2:-2].copy_(made.q)
    arguments = (q, made.k_cache, made.v_cache, made.meta)
    sinks = None if case.sinks is None else make(case.heads.query) + case.sinks
    options = {"scale": 0.2, "sliding_window": case.window, "sinks": sinks}
    out = None
    if case.target == "out":
        out = made.q.new_full((*made.q.shape[:2], made.v_cache.shape[3]), float("nan"))

    def run() -> Sequence[Tensor]:
        """The second time with what the first has left in the memo."""
        found = ops.paged_attention(*arguments, **options, out=out)
        again = found if out is None else ops.paged_attention(*arguments, **options)
        return [*delivered(found, out), again == found]

    return run
