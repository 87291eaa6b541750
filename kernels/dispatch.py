"""Choose the implementation of all ops, once, when a node starts.

`Ops` is the interface that the nodes are coded against; `kernels.reference`,
`kernels.cpu` and `kernels.deterministic` satisfy it as modules. Holds no arithmetic and
detects nothing by itself: the configuration names the device. Called by the nodes'
start-up.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from kernels import cpu, deterministic, reference
from kernels.contracts import (
    AttentionMeta,
    ExpertMatrices,
    ExpertOutput,
    ExpertWeights,
    LinearWeight,
    Permutation,
    Routing,
)
from kernels.quantised import BITS, QuantisedOps
from topspin.errors import ConfigError

__all__ = ["UNQUANTISED", "Ops", "select_ops"]

UNQUANTISED: Final = "none"


class Ops(Protocol):
    """Every op; `kernels.reference` documents shapes, units and rounding of each."""

    @property
    def name(self) -> str:
        """Name by which `select_ops` knows this implementation."""

    def embed(self, tokens: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor: ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None
    ) -> Tensor: ...

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        *,
        eps: float,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None: ...

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None: ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMeta,
        *,
        scale: float,
        sliding_window: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def pack_linear(self, weight: Tensor) -> LinearWeight: ...

    def pack_projection(self, weight: Tensor) -> LinearWeight:
        """Pack, as `pack_linear`, one of the matrices that --quantization covers."""

    def pack_lm_head(self, weight: Tensor) -> LinearWeight:
        """Pack, as `pack_linear`, the LM head, which --quantization keeps in 8 bits."""

    def linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def sigmoid(self, x: Tensor, *, out: Tensor | None = None) -> Tensor: ...

    def swiglu(self, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor: ...

    def dense_mlp(
        self,
        x: Tensor,
        gate_up: LinearWeight,
        down: LinearWeight,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def route(
        self,
        logits: Tensor,
        *,
        top_k: int,
        renormalise: bool,
        weights_dtype: torch.dtype = torch.float32,
    ) -> Routing: ...

    def permute(self, slots: Tensor, num_experts: int) -> Permutation: ...

    def pack_experts(
        self, gate_up: Iterable[Tensor], down: Iterable[Tensor], *, share_per_row: float = 0.0
    ) -> ExpertWeights: ...

    def rebuild_experts(
        self, experts: ExpertWeights, slots: Sequence[int | ExpertMatrices]
    ) -> Generator[None, None, ExpertWeights]: ...

    def grouped_mlp(
        self,
        hidden: Tensor,
        slots: Tensor,
        weights: Tensor,
        experts: ExpertWeights,
        *,
        out: Tensor | None = None,
    ) -> ExpertOutput: ...


def select_ops(device: str, dtype: torch.dtype, quantization: str = UNQUANTISED) -> Ops:
    """Give the ops for `device`: "cpu", "deterministic", or "reference" (any device).

    With a `quantization` ("int8", "int4"; only for "cpu"), projections and experts are
    packed and computed in so many bits. Raises ConfigError for a device without kernels, a
    dtype they do not compute in, or a quantization they do not have.
    """
    implementations: dict[str, Ops] = {
        "cpu": cpu,
        "deterministic": deterministic,
        "reference": reference,
    }
    if device not in implementations:
        known = ", ".join(sorted(implementations))
        raise ConfigError(f"no kernels for device {device!r}; choose one of: {known}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"kernels compute in float32 or bfloat16, not in {dtype}")
    if quantization == UNQUANTISED:
        return implementations[device]
    if quantization not in BITS or device != "cpu":
        raise ConfigError(
            f"no kernels for quantization {quantization!r} on {device!r}; on 'cpu' there are "
            f"{', '.join(BITS)}"
        )
    return QuantisedOps(cpu, quantization)
