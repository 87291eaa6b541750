"""The routed experts' MLPs of few bf16 rows, compiled: one call that reads only needed weights.

Groups the rows by expert, and reads only the weights of experts that have rows. First
it computes all hidden units, 64 units of one expert per task; then the sums over experts, 64
outputs of all rows per task. Results do not depend on the number of threads. Knows no model;
used by `kernels.cpu.matmul`. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.contracts import ExpertOutput, PackedExperts
from kernels.cpu.compiled.matmul.linear import block_width
from kernels.cpu.compiled.matmul.units import (
    DOWN_BIAS,
    GATE_UP_BIAS,
    IS_SWIGLU,
    add_bias,
    clamped_units,
    form_words,
    has_form,
)
from kernels.cpu.compiled.runtime import (
    Kernel,
    inlined,
    is_recording,
    launch,
    offsets,
)
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.matmul import (
    SUM_BYTES,
    TASK_OUTPUTS,
    multiply,
    padded,
    second_half,
    task_bytes,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

MAX_ROWS: Final = 128
MAX_PAIRS: Final = 1024
MAX_EXPERTS: Final = 512
_VECTOR: Final = 4 * simd.LANES

(
    HIDDEN, HIDDEN_STRIDE, SLOTS, WEIGHTS, NUM_TOKENS, TOP_K, EXPERTS, NUM_EXPERTS, HIDDEN_SIZE,
    FFN_SIZE, DOWN_INPUTS, WIDTH, UNITS, COUNTS, RESULT, RESULT_STRIDE, RESULT_IS_BF16, FORM,
) = offsets(18)  # fmt: skip
"""The arguments of `_experts`. DOWN_INPUTS is the width I of the matrix that contains DOWN; FORM
is the first word of the experts' form: the last arguments, of `_formed_experts` only."""


def with_addresses(experts: PackedExperts) -> PackedExperts:
    """Add the addresses that `mlp_of_rows` needs, if it supports the layout of the weights."""
    weights = [*experts.gate_up, *experts.down]
    num_experts, ffn_size = experts.num_experts, experts.ffn_size
    known = all(weight.address for weight in weights)
    if not known or ffn_size % TASK_OUTPUTS or num_experts > MAX_EXPERTS:
        return replace(experts, addresses=None)
    step = 2 * ffn_size * padded(experts.hidden_size)
    rows = []
    for slot in range(num_experts):
        if experts.joined:
            gate = experts.gate_up[0].address + slot * step
            # Inside a block of outputs the inputs of one expert are contiguous.
            down = experts.down[0].address + slot * 2 * ffn_size * block_width()
            rows.append((gate, gate + num_experts * step, down))
        else:
            gate = experts.gate_up[slot].address
            rows.append((gate, gate + step, experts.down[slot].address))
    return replace(experts, addresses=torch.tensor(rows, dtype=torch.int64))


def can_run(hidden: Tensor, slots: Tensor, weights: Tensor, out: Tensor) -> bool:
    """Return whether `mlp_of_rows` takes this batch."""
    return (
        0 < hidden.shape[0] <= MAX_ROWS
        and slots.numel() <= MAX_PAIRS
        and hidden.dtype == torch.bfloat16
        and out.dtype in (torch.bfloat16, torch.float32)
        and hidden.stride(1) == out.stride(1) == 1
        and slots.dtype == torch.int32
        and weights.dtype == torch.float32
        and slots.is_contiguous()
        and weights.is_contiguous()
    )


def mlp_of_rows(
    hidden: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts, out: Tensor
) -> ExpertOutput:
    """Sum each row's experts to out [R, H]; see `kernels.reference.grouped_mlp`.

    A row's experts are added by ascending slot.
    """
    assert experts.addresses is not None
    num_experts, ffn_size = experts.num_experts, experts.ffn_size
    units = torch.empty(slots.numel(), ffn_size, dtype=torch.bfloat16)
    # The last entry counts slots beyond the last expert.
    counts = torch.empty(num_experts + 1, dtype=torch.int64)
    arguments = (
        hidden.data_ptr(),
        2 * hidden.stride(0),
        slots.data_ptr(),
        weights.data_ptr(),
        hidden.shape[0],
        slots.shape[1],
        experts.addresses.data_ptr(),
        num_experts,
        hidden.shape[1],
        ffn_size,
        experts.down[0].in_features,
        block_width(),
        units.data_ptr(),
        counts.data_ptr(),
        out.data_ptr(),
        out.stride(0) * out.itemsize,
        int(out.dtype == torch.bfloat16),
        *form_words(experts),
    )
    kernel = _formed_experts if has_form(experts) else _experts
    launch(kernel, arguments, num_threads=torch.get_num_threads())
    # Replays do not look: their slots come from tables and checked frames.
    assert is_recording() or not int(counts[-1]), f"a slot is not below num_experts {num_experts}"
    return ExpertOutput(out, counts[:-1])


_row_list = simd.stack(8 * MAX_ROWS)
_sums = simd.stack(MAX_ROWS * SUM_BYTES)
_totals = simd.stack(MAX_ROWS * SUM_BYTES)
_groups = simd.stack(8 * (MAX_PAIRS + 2 * MAX_EXPERTS + 1))


@inlined
def _group(block: int, groups: int) -> int:
    """List the pairs (token * TOP_K + choice) of each expert; return the number of busy experts.

    Writes to `groups` the index of each expert's first pair, NUM_EXPERTS + 1 numbers, then the
    experts that have pairs, NUM_EXPERTS numbers of which the first are defined, then the pairs.
    """
    num_experts, slots = simd.read_i64(block + NUM_EXPERTS), simd.read_i64(block + SLOTS)
    num_pairs = simd.read_i64(block + NUM_TOKENS) * simd.read_i64(block + TOP_K)
    for expert in range(num_experts + 1):
        simd.write_i64(groups + 8 * expert, 0)
    for pair in range(num_pairs):
        slot = simd.read_i32(slots + 4 * pair)
        if 0 <= slot < num_experts:
            count = groups + 8 * (slot + 1)
            simd.write_i64(count, simd.read_i64(count) + 1)
    total = 0
    for expert in range(num_experts + 1):
        total += simd.read_i64(groups + 8 * expert)
        simd.write_i64(groups + 8 * expert, total)
    pairs = groups + 8 * (2 * num_experts + 1)
    # Each expert's first index moves to its end, which is the next expert's first index.
    for pair in range(num_pairs):
        slot = simd.read_i32(slots + 4 * pair)
        if 0 <= slot < num_experts:
            place = simd.read_i64(groups + 8 * slot)
            simd.write_i64(pairs + 8 * place, pair)
            simd.write_i64(groups + 8 * slot, place + 1)
    for expert in range(num_experts, 0, -1):
        simd.write_i64(groups + 8 * expert, simd.read_i64(groups + 8 * (expert - 1)))
    simd.write_i64(groups, 0)
    num_busy = 0
    for expert in range(num_experts):
        if simd.read_i64(groups + 8 * expert) < simd.read_i64(groups + 8 * (expert + 1)):
            simd.write_i64(groups + 8 * (num_experts + 1 + num_busy), expert)
            num_busy += 1
    return num_busy


@inlined
def _busy_expert(block: int, groups: int, idx: int) -> int:
    expert: int = simd.read_i64(groups + 8 * (simd.read_i64(block + NUM_EXPERTS) + 1 + idx))
    return expert


@inlined
def _place_of(block: int, expert: int, matrix: int) -> int:
    """Return the address of an expert's gate (0), up (1) or down (2) matrix."""
    place: int = simd.read_i64(simd.read_i64(block + EXPERTS) + 24 * expert + 8 * matrix)
    return place


@inlined
def _count_wrong(block: int) -> int:
    """Count the slots beyond the last expert; they are left out like negative ones."""
    slots, wrong = simd.read_i64(block + SLOTS), 0
    for pair in range(simd.read_i64(block + NUM_TOKENS) * simd.read_i64(block + TOP_K)):
        if simd.read_i32(slots + 4 * pair) >= simd.read_i64(block + NUM_EXPERTS):
            wrong += 1
    return wrong


@inlined
def _compute_units(
    block: int,
    task: int,
    following: int,
    groups: int,
    rows: int,
    gates: int,
    ups: int,
    form: int,
) -> None:
    """Write 64 hidden units of all rows of an expert.

    The experts that have rows are in turn; `following` is the task that this thread does next.
    """
    parts = simd.read_i64(block + FFN_SIZE) // TASK_OUTPUTS
    part, expert = task % parts, _busy_expert(block, groups, task // parts)
    begin, end = simd.read_i64(groups + 8 * expert), simd.read_i64(groups + 8 * (expert + 1))
    pairs = groups + 8 * (2 * simd.read_i64(block + NUM_EXPERTS) + 1)
    top_k, hidden_size = simd.read_i64(block + TOP_K), simd.read_i64(block + HIDDEN_SIZE)
    ffn_size = simd.read_i64(block + FFN_SIZE)
    offset, width = part * task_bytes(hidden_size), simd.read_i64(block + WIDTH)
    gate_weight = _place_of(block, expert, 0) + offset
    up_weight = _place_of(block, expert, 1) + offset
    ahead = _place_of(block, _busy_expert(block, groups, following // parts), 0)
    ahead += following % parts * task_bytes(hidden_size)
    gate_second = second_half(gate_weight, hidden_size, TASK_OUTPUTS)
    up_second = second_half(up_weight, hidden_size, TASK_OUTPUTS)
    bias = simd.read_i64(form + GATE_UP_BIAS) if form else 0
    is_swiglu = simd.read_i64(form + IS_SWIGLU) if form else 1
    gate_bias = bias + 4 * (2 * expert * ffn_size + part * TASK_OUTPUTS)
    up_bias = gate_bias + 4 * ffn_size
    for first in range(begin, end, MAX_ROWS):
        count = min(end - first, MAX_ROWS)
        for idx in range(count):
            token = simd.read_i64(pairs + 8 * (first + idx)) // top_k
            address = simd.read_i64(block + HIDDEN) + token * simd.read_i64(block + HIDDEN_STRIDE)
            simd.write_i64(rows + 8 * idx, address)
        num_pairs, outputs = hidden_size // 2, TASK_OUTPUTS
        multiply(rows, count, gate_weight, gate_second, up_weight, width, num_pairs, outputs, gates)
        multiply(rows, count, up_weight, up_second, ahead, width, num_pairs, outputs, ups)
        if bias:
            add_bias(gates, SUM_BYTES, count, gate_bias, TASK_OUTPUTS, TASK_OUTPUTS)
            add_bias(ups, SUM_BYTES, count, up_bias, TASK_OUTPUTS, TASK_OUTPUTS)
        for idx in range(count):
            units = simd.read_i64(block + UNITS) + 2 * ((first + idx) * ffn_size)
            unit = units + 2 * part * TASK_OUTPUTS
            if is_swiglu:
                _write_swiglu(gates + idx * SUM_BYTES, ups + idx * SUM_BYTES, unit)
            else:
                _write_clamped(form, gates + idx * SUM_BYTES, ups + idx * SUM_BYTES, unit)


@inlined
def _write_swiglu(gates: int, ups: int, units: int) -> None:
    """Write 64 units, silu(gate) * up."""
    one = vectors.splat(np.float32(1))
    for column in range(0, TASK_OUTPUTS, simd.LANES):
        gate = vectors.round_bf16(vectors.load_f32(gates + 4 * column))
        up = vectors.round_bf16(vectors.load_f32(ups + 4 * column))
        decay = vectors.exp(vectors.sub(vectors.splat(np.float32(0)), gate))
        silu = vectors.round_bf16(vectors.div(gate, vectors.add(one, decay)))
        vectors.store_bf16(units + 2 * column, vectors.mul(silu, up))


@inlined
def _write_clamped(form: int, gates: int, ups: int, units: int) -> None:
    """Write 64 units by the activation of a form."""
    for column in range(0, TASK_OUTPUTS, simd.LANES):
        gate = vectors.round_bf16(vectors.load_f32(gates + 4 * column))
        up = vectors.round_bf16(vectors.load_f32(ups + 4 * column))
        vectors.store_bf16(units + 2 * column, clamped_units(form, gate, up))


@inlined
def _sum_outputs(
    block: int,
    part: int,
    num_busy: int,
    groups: int,
    rows: int,
    sums: int,
    totals: int,
    form: int,
) -> None:
    """Write 64 outputs of all tokens: their experts' results times the routing weights."""
    num_tokens, num_experts = simd.read_i64(block + NUM_TOKENS), simd.read_i64(block + NUM_EXPERTS)
    ffn_size, hidden_size = simd.read_i64(block + FFN_SIZE), simd.read_i64(block + HIDDEN_SIZE)
    pairs = groups + 8 * (2 * num_experts + 1)
    zeros = vectors.splat(np.float32(0))
    for place in range(0, num_tokens * SUM_BYTES, _VECTOR):
        vectors.store_f32(totals + place, zeros)
    down_inputs, width = simd.read_i64(block + DOWN_INPUTS), simd.read_i64(block + WIDTH)
    offset, outputs = part * task_bytes(down_inputs), hidden_size - part * TASK_OUTPUTS
    bias = simd.read_i64(form + DOWN_BIAS) if form else 0
    for idx in range(num_busy):
        expert = _busy_expert(block, groups, idx)
        begin, end = simd.read_i64(groups + 8 * expert), simd.read_i64(groups + 8 * (expert + 1))
        weight = _place_of(block, expert, 2) + offset
        second = second_half(weight, down_inputs, outputs)
        following = _busy_expert(block, groups, min(idx + 1, num_busy - 1))
        ahead = _place_of(block, following, 2) + offset
        for first in range(begin, end, MAX_ROWS):
            count = min(end - first, MAX_ROWS)
            for row in range(count):
                unit = simd.read_i64(block + UNITS) + 2 * ((first + row) * ffn_size)
                simd.write_i64(rows + 8 * row, unit)
            multiply(rows, count, weight, second, ahead, width, ffn_size // 2, outputs, sums)
            if bias:
                place = bias + 4 * (expert * hidden_size + part * TASK_OUTPUTS)
                add_bias(sums, SUM_BYTES, count, place, outputs, TASK_OUTPUTS)
            for row in range(count):
                pair = simd.read_i64(pairs + 8 * (first + row))
                scale = vectors.splat(simd.read_f32(simd.read_i64(block + WEIGHTS) + 4 * pair))
                total = totals + pair // simd.read_i64(block + TOP_K) * SUM_BYTES
                for place in range(0, SUM_BYTES, _VECTOR):
                    given = vectors.round_bf16(vectors.load_f32(sums + row * SUM_BYTES + place))
                    added = vectors.fma(given, scale, vectors.load_f32(total + place))
                    vectors.store_f32(total + place, added)
    first = part * TASK_OUTPUTS
    last = min(first + TASK_OUTPUTS, hidden_size)
    for token in range(num_tokens):
        result = simd.read_i64(block + RESULT) + token * simd.read_i64(block + RESULT_STRIDE)
        for begin in range(first, last, simd.LANES):
            total_lanes = vectors.load_f32(totals + token * SUM_BYTES + 4 * (begin - first))
            if simd.read_i64(block + RESULT_IS_BF16):
                vectors.store_first_bf16(result + 2 * begin, total_lanes, last - begin)
            else:
                vectors.store_first_f32(result + 4 * begin, total_lanes, last - begin)


@Kernel
def _experts(block: int) -> None:
    _sum_experts(block, 0)


@Kernel
def _formed_experts(block: int) -> None:
    _sum_experts(block, block + FORM)


@inlined
def _sum_experts(block: int, form: int) -> None:
    """Compute units, then sums; `form` is the form's address, 0 for SwiGLU without biases."""
    rows, sums, totals, groups = _row_list(), _sums(), _totals(), _groups()
    num_experts = simd.read_i64(block + NUM_EXPERTS)
    # Every thread groups the pairs itself: faster than waiting for another thread.
    num_busy = _group(block, groups)
    num_tasks = num_busy * (simd.read_i64(block + FFN_SIZE) // TASK_OUTPUTS)
    task = claim_task(block, 0)
    while task < num_tasks:
        # Claimed early, so that its weights can be prefetched.
        following = claim_task(block, 0)
        ahead = following if following < num_tasks else task
        _compute_units(block, task, ahead, groups, rows, sums, totals, form)
        finish_task(block, 0)
        task = following
    wait_for_tasks(block, 0, num_tasks)
    parts = (simd.read_i64(block + HIDDEN_SIZE) + TASK_OUTPUTS - 1) // TASK_OUTPUTS
    task = claim_task(block, 1)
    if task == 0:
        for expert in range(num_experts):
            begin = simd.read_i64(groups + 8 * expert)
            count = simd.read_i64(groups + 8 * (expert + 1)) - begin
            simd.write_i64(simd.read_i64(block + COUNTS) + 8 * expert, count)
        simd.write_i64(simd.read_i64(block + COUNTS) + 8 * num_experts, _count_wrong(block))
    while task < parts:
        _sum_outputs(block, task, num_busy, groups, rows, sums, totals, form)
        finish_task(block, 1)
        task = claim_task(block, 1)
    wait_for_tasks(block, 1, parts)
