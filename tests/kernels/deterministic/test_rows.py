"""A row's bits: the same alone and among others, at any place, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import deterministic, reference
from kernels.contracts import ExpertMatrices, LinearWeight, RoutingRule
from kernels.cpu.plain import rotate
from tests.kernels.cases.matrices import values_then_pairs
from tests.kernels.cases.ops import CLAMPED
from tests.kernels.generators import finish
from tests.pairwise import slow_rows
from topspin.expert_activation import SWIGLU, ExpertActivation

DTYPES = (torch.float32, torch.bfloat16)
# (outputs, inputs) of: the default model, Qwen3-MoE of the benchmarks, the tests' models.
SHAPES = (
    *((960, 576), (576, 576), (16, 576), (384, 576), (576, 192)),
    *((1536, 1024), (1024, 1024), (32, 1024), (1024, 512)),
    *((128, 64), (8, 64), (64, 48), (288, 64), (1, 64), (13, 37)),
)
MAX_ROWS = 40


def check_rows(
    op: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, *, examples: int = 5
) -> None:
    """Compare one row's result alone with its result at any place among any others."""
    generator = torch.Generator().manual_seed(width)
    pool = torch.randn(MAX_ROWS, width, generator=generator).to(dtype)
    row = torch.randn(width, generator=generator).to(dtype)
    torch.set_num_threads(1)
    alone = op(row[None])[0]

    @settings(max_examples=examples, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        num_rows = data.draw(st.integers(1, MAX_ROWS))
        place = data.draw(st.integers(0, num_rows - 1))
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        x = pool[:num_rows].clone()
        x[place] = row
        assert torch.equal(op(x)[place], alone)

    check()


@pytest.mark.parametrize(("dtype", "shape"), values_then_pairs(DTYPES, SHAPES))
def test_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_out, num_in = shape
    weight, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
    packed = deterministic.pack_linear(weight)
    check_rows(lambda x: deterministic.linear(x, packed, bias), num_in, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_linear_thoroughly(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    packed = deterministic.pack_linear(torch.randn(num_out, num_in).to(dtype))
    check_rows(lambda x: deterministic.linear(x, packed), num_in, dtype, examples=100)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_in", [576, 1024])
def test_language_model_head(num_in: int, dtype: torch.dtype) -> None:
    packed = deterministic.pack_linear(torch.randn(49152, num_in).to(dtype))
    check_rows(lambda x: deterministic.linear(x, packed), num_in, dtype, examples=20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_in", [64, 576])
def test_linear_without_prepacked_weights(num_in: int, dtype: torch.dtype) -> None:
    """Without torch's prepacking, grouping the rows must be enough."""
    weight = LinearWeight(torch.randn(96, num_in).to(dtype), 96, num_in, packed=False)
    check_rows(lambda x: deterministic.linear(x, weight), num_in, dtype)


@pytest.mark.parametrize(("dtype", "width"), values_then_pairs(DTYPES, [2, 37, 192, 576, 1536]))
def test_element_by_element_and_row_by_row(width: int, dtype: torch.dtype) -> None:
    norm, other = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    check_rows(lambda x: deterministic.sigmoid_gate(x.clone(), x[:, :1]), width, dtype)
    check_rows(deterministic.swiglu, 2 * width, dtype)
    check_rows(lambda x: deterministic.rms_norm(x, norm, eps=1e-6), width, dtype)
    check_rows(
        lambda x: deterministic.add_rms_norm(
            x, other.expand(len(x), -1).clone().float(), norm, eps=1e-6
        ),
        width,
        dtype,
    )


@pytest.mark.parametrize(
    ("dtype", "shape"), values_then_pairs(DTYPES, [(8, 2), (16, 8), (32, 4), (128, 8)])
)
def test_router(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_experts, top_k = shape

    def route(x: Tensor) -> Tensor:
        routing = deterministic.route(x, RoutingRule(top_k, renormalise=True))
        return torch.cat((routing.experts.float(), routing.weights), dim=1)

    check_rows(route, num_experts, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(9, 64), (4, 8)])
def test_norm_of_heads_inside_wider_rows_and_rotation(
    heads: int, dim: int, dtype: torch.dtype
) -> None:
    norm, angles = torch.randn(dim).to(dtype), torch.randn(dim // 2)

    def prepare(x: Tensor) -> Tensor:
        q = x[:, : heads * dim].reshape(-1, heads, dim)
        k = x[:, heads * dim :].reshape(-1, 1, dim)
        q = deterministic.rms_norm(q, norm, eps=1e-6)
        k = deterministic.rms_norm(k, norm, eps=1e-6)
        cos, sin = (f(angles).expand(len(x), -1) for f in (torch.cos, torch.sin))
        rotate(q, k, cos, sin)
        return torch.cat((q, k), dim=1).flatten(1)

    check_rows(prepare, (heads + 1) * dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [288, 49152])
def test_log_probabilities(vocab_size: int, dtype: torch.dtype) -> None:
    check_rows(lambda x: x.float().log_softmax(-1), vocab_size, dtype)


def random_slots(num_rows: int, top_k: int, num_experts: int, *, share: float) -> Tensor:
    slots = torch.rand(num_rows, num_experts).argsort(1)[:, :top_k].int()
    return torch.where(torch.rand(num_rows, top_k) < share, slots, -1).int()


@pytest.mark.parametrize(
    ("dtype", "num_rows", "share"), values_then_pairs(DTYPES, [0, 1, 5, 70], [0.0, 0.4, 1.0])
)
def test_pairs_follow_the_reference(share: float, num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    gate_up, down = (torch.randn(s).mul(0.2).to(dtype) for s in ((6, 26, 20), (6, 20, 13)))
    hidden, slots = torch.randn(num_rows, 20).to(dtype), random_slots(num_rows, 3, 6, share=share)
    experts = deterministic.pack_experts(gate_up, down, share_per_row=0.9)
    plain = reference.pack_experts(gate_up, down)
    rows, counts = deterministic.pair_mlp(hidden, slots, experts)
    wanted = [
        reference.dense_mlp(hidden[row][None], plain.gate_up[slot], plain.down[slot])[0]
        for row in range(num_rows)
        for slot in slots[row].tolist()
        if slot >= 0
    ]
    assert rows.dtype == dtype
    assert rows.shape == (len(wanted), 20)
    if wanted:
        torch.testing.assert_close(rows, torch.stack(wanted))
    assert torch.equal(counts, reference.permute(slots, 6).counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden_size", "ffn_size"),
    slow_rows([(16, 8, 576, 192)], beside=[(8, 2, 64, 32)]),
)
def test_a_pair_among_others(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    ffn_size: int,
    activation: ExpertActivation,
    dtype: torch.dtype,
) -> None:
    """Neither the other rows nor the slot of an expert changes a pair's result."""
    torch.manual_seed(4)
    gate_up = torch.randn(num_experts, 2 * ffn_size, hidden_size).mul(0.05).to(dtype)
    down = torch.randn(num_experts, hidden_size, ffn_size).mul(0.05).to(dtype)
    biases = torch.randn(num_experts, 2 * ffn_size), torch.randn(num_experts, hidden_size)
    from_last = biases[0].flip(0), biases[1].flip(0)
    experts = deterministic.pack_experts(gate_up, down, biases=biases, activation=activation)
    turned = deterministic.pack_experts(
        gate_up.flip(0), down.flip(0), biases=from_last, activation=activation
    )
    first = ExpertMatrices(gate_up[0], down[0], biases=(biases[0][0], biases[1][0]))
    turned = finish(deterministic.rebuild_experts(turned, [first, *range(1, num_experts)]))
    row = torch.randn(hidden_size).to(dtype)
    alone, _ = deterministic.pair_mlp(row[None], torch.tensor([[0]]).int(), experts)
    pool = torch.randn(MAX_ROWS, hidden_size).to(dtype)

    @settings(max_examples=5, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        num_rows = data.draw(st.integers(1, MAX_ROWS))
        place, choice = data.draw(st.integers(0, num_rows - 1)), data.draw(st.integers(0, 1))
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        hidden = pool[:num_rows].clone()
        hidden[place] = row
        slots = random_slots(num_rows, top_k, num_experts, share=0.7)
        slots[place] = torch.where(slots[place] == 0, -1, slots[place])
        slots[place, choice] = 0
        rank = int((slots.view(-1)[: place * top_k + choice] >= 0).sum())
        for each in (experts, turned):
            result, _ = deterministic.pair_mlp(hidden, slots, each)
            assert torch.equal(result[rank], alone[0])

    check()
