"""Experts packed one by one: what implementations share when they pack and exchange slots.

Knows no layout and no format: an implementation passes its own functions as a `Packing`. Used by
the implementations of `kernels.dispatch.Ops`. Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

import torch

from kernels.contracts import Biases, ExpertMatrices, LinearWeight, Matrix, PackedExperts
from topspin.expert_activation import ExpertActivation
from topspin.plan.precision import UNQUANTISED, Format

Pack = Callable[[Matrix, Format], LinearWeight]
Collect = Callable[[list[LinearWeight], list[LinearWeight], torch.dtype], PackedExperts]
"""Makes experts of gate_up and down by slot; the dtype is the unpacked matrices'."""


class Packing(NamedTuple):
    """How an implementation packs an expert's two matrices, and collects packed experts."""

    gate_up: Pack
    down: Pack
    collect: Collect


def pack_slots(
    packing: Packing,
    gate_up: Iterable[Matrix],
    down: Iterable[Matrix],
    formats: Sequence[Format] | None,
    biases: Biases | None,
    activation: ExpertActivation,
) -> PackedExperts:
    """Pack experts one matrix after the other; see `kernels.reference.pack_experts`."""
    firsts, dtype = _pack_each(packing.gate_up, gate_up, formats)
    seconds, _ = _pack_each(packing.down, down, formats)
    return packing.collect(firsts, seconds, dtype).completed(biases, activation)


def _pack_each(
    pack: Pack, matrices: Iterable[Matrix], formats: Sequence[Format] | None
) -> tuple[list[LinearWeight], torch.dtype]:
    """Return packed matrices and the dtype that they had."""
    packed: list[LinearWeight] = []
    dtype = torch.float32
    for matrix in matrices:
        dtype = matrix.dtype
        packed.append(pack(matrix, UNQUANTISED if formats is None else formats[len(packed)]))
        # Before a generator makes the next one: two would be in memory.
        del matrix
    assert formats is None or len(formats) == len(packed), f"{len(formats)} formats"
    return packed, dtype


def rebuild_slots(
    packing: Packing, experts: PackedExperts, slots: Sequence[int | ExpertMatrices]
) -> Generator[None, None, PackedExperts]:
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
    rebuilt = packing.collect(gate_up, down, experts.dtype)
    return rebuilt.completed(rebuild_biases(experts, slots), experts.activation)


def rebuild_biases(experts: PackedExperts, slots: Sequence[int | ExpertMatrices]) -> Biases | None:
    """Return the biases of experts whose slots change as in `rebuild_experts`."""
    if experts.biases is None:
        return None
    gate_up, down = map(list, experts.biases)
    firsts, seconds = [], []
    for source in slots:
        own = (gate_up[source], down[source]) if isinstance(source, int) else source.biases
        assert own is not None
        firsts.append(own[0].float())
        seconds.append(own[1].float())
    return torch.stack(firsts), torch.stack(seconds)


def collect_experts(
    gate_up: list[LinearWeight],
    down: list[LinearWeight],
    dtype: torch.dtype,
    kind: type[PackedExperts] = PackedExperts,
) -> PackedExperts:
    """Join packed matrices to experts of a `kind`, checking that their shapes agree."""
    assert gate_up, "no expert"
    assert len(gate_up) == len(down), f"{len(gate_up)} gate_up, {len(down)} down"
    ffn_size, hidden_size = down[0].in_features, down[0].out_features
    for first, second in zip(gate_up, down, strict=True):
        assert (first.out_features, first.in_features) == (2 * ffn_size, hidden_size)
        assert (second.out_features, second.in_features) == (hidden_size, ffn_size)
    return kind(gate_up, down, len(gate_up), hidden_size, ffn_size, dtype)


def check_expert(experts: PackedExperts, matrices: ExpertMatrices) -> None:
    """Assert that an expert's matrices fit among packed experts."""
    gate_up, down = matrices.gate_up, matrices.down
    assert gate_up.shape == (2 * experts.ffn_size, experts.hidden_size), tuple(gate_up.shape)
    assert down.shape == (experts.hidden_size, experts.ffn_size), tuple(down.shape)
    assert gate_up.dtype == down.dtype == experts.dtype, f"{gate_up.dtype}, {down.dtype}"
    assert (matrices.biases is None) == (experts.biases is None), "biases of some experts only"
