"""Choose the implementation of all ops, once, when a node starts.

`Ops` is the interface that the nodes are coded against; `kernels.reference`,
`kernels.cpu.ops` and `kernels.deterministic` satisfy it as modules, `kernels.triton.ops` with a
class. Only the chosen one is imported: a host without Triton or without numba can use the
others. Has no arithmetic and detects no hardware: the configuration names kernels and device.
Called by the nodes' start-up.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from importlib.util import find_spec
from typing import Final, Protocol

import torch
from torch import Tensor

from kernels.contracts import (
    AttentionMeta,
    Biases,
    ExpertMatrices,
    ExpertOutput,
    HeadMatrices,
    HeadRows,
    KeyCodes,
    LinearWeight,
    Matrix,
    PackedExperts,
    Routing,
    RoutingRule,
)
from kernels.sampling import SampleResult, SamplingBatch
from topspin.errors import ConfigError
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import KERNEL_FORMATS, UNQUANTISED, Format

__all__ = ["Ops", "select_ops"]

NAMES: Final = ("cpu", "deterministic", "reference", "triton")


class Ops(Protocol):
    """All ops; `kernels.reference` documents shapes, units and rounding of each."""

    @property
    def name(self) -> str:
        """The name of this implementation in `select_ops`."""

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

    def rotate_and_store(self, heads: HeadRows) -> None: ...

    def attend_prompt(self, q: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor: ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMeta,
        *,
        scale: float,
        sliding_window: int | None = None,
        sinks: Tensor | None = None,
        codes: KeyCodes | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def pack_linear(self, weight: Matrix, weight_format: Format = UNQUANTISED) -> LinearWeight: ...

    def linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def pack_heads(self, weight: Tensor) -> HeadMatrices: ...

    def multiply_heads(
        self, x: Tensor, weight: HeadMatrices, *, out: Tensor | None = None
    ) -> Tensor: ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor: ...

    def swiglu(self, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor: ...

    def route(self, logits: Tensor, rule: RoutingRule) -> Routing: ...

    def pack_experts(
        self,
        gate_up: Iterable[Matrix],
        down: Iterable[Matrix],
        *,
        formats: Sequence[Format] | None = None,
        share_per_row: float = 0.0,
        biases: Biases | None = None,
        activation: ExpertActivation = SWIGLU,
    ) -> PackedExperts: ...

    def rebuild_experts(
        self, experts: PackedExperts, slots: Sequence[int | ExpertMatrices]
    ) -> Generator[None, None, PackedExperts]: ...

    def grouped_mlp(
        self,
        hidden: Tensor,
        slots: Tensor,
        weights: Tensor,
        experts: PackedExperts,
        *,
        out: Tensor | None = None,
    ) -> ExpertOutput: ...

    def add_counts(self, totals: Tensor, counts: Tensor) -> None: ...

    def code_keys(
        self,
        k_cache: Tensor,
        slots: Tensor,
        centroids: Tensor,
        codes: Tensor,
        *,
        num_iterations: int | None,
    ) -> None:
        """Code keys in the cache; see `kernels.retrieval.code_keys`."""

    def selected_keys(self, q: Tensor, codes: KeyCodes, meta: AttentionMeta, idx: int) -> Tensor:
        """Return what a sequence selected; see `kernels.retrieval.selected_keys`."""

    def sample(
        self, logits: Tensor, batch: SamplingBatch, *, num_top_logprobs: int | None = None
    ) -> SampleResult:
        """Choose a token per row of logits [R, V]; see `kernels.sampling.sample`.

        The batch's tensors are on the host, the result's on the logits' device.
        """


def select_ops(
    name: str, dtype: torch.dtype, formats: Collection[Format] = (), device: str = "cpu"
) -> Ops:
    """Return the ops called "cpu", "deterministic", "triton", or "reference" (any device).

    `formats` are the quantised formats that weights will be packed in; without any no code for
    them is imported. `device` is that of the tensors: "cpu", "cuda" or "cuda:N". Raises
    ConfigError for an unknown name, or a dtype, format or device that the ops do not support.
    """
    if name not in NAMES:
        raise ConfigError(f"no kernels called {name!r}; choose one of: {', '.join(NAMES)}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"kernels compute in float32 or bfloat16, not in {dtype}")
    for asked in formats:
        if asked not in KERNEL_FORMATS.get(name, ()):
            known = "; ".join(f"{key} have {', '.join(has)}" for key, has in KERNEL_FORMATS.items())
            raise ConfigError(f"the kernels {name} have no weights in {asked}; {known}")
    if name == "triton":
        return _triton_ops(device)
    if name in ("cpu", "deterministic") and device != "cpu":
        raise ConfigError(f"kernels {name} do not run on {device}: use the kernels triton there")
    if formats:
        from kernels.cpu.quantised import QuantisedOps

        return QuantisedOps()
    if name == "cpu":
        from kernels.cpu import ops as cpu

        return cpu
    if name == "deterministic":
        from kernels import deterministic

        return deterministic
    from kernels import reference

    return reference


def _triton_ops(device: str) -> Ops:
    if find_spec("triton") is None:
        raise ConfigError(
            "kernels triton: the Python package triton is not installed; torch's builds "
            "for GPUs bring it (pip install triton, in the version that torch names)"
        )
    from kernels.triton.ops import TritonOps, check_device

    check_device(device)
    return TritonOps()
