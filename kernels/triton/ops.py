"""Ops for a GPU: Triton's kernels, and torch's matrix products.

Collects them to the interface of `kernels.dispatch.Ops`. No op waits for the device or reads a
tensor on the host (except packing, and `sample`, whose batch is on the host), so a whole decode
step can be in a CUDA graph. Padding rows of a micro-batch may hold anything: rows with a negative
slot are not stored, attention of rows without a query is 0, negative expert slots are skipped.

A layer of a decode step is 12 launches where one node has the experts: add and norm, qkv
product, rotation and KV write, attention, output product, add and norm, router product, choice
of experts, their slots, gate_up, down, sum. One more joins the splits of contexts beyond 256
positions, one groups more than 64 pairs, and quantised products of few rows add their splits.
Sequences that select their keys have an attention of their own, behind the scores of coded keys,
torch's topk, and the lists of the selected ones.

Called by the nodes through `kernels.dispatch`; runs on host tensors only under Triton's
interpreter, for tests. Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Final

import torch
import triton
from torch import Tensor

from kernels import reference
from kernels.contracts import (
    Biases,
    ExpertMatrices,
    ExpertOutput,
    HeadRows,
    LinearWeight,
    Matrix,
    PackedExperts,
)
from kernels.experts.mixed import MixedExperts, mixed_mlp
from kernels.experts.slots import pack_slots, rebuild_slots
from kernels.retrieval import code_keys, selected_keys
from kernels.triton.attention.launches import paged_attention
from kernels.triton.counts import add_counts
from kernels.triton.grouped_mlp.launches import grouped_mlp
from kernels.triton.grouped_mlp.weights import (
    PACKING,
    GpuExperts,
    pack_weight,
)
from kernels.triton.linear.launches import linear
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotate_and_store
from kernels.triton.router.launches import route
from kernels.triton.sampling import launches as triton_sampling
from kernels.triton.swiglu import swiglu
from kernels.triton.toolchain import check_toolchain
from topspin.errors import ConfigError
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import UNQUANTISED, Format


def check_device(device: str) -> None:
    """Raise ConfigError if Triton's kernels cannot run on "cpu", "cuda" or "cuda:N" here."""
    if device == "cpu" and not triton.knobs.runtime.interpret:
        raise ConfigError(
            "kernels triton on the CPU: they are for GPUs; choose --attention-device and "
            "--expert-device cuda, or use the kernels cpu (for tests, TRITON_INTERPRET=1 "
            "in the environment lets Triton interpret them, slowly)"
        )
    if device != "cpu" and triton.knobs.runtime.interpret:
        raise ConfigError(
            f"kernels triton on {device}: TRITON_INTERPRET=1 is in the environment, and "
            "interpreted kernels cannot use a GPU's memory; unset it"
        )
    if device != "cpu":
        check_toolchain()


class TritonOps:
    """Satisfies Ops; see `kernels.reference` for shapes, units and rounding of each."""

    name: Final = "triton"

    add_counts = staticmethod(add_counts)
    code_keys = staticmethod(code_keys)
    selected_keys = staticmethod(selected_keys)
    rms_norm = staticmethod(rms_norm)
    paged_attention = staticmethod(paged_attention)
    linear = staticmethod(linear)
    attend_prompt = staticmethod(reference.attend_prompt)
    pack_heads = staticmethod(reference.pack_heads)
    multiply_heads = staticmethod(reference.multiply_heads)
    swiglu = staticmethod(swiglu)
    route = staticmethod(route)
    sample = staticmethod(triton_sampling.sample)

    def embed(self, tokens: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Look up tokens i64[T] in table [V, H]; returns [T, H]."""
        if out is None:
            return torch.index_select(table, 0, tokens)
        return torch.index_select(table, 0, tokens, out=out)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        *,
        eps: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """Add x [T, H] to residual [T, H] in place and return rms_norm of the sum."""
        return add_rms_norm(x, residual, weight, eps=eps, out=out)

    def rotate_and_store(self, heads: HeadRows) -> None:
        """Norm, rotate and store; rows with a negative slot are not stored."""
        rotate_and_store(*heads[:8], q_norm=heads.q_norm, k_norm=heads.k_norm, eps=heads.eps)

    def pack_linear(self, weight: Matrix, weight_format: Format = UNQUANTISED) -> LinearWeight:
        """Pack a weight [O, I] on its device; unquantised it is unchanged."""
        return pack_weight(weight, weight_format)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply x [R, H] by sigmoid(gate [R, 1]) in place and return it."""
        return x.mul_(torch.sigmoid(gate))

    def pack_experts(
        self,
        gate_up: Iterable[Matrix],
        down: Iterable[Matrix],
        *,
        formats: Sequence[Format] | None = None,
        share_per_row: float = 0.0,
        biases: Biases | None = None,
        activation: ExpertActivation = SWIGLU,
    ) -> PackedExperts:
        """Pack E experts one matrix after the other; see `kernels.reference.pack_experts`.

        There is one layout, whatever `share_per_row`.
        """
        return pack_slots(PACKING, gate_up, down, formats, biases, activation)

    def rebuild_experts(
        self, experts: PackedExperts, slots: Sequence[int | ExpertMatrices]
    ) -> Generator[None, None, PackedExperts]:
        """Return experts with some slots changed; see `kernels.reference.rebuild_experts`."""
        return rebuild_slots(PACKING, experts, slots)

    def grouped_mlp(
        self,
        hidden: Tensor,
        slots: Tensor,
        weights: Tensor,
        experts: PackedExperts,
        *,
        out: Tensor | None = None,
    ) -> ExpertOutput:
        """Sum each row's local experts; see `kernels.reference.grouped_mlp`."""
        if isinstance(experts, MixedExperts):
            return mixed_mlp(hidden, slots, weights, experts, out=out, grouped_mlp=self.grouped_mlp)
        assert isinstance(experts, GpuExperts)
        return grouped_mlp(hidden, slots, weights, experts, out=out)
