"""Triton kernels of the grouped expert MLP, for weights in every format.

`gate_up_tile` multiplies gathered rows by an expert's gate and up matrices in
one loop and writes the hidden units; `down_tile` multiplies those by the expert's down matrix
and writes one weighted row per (row, choice) pair; `sum_choices` adds a row's pairs by
ascending choice. So nothing depends on the order of programs, as it would with atomics, at
the cost of writing and reading the pairs once. `quantise_groups` converts rows to fp8.

A program's tile is BLOCK_M pairs of one expert by BLOCK_N outputs; it determines the expert and
pairs itself (`kernels.triton.grouped_mlp.pairs`). With SWAP the weights are the left factor
and rows the right one, for few rows: 64 outputs fill a Hopper matrix instruction, a few
rows do not.

A table has the addresses of the weights, so that experts can be replaced one by one.
Formats (FORMAT): PLAIN; FP8, e4m3 with an fp32 scale per 128 x 128 block and rows in e4m3
with an fp32 scale per 128 inputs; INT8 and INT4, unsigned codes with a step and a lowest
number per output and 128 inputs, multiplied as codes: they are exact in bf16, and step and
lowest number are applied to a group's fp32 sum; MXFP4, e2m1 codes with a power of two per output
and 32 inputs, multiplied as their numbers, which bf16 represents.

Launched by `kernels.triton.grouped_mlp.launches`; `kernels.triton.linear.kernels` multiplies by
single weights with the same blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.grouped_mlp.pairs import count_few, find_few, find_tile, place
from kernels.triton.runtime import dot, rounded

GROUP: tl.constexpr = tl.constexpr(128)
PLAIN: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
INT8: tl.constexpr = tl.constexpr(2)
INT4: tl.constexpr = tl.constexpr(3)
MXFP4: tl.constexpr = tl.constexpr(4)
# Twice each e2m1 number without its sign, in four bits.
DOUBLED: tl.constexpr = tl.constexpr(0xC8643210)


@triton.jit
def _address(table_ptr: tl.tensor, place: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the pointer at a place of the table; torch's allocations are aligned."""
    return tl.multiple_of(tl.load(table_ptr + place).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _spread(by_row: tl.tensor, by_out: tl.tensor, SWAP: tl.constexpr) -> tl.tensor:
    """Return the outer product of a number per row and one per output."""
    if SWAP:
        products = by_out[:, None] * by_row[None, :]
    else:
        products = by_row[:, None] * by_out[None, :]
    return products


@triton.jit
def _multiply(x: tl.tensor, w: tl.tensor, sums: tl.tensor, SWAP: tl.constexpr) -> tl.tensor:
    """Add the products of rows x [M, K] and outputs w [N, K] to their sums."""
    if SWAP:
        sums = dot(w, tl.trans(x), sums)
    else:
        sums = dot(x, tl.trans(w), sums)
    return sums


@triton.jit
def load_rows(
    x_ptr: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    inputs: tl.tensor,
    num_in: tl.tensor,
    EVEN: tl.constexpr,
) -> tl.tensor:
    places = x_ptr + rows[:, None] * row_stride + inputs[None, :]
    if EVEN:
        x = tl.load(places)
    else:
        x = tl.load(places, mask=inputs[None, :] < num_in, other=0.0)
    return x


@triton.jit
def _numbers(codes: tl.tensor, exponents: tl.tensor, first: tl.constexpr) -> tl.tensor:
    """Return the numbers of e2m1 codes [N, 64], whose exponents are bytes first .. of each word."""
    bytes_ = first + tl.arange(0, codes.shape[1]) // 32
    steps = ((exponents[:, None] >> (8 * bytes_)[None, :]) & 255) << 23
    shifts = ((codes & 7) * 4).to(tl.uint32)
    doubled = (tl.full(codes.shape, DOUBLED, tl.uint32) >> shifts) & 15
    numbers = doubled.to(tl.float32) * steps.to(tl.float32, bitcast=True)
    return tl.where(codes >= 8, -numbers, numbers)


@triton.jit
def add_block(
    sums: tl.tensor,
    x: tl.tensor,
    x_high: tl.tensor,
    x_factor: tl.tensor,
    weight_ptr: tl.tensor,
    outputs: tl.tensor,
    step: tl.tensor,
    low: tl.tensor,
    start: tl.tensor,
    num_in: tl.tensor,
    weight_stride: tl.tensor,
    FORMAT: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Add the products of inputs start .. start + BLOCK_K to the sums of a tile.

    x holds the rows' inputs; in INT4 and MXFP4 the lower half of them, and x_high the upper.
    x_factor is the rows' scale in FP8 (1 for rows that are not in fp8), and in INT8 and INT4 the
    sum of their inputs. step and low are those of `load_scales`.
    """
    if FORMAT == PLAIN:
        inputs = start + tl.arange(0, BLOCK_K)
        w = load_rows(weight_ptr, outputs.to(tl.int64), weight_stride, inputs, num_in, EVEN)
        sums = _multiply(x, w, sums, SWAP)
    elif FORMAT == MXFP4:
        rows_ptr = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride
        codes = tl.load(rows_ptr + start // 2 + tl.arange(0, BLOCK_K // 2)[None, :])
        sums = _multiply(x, _numbers(codes & 15, step, 0).to(x.dtype), sums, SWAP)
        sums = _multiply(x_high, _numbers(codes >> 4, step, 2).to(x.dtype), sums, SWAP)
    else:
        product = tl.zeros_like(sums)
        rows_ptr = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride
        if FORMAT == FP8:
            inputs = start + tl.arange(0, BLOCK_K)
            w = load_rows(weight_ptr, outputs.to(tl.int64), weight_stride, inputs, num_in, EVEN)
            # No conversion for rows in fp8; bf16 represents every number of fp8.
            product = _multiply(x, w.to(x.dtype), product, SWAP)
            factor = x_factor * step
            sums += product * (factor[None, :] if SWAP else factor[:, None])
        else:
            if FORMAT == INT8:
                codes = tl.load(rows_ptr + start + tl.arange(0, BLOCK_K)[None, :])
                product = _multiply(x, codes.to(tl.float32).to(x.dtype), product, SWAP)
            else:
                codes = tl.load(rows_ptr + start // 2 + tl.arange(0, BLOCK_K // 2)[None, :])
                product = _multiply(x, (codes & 15).to(tl.float32).to(x.dtype), product, SWAP)
                high = (codes >> 4).to(tl.float32).to(x.dtype)
                product = _multiply(x_high, high, product, SWAP)
            ones = tl.full(x_factor.shape, 1.0, tl.float32)
            sums += product * _spread(ones, step.to(tl.float32), SWAP)
            sums += _spread(x_factor, low.to(tl.float32), SWAP)
    return sums


@triton.jit
def load_block(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    start: tl.tensor,
    num_in: tl.tensor,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a block of inputs of rows for `add_block`: x, x_high and x_factor.

    SCALED: with weights in FP8 the rows are in fp8 too, with scales.
    """
    if FORMAT >= INT4:
        inputs = start + tl.arange(0, BLOCK_K // 2)
        x = load_rows(x_ptr, rows, x_stride, inputs, num_in, EVEN)
        x_high = load_rows(x_ptr, rows, x_stride, inputs + BLOCK_K // 2, num_in, EVEN)
        factor = tl.sum(x.to(tl.float32), axis=1) + tl.sum(x_high.to(tl.float32), axis=1)
    else:
        x = load_rows(x_ptr, rows, x_stride, start + tl.arange(0, BLOCK_K), num_in, EVEN)
        x_high = x
        if FORMAT == INT8:
            factor = tl.sum(x.to(tl.float32), axis=1)
        elif FORMAT == FP8 and SCALED:
            num_groups = (num_in + GROUP - 1) // GROUP
            factor = tl.load(x_scale_ptr + rows * num_groups + start // GROUP)
        else:
            factor = tl.full((BLOCK_M,), 1.0, tl.float32)
    return x, x_high, factor


@triton.jit
def scale_offsets(
    outputs: tl.tensor,
    first: tl.tensor,
    half: tl.tensor,
    half_size: tl.tensor,
    num_in: tl.tensor,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """Return the offsets of the scales of outputs first .. of a matrix half, for the first inputs.

    In FP8 that is one offset, because a tile's outputs are always in one block of 128.
    """
    if FORMAT == FP8:
        half_blocks = (half_size + GROUP - 1) // GROUP
        num_groups = (num_in + GROUP - 1) // GROUP
        places = (half * half_blocks + first // GROUP) * num_groups
    else:
        places = half * half_size + outputs
    return places


@triton.jit
def load_scales(
    scale_ptr: tl.tensor,
    places: tl.tensor,
    start: tl.tensor,
    num_in: tl.tensor,
    scale_stride: tl.tensor,
    FORMAT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return scales, or steps and lowest numbers, of inputs start ..; past the end the last ones.

    MXFP4 has the exponents of four groups of 32 inputs in the bytes of a word.

    Loops load those of the next block of inputs before they multiply one, since a load is only
    waited for when it is converted. PLAIN has none.
    """
    step, low = 0.0, 0.0
    if FORMAT != PLAIN:
        scale_ptr += tl.minimum(start, num_in - 1) // GROUP * scale_stride
        step = tl.load(scale_ptr + places)
        if FORMAT != FP8 and FORMAT < MXFP4:
            low = tl.load(scale_ptr + scale_stride // 2 + places)
    return step, low


@triton.jit
def multiply_tile(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    rows: tl.tensor,
    weight_ptr: tl.tensor,
    outputs: tl.tensor,
    scale_ptr: tl.tensor,
    scales: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    num_in: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    scale_stride: tl.tensor,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return the fp32 sums [BLOCK_M, BLOCK_N] over the inputs begin .. end of rows and outputs.

    `scales` are the offsets of `scale_offsets`.
    """
    if SWAP:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    step, low = load_scales(scale_ptr, scales, begin, num_in, scale_stride, FORMAT)
    for start in range(begin, end, BLOCK_K):
        x, x_high, factor = load_block(
            x_ptr, x_scale_ptr, rows, x_stride, start, num_in, FORMAT, SCALED, EVEN, BLOCK_M,
            BLOCK_K,
        )  # fmt: skip
        after = load_scales(scale_ptr, scales, start + BLOCK_K, num_in, scale_stride, FORMAT)
        sums = add_block(
            sums, x, x_high, factor, weight_ptr, outputs, step, low,
            start, num_in, weight_stride, FORMAT, SWAP, EVEN, BLOCK_K,
        )  # fmt: skip
        step, low = after
    if SWAP:
        sums = tl.trans(sums)
    return sums


@triton.jit
def units_of(
    gate: tl.tensor,
    up: tl.tensor,
    IS_SWIGLU: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
) -> tl.tensor:
    """Return the hidden units of gates and ups in fp32; see `ExpertActivation`."""
    if IS_SWIGLU:
        units = gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        units = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + OFFSET)
    return units


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def gate_up_tile(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    units_ptr: tl.tensor,
    unit_scale_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.tensor,
    H: tl.tensor,
    F: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    scale_stride: tl.tensor,
    num_tiles: tl.tensor,
    num_blocks: tl.tensor,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    E_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    K: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    P_PAD: tl.constexpr,
) -> None:
    """Write the hidden units of BLOCK_M pairs and BLOCK_N units to units [P, F]."""
    tile, block = place(num_tiles, num_blocks, GROUP_M)
    if P_PAD:
        if tl.program_id(0) == 0:
            count_few(slots_ptr, counts_ptr, num_pairs, E, E_PAD, P_PAD)
        expert, pairs, is_pair = find_few(slots_ptr, num_pairs, E, tile, BLOCK_M, P_PAD)
        rows = (pairs // K).to(tl.int64)
    else:
        expert, begin, end = find_tile(offsets_ptr, E, tile, BLOCK_M, E_PAD)
        pairs = begin + tl.arange(0, BLOCK_M)
        is_pair = pairs < end
        rows = tl.load(row_of_ptr + pairs, mask=is_pair, other=0)
    if expert >= E:
        return
    units = block * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the last unit that unit is computed again, instead of a mask.
    outputs = tl.minimum(units, F - 1)
    weight_ptr = _address(table_ptr, 4 * expert, WEIGHT)
    scale_ptr = _address(table_ptr, 4 * expert + 1, SCALE)
    gate_places = scale_offsets(outputs, block * BLOCK_N, 0, F, H, FORMAT)
    up_places = scale_offsets(outputs, block * BLOCK_N, 1, F, H, FORMAT)
    if SWAP:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    gate_step, gate_low = load_scales(scale_ptr, gate_places, 0, H, scale_stride, FORMAT)
    up_step, up_low = load_scales(scale_ptr, up_places, 0, H, scale_stride, FORMAT)
    for start in range(0, H, BLOCK_K):
        x, x_high, factor = load_block(
            x_ptr, x_scale_ptr, rows, x_stride, start, H, FORMAT, True, EVEN, BLOCK_M, BLOCK_K
        )
        after = start + BLOCK_K
        next_gate = load_scales(scale_ptr, gate_places, after, H, scale_stride, FORMAT)
        next_up = load_scales(scale_ptr, up_places, after, H, scale_stride, FORMAT)
        gate = add_block(
            gate, x, x_high, factor, weight_ptr, outputs, gate_step, gate_low,
            start, H, weight_stride, FORMAT, SWAP, EVEN, BLOCK_K,
        )  # fmt: skip
        up = add_block(
            up, x, x_high, factor, weight_ptr, outputs + F, up_step, up_low,
            start, H, weight_stride, FORMAT, SWAP, EVEN, BLOCK_K,
        )  # fmt: skip
        gate_step, gate_low = next_gate
        up_step, up_low = next_up
    if HAS_BIAS:
        places = bias_ptr + expert * 2 * F + outputs
        ones = tl.full((BLOCK_M,), 1.0, tl.float32)
        gate += _spread(ones, tl.load(places), SWAP)
        up += _spread(ones, tl.load(places + F), SWAP)
    result = units_of(gate, up, IS_SWIGLU, ALPHA, OFFSET, LIMIT)
    if SWAP:
        result = tl.trans(result)
    is_real = is_pair[:, None] & (units < F)[None, :]
    if FORMAT == FP8:
        scale = tl.maximum(tl.max(tl.abs(result), axis=1), 1e-10) / 448.0
        result = result / scale[:, None]
        tl.store(unit_scale_ptr + pairs * num_blocks + block, scale, mask=is_pair)
    places = units_ptr + pairs.to(tl.int64)[:, None] * F + units[None, :]
    tl.store(places, rounded(result, units_ptr.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def down_tile(
    units_ptr: tl.tensor,
    unit_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    order_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.tensor,
    H: tl.tensor,
    F: tl.tensor,
    weight_stride: tl.tensor,
    scale_stride: tl.tensor,
    num_tiles: tl.tensor,
    num_blocks: tl.tensor,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    E_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    P_PAD: tl.constexpr,
) -> None:
    """Write the weighted results of BLOCK_M pairs and BLOCK_N outputs to parts [P, H]."""
    tile, block = place(num_tiles, num_blocks, GROUP_M)
    if P_PAD:
        expert, pairs, is_pair = find_few(slots_ptr, num_pairs, E, tile, BLOCK_M, P_PAD)
        order = pairs.to(tl.int64)
        rows = order
    else:
        expert, begin, end = find_tile(offsets_ptr, E, tile, BLOCK_M, E_PAD)
        pairs = begin + tl.arange(0, BLOCK_M)
        is_pair = pairs < end
        order = tl.load(order_ptr + pairs, mask=is_pair, other=0)
        rows = tl.minimum(pairs, end - 1).to(tl.int64)
    if expert >= E:
        return
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.minimum(columns, H - 1)
    weight_ptr = _address(table_ptr, 4 * expert + 2, WEIGHT)
    scale_ptr = _address(table_ptr, 4 * expert + 3, SCALE)
    scales = scale_offsets(outputs, block * BLOCK_N, 0, H, F, FORMAT)
    sums = multiply_tile(
        units_ptr, unit_scale_ptr, rows, weight_ptr, outputs, scale_ptr, scales, 0, F, F,
        F, weight_stride, scale_stride, FORMAT, True, SWAP, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias_ptr + expert * H + outputs)[None, :]
    weights = tl.load(weights_ptr + order, mask=is_pair, other=0.0)
    places = parts_ptr + order[:, None] * H + columns[None, :]
    is_real = is_pair[:, None] & (columns < H)[None, :]
    tl.store(places, rounded(sums * weights[:, None], parts_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def sum_choices(
    parts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    H: tl.tensor,
    out_stride: tl.tensor,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Add the parts of a row's choices on this node, by ascending choice in fp32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(K):
        is_here = (tl.load(slots_ptr + row * K + k) >= 0) & (columns < H)
        part = tl.load(parts_ptr + (row * K + k) * H + columns, mask=is_here, other=0.0)
        total += part.to(tl.float32)
    places = out_ptr + row * out_stride + columns
    tl.store(places, rounded(total, out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit
def quantise_groups(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    H: tl.tensor,
    x_stride: tl.tensor,
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    """Write GROUPS groups of 128 numbers of a row as fp8, each scaled by its greatest magnitude."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < H, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-10) / 448.0
    tl.store(scale_ptr + row * num_groups + groups, scale, mask=groups < num_groups)
    codes = rounded(x / scale[:, None], codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * H + columns, codes, mask=columns < H)
