"""Compressed rows: close to the original, exact at codes, and an error instead of a bad number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2n_comm.net import ExpertBatch
from m2n_comm.payload import LARGEST, pack_rows, unpack_rows
from tests.m2n_comm.harness import (
    Collected,
    Rows,
    Transport,
    fleet_of,
    make_shape,
    make_ticket,
    mixed_rows,
    rally,
)
from tests.pairwise import cover_pairs
from topspin.messages import StepTicket

CODES = (torch.float8_e4m3fn, torch.int8)


def through_wire(rows: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """Pack and unpack `rows`."""
    values = torch.empty(rows.shape, dtype=code)
    scales = torch.empty(rows.shape[0], 1)
    scratch = torch.empty(rows.shape)
    pack_rows(rows, values, scales, scratch)
    out = torch.empty_like(rows)
    unpack_rows(values, scales, out, scratch)
    return out


def nearest_code(rows: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """Return the nearest representable rows, by a search over all 256 codes."""
    table = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(code).double()
    table = table[table.isfinite() & (table.abs() <= LARGEST[code])]
    scale = rows.double().abs().amax(1, keepdim=True) / LARGEST[code]
    distance = (rows.double()[:, :, None] / scale[:, :, None] - table).abs()
    return table[distance.argmin(dim=2)] * scale


@pytest.mark.parametrize("code", CODES)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-12, 12))
@settings(max_examples=25)
def test_every_element_becomes_a_nearest_code(code: torch.dtype, seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, 33, generator=generator) * 2.0**exponent
    got, best = through_wire(rows, code).double(), nearest_code(rows, code)
    error, least = (got - rows).abs(), (best - rows).abs()
    # Ties and the fp32 rounding of the scale may give the neighbouring code.
    assert (error <= least * (1 + 1e-4) + rows.abs().amax() * 1e-6).all()


@pytest.mark.parametrize("code", CODES)
def test_zeros_stay_zero_and_what_is_not_finite_becomes_nan(code: torch.dtype) -> None:
    rows = torch.ones(4, 6)
    rows[0] = 0
    rows[1, 3] = float("nan")
    rows[2, 0] = -float("inf")
    got = through_wire(rows, code)
    assert torch.equal(got[0], torch.zeros(6))
    assert got[1].isnan().all()
    assert got[2].isnan().all()
    assert torch.equal(got[3], torch.ones(6))


@pytest.mark.parametrize("code", CODES)
def test_a_row_does_not_depend_on_its_companions(code: torch.dtype) -> None:
    rows = torch.randn(9, 40).to(torch.bfloat16)
    alone = torch.cat([through_wire(row[None], code) for row in rows])
    assert torch.equal(through_wire(rows, code), alone)


@pytest.mark.parametrize(
    ("topology", "transport", "code"), cover_pairs(((1, 1), (3, 2)), ("local", "shm", "tcp"), CODES)
)
def test_sums_equal_the_dense_reference_of_the_compressed_rows(
    transport: Transport, topology: tuple[int, int], code: torch.dtype
) -> None:
    m, n = topology
    shape = make_shape(payload=torch.bfloat16, compressed=code, compute=torch.float32)
    everyone = tuple(range(m))
    tickets = [make_ticket(s, participants=everyone, m=1 + s % 4) for s in range(1, 5)]
    rows_of = mixed_rows(shape)
    results: Collected = {}

    def seen(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        hidden, experts, weights = rows_of(ticket, index, layer, mb)
        return Rows(through_wire(hidden.float(), code), experts, weights)

    with fleet_of(transport, m, n, shape=shape) as fleet:
        assert fleet.run(tickets, rally(rows_of, results)) == {}
        fleet.check_sums(results, seen, rtol=1e-2)
    assert any(len(out) > shape.window_rows for out in results.values())


@pytest.mark.parametrize(("payload", "compute"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_experts_get_rows_in_the_dtype_that_they_compute_in(payload: str, compute: str) -> None:
    shape = make_shape(payload=getattr(torch, payload), compute=getattr(torch, compute))
    seen: list[torch.dtype] = []

    def serve(batch: ExpertBatch) -> torch.Tensor:
        seen.append(batch.hidden.dtype)
        return batch.hidden * 2

    hidden = torch.arange(48.0).view(2, 24)
    rows = Rows(hidden, torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.ones(2, 3))
    with fleet_of("local", shape=shape, serves=[serve]) as fleet:
        results: Collected = {}
        assert fleet.run([make_ticket(1)], rally(lambda *_: rows, results)) == {}
    assert seen == [getattr(torch, compute)] * 2
    assert all(torch.equal(out, hidden * 2) for out in results.values())
