"""Biases and activations of routed experts in compiled kernels.

Owns the words of a kernel's block that say what is added and how units are made of sums, its
"form", and the steps that follow it. Experts without biases and with SwiGLU have kernels of their
own, which know none. Used by
`kernels.cpu.compiled.matmul.experts` and `kernels.cpu.compiled.matmul.quantised_experts`, inside
compiled functions only but for `form_words`. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.contracts import PackedExperts
from kernels.cpu.compiled.runtime import float_word, inlined
from kernels.cpu.simd.lanes import LANES, read_f32
from kernels.cpu.simd.vectors import (
    add,
    div,
    exp,
    load_f32,
    load_first_f32,
    maximum,
    mul,
    splat,
    store_f32,
    sub,
)

GATE_UP_BIAS, DOWN_BIAS, IS_SWIGLU, ALPHA, OFFSET, LIMIT = range(0, 48, 8)
"""The words of a form; the addresses of f32[E, 2F] and f32[E, H] are 0 without biases."""


def has_form(experts: PackedExperts) -> bool:
    """Return whether experts need the kernel that reads a form."""
    return experts.biases is not None or not experts.activation.is_swiglu


def form_words(experts: PackedExperts) -> tuple[int, ...]:
    """Return the last arguments of a kernel: the experts' form, nothing if it reads none."""
    if not has_form(experts):
        return ()
    activation = experts.activation
    gate_up, down = (0, 0) if experts.biases is None else (x.data_ptr() for x in experts.biases)
    if activation.is_swiglu:
        return (gate_up, down, 1, 0, 0, 0)
    numbers = (activation.alpha, activation.offset, activation.limit)
    return (gate_up, down, 0, *map(float_word, numbers))


@inlined
def add_bias(
    sums: int, row_bytes: int, count: int, bias: int, num_outputs: int, width: int
) -> None:
    """Add the first `num_outputs` numbers at `bias` to `width` sums of each of `count` rows.

    `width` is a multiple of LANES; behind num_outputs nothing is read and 0 is added.
    """
    for column in range(0, width, LANES):
        numbers = load_first_f32(bias + 4 * column, num_outputs - column)
        for row in range(count):
            place = sums + row * row_bytes + 4 * column
            store_f32(place, add(load_f32(place), numbers))


@inlined
def clamped_units(form: int, gate: Any, up: Any) -> Any:
    """Return the units of LANES gates and ups by the activation of the form at address `form`."""
    zeros, limit = splat(np.float32(0)), splat(read_f32(form + LIMIT))
    lowest = sub(zeros, limit)
    # There is no minimum: of two numbers it is the maximum of their negatives. NaN stays NaN.
    gate = sub(zeros, maximum(sub(zeros, gate), lowest))
    up = maximum(sub(zeros, maximum(sub(zeros, up), lowest)), lowest)
    decay = exp(mul(sub(zeros, splat(read_f32(form + ALPHA))), gate))
    silu = div(gate, add(splat(np.float32(1)), decay))
    return mul(silu, add(up, splat(read_f32(form + OFFSET))))
