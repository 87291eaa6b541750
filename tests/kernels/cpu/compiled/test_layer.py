"""The compiled small ops of a layer: rows that are no numbers, ties, and what kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts import HeadRows, RoutingRule
from kernels.cpu import ops as cpu
from kernels.cpu.compiled.layer import MAX_EXPERTS, can_norm, can_rotate, can_route
from kernels.cpu.compiled.rows import can_activate, can_gate


def test_norms_of_numbers_that_are_none() -> None:
    x = torch.randn(3, 40).bfloat16()
    x[1, 5] = float("nan")
    result = cpu.rms_norm(x, torch.ones(40).bfloat16(), eps=1e-5)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


def test_equal_logits_and_no_numbers_give_different_experts() -> None:
    logits = torch.zeros(3, 8).bfloat16()
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    result = cpu.route(logits, RoutingRule(4, renormalise=True))
    assert result.experts[0].tolist() == [0, 1, 2, 3]
    for row in result.experts.tolist():
        assert len(set(row)) == 4
        assert all(0 <= expert < 8 for expert in row)
    assert result.weights[1:].isnan().any(-1).all(), "the row is not told to be wrong"
    torch.testing.assert_close(result.weights[0], torch.full((4,), 0.25))


def test_what_the_kernels_do_not_take() -> None:
    x = torch.randn(4, 32).bfloat16()
    weight = x[0]
    assert can_norm(x, x, weight, x)
    assert can_route(x, RoutingRule(2))
    assert can_route(x.float(), RoutingRule(2))
    assert can_activate(x)
    assert can_gate(x, x[:, :1].contiguous())
    assert not can_norm(None, x.float(), weight.float())
    assert not can_norm(x[:1], x, weight)
    assert not can_norm(x.half(), x, weight)
    assert not can_norm(None, x[:, ::2], weight[:16])
    assert not can_norm(None, x, weight, x.float())
    assert not can_norm(None, x, weight, x[:3])
    assert not can_route(x.half(), RoutingRule(2))
    assert not can_route(x, RoutingRule(2, weights_dtype=torch.float16))
    assert not can_route(torch.zeros(1, MAX_EXPERTS + 1).bfloat16(), RoutingRule(2))
    q: Tensor = torch.randn(4, 2, 16).bfloat16()
    cos, cache = torch.randn(4, 8), torch.zeros(1, 4, 2, 16).bfloat16()
    slots = torch.arange(4)
    assert can_rotate(HeadRows(q, q, q, cos, cos, cache, cache, slots))
    assert not can_rotate(HeadRows(q, q, q, cos.bfloat16(), cos, cache, cache, slots))
    assert not can_rotate(HeadRows(q, q, q, torch.randn(4, 16), cos, cache, cache, slots))
    assert not can_rotate(HeadRows(q, q[:, :1].contiguous(), q, cos, cos, cache, cache, slots))
    assert not can_rotate(HeadRows(q, q, q, cos, cos, cache.float(), cache.float(), slots))
