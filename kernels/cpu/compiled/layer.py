"""The small ops of a layer, compiled: one call each where plain torch needs three to twenty.

Normalisation of the residual stream; head norms, rotation and storing of keys and values;
routing. bf16 rows, rounded where the reference rounds (sums of a row add in another order); keys
and values are stored in bf16 or fp8. A task is a row. Knows no layer; used by `kernels.cpu.ops`,
which handles all other cases.
Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.contracts import HeadRows, RoutingRule
from kernels.cpu.compiled.runtime import Kernel, float_word, inlined, launch, offsets
from kernels.cpu.simd import fp8, vectors
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

MAX_EXPERTS: Final = 512
# Fewer rows are computed faster than a second thread wakes.
_ROWS_PER_THREAD: Final = 16

(
    NORM_X, NORM_X_IS_BF16, RESIDUAL, RESIDUAL_STRIDE, NORM_WEIGHT, NORM_OUT, NORM_OUT_STRIDE,
    NORM_ROWS, NORM_WIDTH, NORM_EPS,
) = offsets(10)  # fmt: skip
"""The arguments of `_add_norm`; strides in bytes, rows of X are contiguous. X 0: nothing to add."""

(
    Q, K, V, Q_STRIDE, Q_HEAD, KV_STRIDE, COS, SIN, K_CACHE, V_CACHE, CACHE_SLOTS, SLOT_BYTES,
    ROT_ROWS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, Q_NORM, K_NORM, ROT_EPS, CACHE_IS_FP8,
) = offsets(21)  # fmt: skip
"""The arguments of `_rotate_and_store`; a norm of 0: no norm. Strides are in bytes: of rows of
queries, of their heads, and of rows of keys, which are those of values."""

(
    LOGITS, LOGITS_STRIDE, LOGITS_ARE_F32, ROUTE_ROWS, NUM_EXPERTS, TOP_K, SCORES, ROUTE_BIAS,
    NUM_GROUPS, TOP_GROUPS, BEST_OF_GROUP, RENORMALISE, EPSILON, LEAST_SUM, WEIGHT_SCALE, ROUND,
    EXPERTS_OUT, WEIGHTS_OUT,
) = offsets(18)  # fmt: skip
"""The arguments of `_route`; a bias of 0: no bias."""

_SOFTMAX, _SIGMOID, _LOGITS = range(3)
_SCORES: Final = {"softmax": _SOFTMAX, "sigmoid": _SIGMOID, "logits": _LOGITS}
_LOWEST: Final = np.finfo(np.float32).min


def _threads(num_rows: int) -> int:
    return torch.get_num_threads() if num_rows >= 2 * _ROWS_PER_THREAD else 1


def add_norm(
    x: Tensor | None, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add x [T, H], bf16 or fp32, to residual [T, H] in place; return the normed sum.

    `out` may be the residual itself.
    """
    num_rows, width = residual.shape
    if out is None:
        out = torch.empty(residual.shape, dtype=torch.bfloat16)
    arguments = (
        0 if x is None else x.data_ptr(),
        int(x is not None and x.dtype == torch.bfloat16),
        residual.data_ptr(),
        2 * residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        2 * out.stride(0),
        num_rows,
        width,
        float_word(eps),
    )
    launch(_add_norm, arguments, num_threads=_threads(num_rows))
    return out


def can_norm(x: Tensor | None, residual: Tensor, weight: Tensor, out: Tensor | None = None) -> bool:
    """Return whether `add_norm` takes these: rows of bf16, equally far apart."""
    return (
        residual.dim() == 2
        and residual.dtype == weight.dtype == torch.bfloat16
        and residual.stride(1) == 1
        and weight.is_contiguous()
        and (
            out is None
            or (out.dtype == torch.bfloat16 and out.shape == residual.shape and out.stride(1) == 1)
        )
        and (
            x is None
            or (
                x.is_contiguous()
                and x.shape == residual.shape
                and x.dtype in (torch.bfloat16, torch.float32)
            )
        )
    )


def can_rotate(heads: HeadRows) -> bool:
    """Return whether `rotate_and_store` takes these: rows of whole heads, equally far apart."""
    q, k, v, cos, k_cache, v_cache = heads.q, heads.k, heads.v, heads.cos, *heads[5:7]
    head_dim = q.shape[-1]
    return (
        q.dtype == k.dtype == v.dtype == torch.bfloat16
        and k_cache.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and cos.dtype == torch.float32
        and cos.is_contiguous()
        and 2 * cos.shape[-1] == head_dim
        and head_dim % 2 == 0
        and all(x.stride(2) == 1 for x in (q, k, v))
        and all(x.stride(1) == x.shape[2] or x.shape[1] == 1 for x in (k, v))
        # A single row may have any stride in torch.
        and (len(q) == 1 or k.stride(0) == v.stride(0))
        and all(_has_equal_slots(cache) for cache in (k_cache, v_cache))
        and k_cache.stride(1) == v_cache.stride(1)
    )


def _has_equal_slots(cache: Tensor) -> bool:
    """Return whether the slots of a cache are equally far apart, and their heads contiguous."""
    _, block_size, num_heads, head_dim = cache.shape
    return (
        cache.stride(3) == 1
        and cache.stride(0) == block_size * cache.stride(1)
        and (num_heads == 1 or cache.stride(2) == head_dim)
    )


def rotate_and_store(heads: HeadRows) -> None:
    """Norm, rotate and store; see `kernels.reference.rotate_and_store`."""
    q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, eps = heads
    num_rows, num_heads, head_dim = q.shape
    arguments = (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        2 * q.stride(0),
        2 * q.stride(1),
        2 * k.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slots.data_ptr(),
        k_cache.itemsize * k_cache.stride(1),
        num_rows,
        num_heads,
        k.shape[1],
        head_dim,
        v.shape[2],
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        float_word(eps),
        int(k_cache.dtype == torch.float8_e4m3fn),
    )
    launch(_rotate_and_store, arguments, num_threads=_threads(num_rows))


def can_route(logits: Tensor, rule: RoutingRule) -> bool:
    """Return whether `route_rows` takes these."""
    return (
        logits.dtype in (torch.bfloat16, torch.float32)
        and logits.stride(1) == 1
        and 0 < rule.top_k <= logits.shape[1] <= MAX_EXPERTS
        and rule.weights_dtype in (torch.bfloat16, torch.float32)
    )


def route_rows(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Return experts i64[T, K] and weights f32[T, K]; see `kernels.reference.route`."""
    num_rows, num_experts = logits.shape
    experts = torch.empty(num_rows, rule.top_k, dtype=torch.int64)
    weights = torch.empty(num_rows, rule.top_k)
    arguments = (
        logits.data_ptr(),
        logits.element_size() * logits.stride(0),
        int(logits.dtype == torch.float32),
        num_rows,
        num_experts,
        rule.top_k,
        _SCORES[rule.scores],
        0 if rule.bias is None else rule.bias.data_ptr(),
        rule.num_groups,
        rule.top_groups,
        rule.best_of_group,
        int(rule.renormalise),
        float_word(rule.epsilon),
        float_word(rule.least_sum),
        float_word(rule.scale),
        int(rule.weights_dtype == torch.bfloat16),
        experts.data_ptr(),
        weights.data_ptr(),
    )
    launch(_route, arguments, num_threads=_threads(num_rows))
    return experts, weights


_scores = simd.stack(4 * (MAX_EXPERTS + simd.LANES))
_wanted = simd.stack(4 * (MAX_EXPERTS + simd.LANES))
_group_scores = simd.stack(4 * MAX_EXPERTS)


@inlined
def _norm_row(source: int, weight: int, target: int, width: int, eps: float) -> None:
    """Normalise one row of `width` bf16 numbers; source and target may be the same."""
    squares = vectors.splat(np.float32(0))
    for begin in range(0, width, simd.LANES):
        number = vectors.load_first_bf16(source + 2 * begin, width - begin)
        squares = vectors.fma(number, number, squares)
    mean = vectors.sum_lanes(squares) / np.float32(width)
    scale = vectors.splat(np.float32(1) / np.sqrt(mean + eps))
    for begin in range(0, width, simd.LANES):
        left = width - begin
        normed = vectors.mul(vectors.load_first_bf16(source + 2 * begin, left), scale)
        scaled = vectors.mul(
            vectors.round_bf16(normed), vectors.load_first_bf16(weight + 2 * begin, left)
        )
        vectors.store_first_bf16(target + 2 * begin, scaled, left)


@Kernel
def _add_norm(block: int) -> None:
    width, num_rows = simd.read_i64(block + NORM_WIDTH), simd.read_i64(block + NORM_ROWS)
    x, is_bf16 = simd.read_i64(block + NORM_X), simd.read_i64(block + NORM_X_IS_BF16)
    row = claim_task(block, 0)
    while row < num_rows:
        residual = simd.read_i64(block + RESIDUAL) + row * simd.read_i64(block + RESIDUAL_STRIDE)
        if x:
            added = x + (4 - 2 * is_bf16) * row * width
            for begin in range(0, width, simd.LANES):
                left = width - begin
                if is_bf16:
                    term = vectors.load_first_bf16(added + 2 * begin, left)
                else:
                    term = vectors.load_first_f32(added + 4 * begin, left)
                total = vectors.add(vectors.load_first_bf16(residual + 2 * begin, left), term)
                vectors.store_first_bf16(residual + 2 * begin, total, left)
        out = simd.read_i64(block + NORM_OUT) + row * simd.read_i64(block + NORM_OUT_STRIDE)
        weight = simd.read_i64(block + NORM_WEIGHT)
        _norm_row(residual, weight, out, width, simd.read_f32(block + NORM_EPS))
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)


@inlined
def _turn(source: int, target: int, cos: int, sin: int, half: int) -> None:
    """Rotate one head of 2 * half numbers, each product and each sum rounded to bf16."""
    for begin in range(0, half, simd.LANES):
        left = half - begin
        low = vectors.load_first_bf16(source + 2 * begin, left)
        high = vectors.load_first_bf16(source + 2 * (half + begin), left)
        c = vectors.round_bf16(vectors.load_first_f32(cos + 4 * begin, left))
        s = vectors.round_bf16(vectors.load_first_f32(sin + 4 * begin, left))
        first = vectors.sub(
            vectors.round_bf16(vectors.mul(low, c)), vectors.round_bf16(vectors.mul(high, s))
        )
        second = vectors.add(
            vectors.round_bf16(vectors.mul(high, c)), vectors.round_bf16(vectors.mul(low, s))
        )
        vectors.store_first_bf16(target + 2 * begin, first, left)
        vectors.store_first_bf16(target + 2 * (half + begin), second, left)


@inlined
def _keep(source: int, target: int, width: int, is_fp8: int) -> None:
    """Write a head of bf16 numbers to a cache."""
    for begin in range(0, width, simd.LANES):
        left = width - begin
        numbers = vectors.load_first_bf16(source + 2 * begin, left)
        if is_fp8:
            fp8.store_first_fp8(target + begin, numbers, left)
        else:
            vectors.store_first_bf16(target + 2 * begin, numbers, left)


@Kernel
def _rotate_and_store(block: int) -> None:
    num_rows, head_dim = simd.read_i64(block + ROT_ROWS), simd.read_i64(block + HEAD_DIM)
    num_heads, num_groups = simd.read_i64(block + NUM_HEADS), simd.read_i64(block + NUM_KV_HEADS)
    q_norm, k_norm = simd.read_i64(block + Q_NORM), simd.read_i64(block + K_NORM)
    eps, half = simd.read_f32(block + ROT_EPS), head_dim // 2
    value_dim, is_fp8 = simd.read_i64(block + VALUE_DIM), simd.read_i64(block + CACHE_IS_FP8)
    number_bytes = 2 - is_fp8
    row = claim_task(block, 0)
    while row < num_rows:
        cos = simd.read_i64(block + COS) + 4 * half * row
        sin = simd.read_i64(block + SIN) + 4 * half * row
        query = simd.read_i64(block + Q) + row * simd.read_i64(block + Q_STRIDE)
        for idx in range(num_heads):
            head = query + idx * simd.read_i64(block + Q_HEAD)
            if q_norm:
                _norm_row(head, q_norm, head, head_dim, eps)
            _turn(head, head, cos, sin, half)
        slot = simd.read_i64(simd.read_i64(block + CACHE_SLOTS) + 8 * row)
        slot *= simd.read_i64(block + SLOT_BYTES)
        offset = row * simd.read_i64(block + KV_STRIDE)
        for idx in range(num_groups):
            head = simd.read_i64(block + K) + offset + 2 * head_dim * idx
            if k_norm:
                _norm_row(head, k_norm, head, head_dim, eps)
            _turn(head, head, cos, sin, half)
            place = slot + number_bytes * head_dim * idx
            _keep(head, simd.read_i64(block + K_CACHE) + place, head_dim, is_fp8)
            value = simd.read_i64(block + V) + offset + 2 * value_dim * idx
            place = slot + number_bytes * value_dim * idx
            _keep(value, simd.read_i64(block + V_CACHE) + place, value_dim, is_fp8)
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)


@inlined
def _read_logits(logits: int, is_f32: int, num_experts: int, scores: int) -> None:
    """Write a row's logits as fp32."""
    for begin in range(0, num_experts, simd.LANES):
        left = num_experts - begin
        if is_f32:
            vectors.store_f32(scores + 4 * begin, vectors.load_first_f32(logits + 4 * begin, left))
        else:
            vectors.store_f32(scores + 4 * begin, vectors.load_first_bf16(logits + 2 * begin, left))


@inlined
def _soften(scores: int, num_experts: int) -> None:
    """Turn logits into their softmax."""
    lowest = np.float32(-np.inf)
    greatest = vectors.splat(lowest)
    for begin in range(0, num_experts, simd.LANES):
        number = vectors.keep_first(
            vectors.load_f32(scores + 4 * begin), num_experts - begin, lowest
        )
        greatest = vectors.maximum(greatest, number)
    peak = vectors.splat(vectors.max_lanes(greatest))
    total = vectors.splat(np.float32(0))
    for begin in range(0, num_experts, simd.LANES):
        number = vectors.sub(vectors.load_f32(scores + 4 * begin), peak)
        exponential = vectors.keep_first(vectors.exp(number), num_experts - begin, np.float32(0))
        vectors.store_f32(scores + 4 * begin, exponential)
        total = vectors.add(total, exponential)
    whole = vectors.splat(vectors.sum_lanes(total))
    for begin in range(0, num_experts, simd.LANES):
        share = vectors.div(vectors.load_f32(scores + 4 * begin), whole)
        vectors.store_f32(scores + 4 * begin, share)


@inlined
def _squash(scores: int, num_experts: int) -> None:
    """Turn logits into their sigmoids."""
    one, zero = vectors.splat(np.float32(1)), vectors.splat(np.float32(0))
    for begin in range(0, num_experts, simd.LANES):
        negative = vectors.sub(zero, vectors.load_f32(scores + 4 * begin))
        sigmoid = vectors.div(one, vectors.add(one, vectors.exp(negative)))
        vectors.store_f32(scores + 4 * begin, sigmoid)


@inlined
def _rank(scores: int, bias: int, num_experts: int, wanted: int) -> None:
    """Write the numbers by which experts are chosen; a NaN or -inf comes last."""
    for expert in range(num_experts):
        number = simd.read_f32(scores + 4 * expert)
        if bias:
            number += simd.read_f32(bias + 4 * expert)
        simd.write_f32(wanted + 4 * expert, number if number > _LOWEST else _LOWEST)


@inlined
def _keep_best_groups(
    wanted: int, num_groups: int, group_size: int, top_groups: int, best_of: int, groups: int
) -> None:
    """Write -inf for all experts that are not in the best groups."""
    lowest, taken = np.float32(-np.inf), np.float32(np.nan)
    for group in range(num_groups):
        first = second = lowest
        for expert in range(group * group_size, (group + 1) * group_size):
            number = simd.read_f32(wanted + 4 * expert)
            if number > first:
                first, second = number, first
            elif number > second:
                second = number
        is_pair = best_of == 2 and group_size > 1
        simd.write_f32(groups + 4 * group, first + second if is_pair else first)
    for _ in range(top_groups):
        best, greatest = -1, lowest
        for group in range(num_groups):
            number = simd.read_f32(groups + 4 * group)
            # A taken one is not equal to itself.
            if number > greatest or (best < 0 and number == number):
                best, greatest = group, number
        simd.write_f32(groups + 4 * best, taken)
    for group in range(num_groups):
        number = simd.read_f32(groups + 4 * group)
        if number == number:
            for expert in range(group * group_size, (group + 1) * group_size):
                simd.write_f32(wanted + 4 * expert, lowest)


@inlined
def _soften_chosen(weights: int, top_k: int) -> None:
    """Turn the logits of the chosen experts, the greatest first, into their softmax."""
    peak, total = simd.read_f32(weights), np.float32(0)
    for choice in range(top_k):
        number = vectors.splat(simd.read_f32(weights + 4 * choice) - peak)
        exponential = vectors.max_lanes(vectors.exp(number))
        simd.write_f32(weights + 4 * choice, exponential)
        total += exponential
    for choice in range(top_k):
        simd.write_f32(weights + 4 * choice, simd.read_f32(weights + 4 * choice) / total)


@Kernel
def _route(block: int) -> None:
    scores, wanted, groups = _scores(), _wanted(), _group_scores()
    num_rows, num_experts = simd.read_i64(block + ROUTE_ROWS), simd.read_i64(block + NUM_EXPERTS)
    top_k, kind = simd.read_i64(block + TOP_K), simd.read_i64(block + SCORES)
    bias, num_groups = simd.read_i64(block + ROUTE_BIAS), simd.read_i64(block + NUM_GROUPS)
    epsilon, scale = simd.read_f32(block + EPSILON), simd.read_f32(block + WEIGHT_SCALE)
    row = claim_task(block, 0)
    while row < num_rows:
        logits = simd.read_i64(block + LOGITS) + row * simd.read_i64(block + LOGITS_STRIDE)
        _read_logits(logits, simd.read_i64(block + LOGITS_ARE_F32), num_experts, scores)
        # Without a bias, logits are in the order of the scores, and fewer of them are equal.
        if not bias:
            _rank(scores, 0, num_experts, wanted)
        if kind == _SOFTMAX:
            _soften(scores, num_experts)
        elif kind == _SIGMOID:
            _squash(scores, num_experts)
        if bias:
            _rank(scores, bias, num_experts, wanted)
        if num_groups > 1:
            _keep_best_groups(
                wanted,
                num_groups,
                num_experts // num_groups,
                simd.read_i64(block + TOP_GROUPS),
                simd.read_i64(block + BEST_OF_GROUP),
                groups,
            )
        experts = simd.read_i64(block + EXPERTS_OUT) + 8 * row * top_k
        weights = simd.read_i64(block + WEIGHTS_OUT) + 4 * row * top_k
        for choice in range(top_k):
            best, greatest = 0, np.float32(-np.inf)
            for expert in range(num_experts):
                number = simd.read_f32(wanted + 4 * expert)
                if number > greatest:
                    best, greatest = expert, number
            simd.write_f32(wanted + 4 * best, np.float32(-np.inf))
            simd.write_i64(experts + 8 * choice, best)
            simd.write_f32(weights + 4 * choice, simd.read_f32(scores + 4 * best))
        if kind == _LOGITS:
            _soften_chosen(weights, top_k)
        total = np.float32(1)
        if simd.read_i64(block + RENORMALISE):
            total = epsilon
            for choice in range(top_k):
                total += simd.read_f32(weights + 4 * choice)
            total = max(total, simd.read_f32(block + LEAST_SUM))
        for choice in range(top_k):
            weight = simd.read_f32(weights + 4 * choice) / total * scale
            if simd.read_i64(block + ROUND):
                weight = vectors.max_lanes(vectors.round_bf16(vectors.splat(weight)))
            simd.write_f32(weights + 4 * choice, weight)
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)
