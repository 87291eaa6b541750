"""Entries of the router, the grouped MLP, sampling and M2N: their work, and that they run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_kernels.grouped_mlp import (
    GOALS,
    QWEN3_30B,
    Layer,
    expert_bytes,
    mlp_entry,
    mlp_work,
    random_experts,
)
from benchmarks.gpu_kernels.m2n import (
    Exchange,
    Service,
    exchange_entry,
    exchange_work,
    service_entry,
    service_work,
)
from benchmarks.gpu_kernels.router import Router, routed_work, router_entries
from benchmarks.gpu_kernels.sampling import SETTINGS, sampling_entry
from kernels.triton.grouped_mlp.weights import FORMATS, GpuWeight


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_router(device: torch.device) -> None:
    # Logits; experts and weights; slots; order and rows; counts and offsets.
    wanted = 3 * 6 * 2 + 6 * (8 + 4) + 6 * 4 + 6 * 16 + 8 * (6 + 7)
    assert routed_work(3, Router(6, 2)).num_bytes == wanted
    for entry in router_entries(3, Router(6, 2), device):
        assert entry.work.num_bytes > 0
        entry.call(0)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_an_expert_has_the_bytes_of_its_tensors(weight_format: str, device: torch.device) -> None:
    layer = Layer(2, 1, 200, 72)
    experts = random_experts(layer, weight_format, device)
    size = 0
    for weight in (experts.gate_up[1], experts.down[1]):
        assert isinstance(weight, GpuWeight)
        size += weight.data.nbytes + (0 if weight.scales is None else weight.scales.nbytes)
    assert expert_bytes(layer, weight_format) == size


def test_mlp_work() -> None:
    layer = Layer(10, 2, 8, 4)
    work = mlp_work(3, 5, layer, "plain")
    assert work.num_bytes == 5 * 3 * 8 * 4 * 2 + 3 * 8 * 2 * 2
    # Three products of two operations per weight, for six pairs.
    assert work.flops == 6 * 3 * 2 * 8 * 4


def test_the_goals_are_on_the_shape_that_they_were_set_for() -> None:
    assert GOALS == {32: 0.75, 8192: 0.65}
    assert QWEN3_30B == (128, 8, 2048, 768)


def test_calls_go_through_other_experts(device: torch.device) -> None:
    layer = Layer(8, 2, 32, 16)
    experts = random_experts(layer, "plain", device)
    entry = mlp_entry(1, layer, experts, device, cache_bytes=5 * expert_bytes(layer, "plain"))
    assert entry.work == mlp_work(1, 2, layer, "plain")
    assert entry.copies == 3
    touched = [entry.call(idx).counts.nonzero()[:, 0].tolist() for idx in range(4)]
    assert touched[3] == touched[0]
    assert len({tuple(experts) for experts in touched}) == 3


@pytest.mark.parametrize("name", SETTINGS)
def test_sampling(name: str, device: torch.device) -> None:
    entry = sampling_entry(name, 2, 50, device)
    assert entry.work.num_bytes == 2 * 50 * 4 + 2 * 8
    tokens = entry.call(0).tokens
    assert ((tokens >= 0) & (tokens < 50)).all()


@pytest.mark.parametrize(
    ("wire", "row_bytes"), [(torch.bfloat16, 2 * 20), (torch.float8_e4m3fn, 20 + 4)]
)
def test_m2n(wire: torch.dtype, row_bytes: int, device: torch.device) -> None:
    exchange = Exchange(3, 20, 6, 2, 2, wire)
    # Rows, experts and weights; what is sent to nodes; answers; sums.
    wanted = 3 * (20 * 2 + 2 * 12) + 5 * (row_bytes + 2 * 8) + 5 * 20 * 2 + 3 * 20 * 4
    assert exchange_work(exchange, 5).num_bytes == wanted
    entry = exchange_entry(exchange, device)
    for idx in range(2):
        assert not entry.call(idx).any(), "answers of zeros add up to zeros, and none was late"


@pytest.mark.parametrize(
    ("wire", "row_bytes"), [(torch.bfloat16, 2 * 20), (torch.float8_e4m3fn, 20 + 4)]
)
def test_m2n_of_an_expert_node(wire: torch.dtype, row_bytes: int, device: torch.device) -> None:
    service = Service(2, 3, 20, 2, 2, wire)
    # What comes, once read and once written, with slots and weights; sums, likewise.
    wanted = 4 * (row_bytes + 20 * 2 + 2 * 2 * 8) + 4 * 20 * 2 * 2
    assert service_work(service).num_bytes == wanted
    entry = service_entry(service, device)
    for idx in range(2):
        assert entry.call(idx).shape == (6, 20)
