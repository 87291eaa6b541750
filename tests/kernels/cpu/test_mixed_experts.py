"""Experts of several formats in one layer: the sum of the groups' own results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import ExpertMatrices, ExpertWeights, LinearWeight
from kernels.cpu import ops as cpu
from kernels.cpu.quantised import QuantisedOps, QuantisedWeight, dequantise
from kernels.mixed_experts import MixedExperts
from tests.kernels.cpu.test_matmul import unpacked
from tests.kernels.generators import finish
from tests.kernels.matrices import values_then_pairs
from topspin.plan.precision import Format

FORMATS: list[Format] = ["int4", "none", "int8", "int4", "none", "int8"]
HIDDEN, WIDTH = 64, 64  # whole groups of 32, so that no half has padding


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(len(FORMATS), 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    return gate_up.to(dtype), (torch.randn(len(FORMATS), HIDDEN, WIDTH) / WIDTH**0.5).to(dtype)


def rows(num_rows: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows; the last one has no expert here."""
    slots = torch.randint(-1, num_experts, (num_rows, 3), dtype=torch.int32)
    slots[-1:] = -1
    return torch.randn(num_rows, HIDDEN).to(dtype), slots, torch.rand(num_rows, 3)


def meant(weight: LinearWeight) -> Tensor:
    """Return the matrix that a weight represents, in fp32."""
    if isinstance(weight, QuantisedWeight):
        return dequantise(weight)
    return unpacked(weight).float()


def plain(experts: ExpertWeights) -> ExpertWeights:
    return reference.pack_experts(map(meant, experts.gate_up), map(meant, experts.down))


@pytest.mark.parametrize(
    ("dtype", "num_rows"), values_then_pairs([torch.float32, torch.bfloat16], [0, 1, 9, 200])
)
def test_a_mixed_layer_is_the_sum_of_its_groups(num_rows: int, dtype: torch.dtype) -> None:
    ops = QuantisedOps()
    gate_up, down = draw(dtype)
    experts = ops.pack_experts(gate_up, down, formats=FORMATS)
    assert [weight.weight_format for weight in experts.down] == FORMATS
    hidden, slots, weights = rows(num_rows, len(FORMATS), dtype)
    found = ops.grouped_mlp(hidden, slots, weights, experts, out=torch.empty(num_rows, HIDDEN))
    total = torch.zeros(num_rows, HIDDEN)
    counts = torch.zeros(len(FORMATS), dtype=torch.int64)
    for is_quantised in (False, True):
        mine = [slot for slot, kept in enumerate(FORMATS) if (kept != "none") == is_quantised]
        formats = [FORMATS[slot] for slot in mine]
        alone = ops.pack_experts(gate_up[mine], down[mine], formats=formats)
        assert not isinstance(alone, MixedExperts)
        place = torch.full((len(FORMATS) + 1,), -1, dtype=torch.int32)
        place[mine] = torch.arange(len(mine), dtype=torch.int32)
        part = ops.grouped_mlp(
            hidden, place[slots.long()], weights, alone, out=torch.empty(num_rows, HIDDEN)
        )
        total += part.out
        counts[mine] = part.counts
    assert torch.equal(found.out, total)
    assert torch.equal(found.counts, counts)
    narrow = ops.grouped_mlp(hidden, slots, weights, experts)
    assert narrow.out.dtype == dtype
    assert torch.equal(narrow.out, total.to(dtype))
    if num_rows:
        wanted = reference.grouped_mlp(hidden.float(), slots, weights, plain(experts))
        assert torch.equal(found.counts, wanted.counts)
        # Quantised products round their rows to 8 bits.
        assert (found.out - wanted.out).norm() <= 0.02 * wanted.out.norm()
        assert not found.out[-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rebuilt_experts_keep_the_formats(dtype: torch.dtype) -> None:
    """From one format to several and back; unchanged slots share their memory."""
    ops = QuantisedOps()
    gate_up, down = draw(dtype)

    def new(expert: int) -> ExpertMatrices:
        return ExpertMatrices(gate_up[expert], down[expert], FORMATS[expert])

    held = [0, 3]
    experts = ops.pack_experts(gate_up[held], down[held], formats=["int4", "int4"])
    for order in ([3, 4, 5, 0], [4, 2, 5], [1, 4], [4], [0, 4]):
        sources = [held.index(e) if e in held else new(e) for e in order]
        changed = finish(ops.rebuild_experts(experts, sources))
        kept = [(slot, held.index(e)) for slot, e in enumerate(order) if e in held]
        assert all(changed.down[new].data is experts.down[old].data for new, old in kept)
        held, experts = order, changed
        formats = [FORMATS[e] for e in held]
        fresh = ops.pack_experts(gate_up[held], down[held], formats=formats)
        batch = rows(9, len(held), dtype)
        ours, theirs = (ops.grouped_mlp(*batch, each) for each in (experts, fresh))
        assert torch.equal(ours.out, theirs.out)
        assert torch.equal(ours.counts, theirs.counts)
        kinds = {each != "none" for each in formats}
        assert isinstance(experts, MixedExperts) == (len(kinds) > 1)


def test_one_format_is_what_its_own_ops_make() -> None:
    gate_up, down = draw(torch.bfloat16)
    batch = rows(5, len(FORMATS), torch.bfloat16)
    ours = QuantisedOps().pack_experts(gate_up, down, share_per_row=0.5)
    theirs = cpu.pack_experts(gate_up, down, share_per_row=0.5)
    assert ours.joined == theirs.joined
    assert torch.equal(
        QuantisedOps().grouped_mlp(*batch, ours).out, cpu.grouped_mlp(*batch, theirs).out
    )
