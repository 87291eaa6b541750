"""Experts packed one by one: what implementations share when they pack and exchange slots.

Knows no layout and no format: an implementation passes its own functions as a `Packing`. Used by
the implementations of `kernels.dispatch.Ops`. Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contracts import ExpertMatrices, ExpertWeights, LinearWeight
from topspin.precision import UNQUANTISED, Format

Pack = Callable[[Tensor, Format], LinearWeight]
Collect = Callable[[list[LinearWeight], list[LinearWeight], torch.dtype], ExpertWeights]
"""Makes experts of gate_up and down by slot; the dtype is the unpacked matrices'."""


class Packing(NamedTuple):
    """How an implementation packs an expert's two matrices, and collects packed experts."""

    gate_up: Pack
    down: Pack
    collect: Collect


def pack_slots(
    packing: Packing,
    gate_up: Iterable[Tensor],
    down: Iterable[Tensor],
    formats: Sequence[Format] | None,
) -> ExpertWeights:
    """Pack experts one matrix after the other; see `kernels.reference.pack_experts`."""
    dtype = torch.float32
    firsts = []
    for matrix, weight_format in _with_formats(gate_up, formats):
        dtype = matrix.dtype
        firsts.append(packing.gate_up(matrix, weight_format))
    seconds = [packing.down(*each) for each in _with_formats(down, formats)]
    return packing.collect(firsts, seconds, dtype)


def _with_formats(
    matrices: Iterable[Tensor], formats: Sequence[Format] | None
) -> Iterable[tuple[Tensor, Format]]:
    if formats is None:
        return zip(matrices, repeat(UNQUANTISED), strict=False)
    return zip(matrices, formats, strict=True)


def rebuild_slots(
    packing: Packing, experts: ExpertWeights, slots: Sequence[int | ExpertMatrices]
) -> Generator[None, None, ExpertWeights]:
    """Implement `kernels.reference.rebuild_experts` for experts packed by slot."""
    gate_up: list[LinearWeight] = []
    down: list[LinearWeight] = []
    for source in slots:
        if isinstance(source, int):
            gate_up.append(experts.gate_up[source])
            down.append(experts.down[source])
            continue
        check_expert(experts, source)
        gate_up.append(packing.gate_up(source.gate_up, source.weight_format))
        yield
        down.append(packing.down(source.down, source.weight_format))
        yield
    return packing.collect(gate_up, down, experts.dtype)


def collect_experts(
    gate_up: list[LinearWeight],
    down: list[LinearWeight],
    dtype: torch.dtype,
    kind: type[ExpertWeights] = ExpertWeights,
) -> ExpertWeights:
    """Join packed matrices to experts of a `kind`, checking that their shapes agree."""
    assert gate_up, "no expert"
    assert len(gate_up) == len(down), f"{len(gate_up)} gate_up, {len(down)} down"
    ffn_size, hidden_size = down[0].in_features, down[0].out_features
    for first, second in zip(gate_up, down, strict=True):
        assert (first.out_features, first.in_features) == (2 * ffn_size, hidden_size)
        assert (second.out_features, second.in_features) == (hidden_size, ffn_size)
    return kind(gate_up, down, len(gate_up), hidden_size, ffn_size, dtype)


def check_expert(experts: ExpertWeights, matrices: ExpertMatrices) -> None:
    """Assert that an expert's matrices fit among packed experts."""
    gate_up, down = matrices.gate_up, matrices.down
    assert gate_up.shape == (2 * experts.ffn_size, experts.hidden_size), tuple(gate_up.shape)
    assert down.shape == (experts.hidden_size, experts.ffn_size), tuple(down.shape)
    assert gate_up.dtype == down.dtype == experts.dtype, f"{gate_up.dtype}, {down.dtype}"
