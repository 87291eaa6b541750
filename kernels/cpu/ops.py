"""Ops for hosts without a GPU: few torch calls per layer, with the reference's rounding.

Collects the CPU versions to the interface of `kernels.dispatch.Ops`: matrix products from
`kernels.cpu.matmul`, attention from `kernels.cpu.attention`, the small ops from
`kernels.cpu.compiled.layer` for bf16 and else from `kernels.cpu.plain`, and ops that are fast in
plain torch from `kernels.reference`. Called by the nodes through `kernels.dispatch`.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from kernels import reference
from kernels.contracts import HeadRows, Routing, RoutingRule
from kernels.cpu import plain as cpu_plain
from kernels.cpu.attention import paged_attention, selected_keys
from kernels.cpu.compiled import layer as numba_layer
from kernels.cpu.compiled import rows as numba_rows
from kernels.cpu.compiled.retrieval.codebooks import code_keys
from kernels.cpu.compiled.rows import add_counts
from kernels.cpu.matmul import (
    grouped_mlp,
    linear,
    multiply_heads,
    pack_experts,
    pack_heads,
    pack_linear,
    rebuild_experts,
)
from kernels.cpu.padded_groups import attend_prompt
from kernels.cpu.sampling import sample
from kernels.reference import embed

__all__ = [
    "add_counts",
    "add_rms_norm",
    "attend_prompt",
    "code_keys",
    "embed",
    "grouped_mlp",
    "linear",
    "multiply_heads",
    "name",
    "pack_experts",
    "pack_heads",
    "pack_linear",
    "paged_attention",
    "rebuild_experts",
    "rms_norm",
    "rotate_and_store",
    "route",
    "sample",
    "selected_keys",
    "sigmoid_gate",
    "swiglu",
]

name: Final = "cpu"


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise each row of x [..., H] and scale it; see `kernels.reference.rms_norm`."""
    if numba_layer.can_norm(None, x, weight, out):
        return numba_layer.add_norm(None, x, weight, eps=eps, out=out)
    return cpu_plain.rms_norm(x, weight, eps=eps, out=out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add x [T, H] to residual [T, H] in place and return rms_norm of the sum."""
    if numba_layer.can_norm(x, residual, weight, out):
        return numba_layer.add_norm(x, residual, weight, eps=eps, out=out)
    return cpu_plain.add_rms_norm(x, residual, weight, eps=eps, out=out)


def rotate_and_store(heads: HeadRows) -> None:
    """Norm, rotate and store; see `kernels.reference.rotate_and_store`."""
    if numba_layer.can_rotate(heads):
        numba_layer.rotate_and_store(heads)
    else:
        cpu_plain.rotate_and_store(heads)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x [R, H] by sigmoid(gate [R, 1]) in place; see `kernels.reference.sigmoid_gate`."""
    if numba_rows.can_gate(x, gate):
        return numba_rows.gate_rows(x, gate)
    return reference.sigmoid_gate(x, gate)


def swiglu(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up [R, F] of gate_up [R, 2F]; see `kernels.reference.swiglu`."""
    if out is None and numba_rows.can_activate(gate_up):
        return numba_rows.activate(gate_up)
    return reference.swiglu(gate_up, out=out)


def route(logits: Tensor, rule: RoutingRule) -> Routing:
    """Choose the experts of each row; see `kernels.reference.route`."""
    if numba_layer.can_route(logits, rule):
        return Routing(*numba_layer.route_rows(logits, rule))
    return reference.route(logits, rule)
