"""Tensors that do not fit are refused with their shapes, before a kernel reads beyond them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contracts import RoutingRule
from kernels.triton.attention.launches import attend
from kernels.triton.grouped_mlp.launches import grouped_mlp
from kernels.triton.grouped_mlp.weights import pack_weight
from kernels.triton.linear.launches import linear
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.ops import TritonOps
from kernels.triton.rotary import rotate_and_store
from kernels.triton.router.launches import local_slots, route
from kernels.triton.sampling.launches import draw, plan_sampling
from kernels.triton.swiglu import swiglu
from tests.kernels.cases.attention import Heads, attention_case, placed
from tests.kernels.cases.sampling import batch


class Good:
    """Arguments that fit, by op."""

    def __init__(self, device: torch.device) -> None:
        self.x, self.weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
        case = placed(attention_case([9], [1], heads=Heads(4, 2, 16), block_size=4), device)
        self.q, self.k_cache, self.v_cache, self.meta = case[:4]
        self.packed = pack_weight(torch.randn(8, 8, device=device), "int8")
        self.experts = TritonOps().pack_experts(
            torch.randn(2, 8, 8, device=device), torch.randn(2, 8, 4, device=device)
        )
        self.slots = torch.zeros(4, 2, dtype=torch.int32, device=device)
        self.weights = torch.ones(4, 2, device=device)
        self.plan = plan_sampling(batch(4), 8, device)

    def attend(self, *, meta: dict[str, Tensor] | None = None, **changed: Any) -> None:
        arguments = {"q": self.q, "k_cache": self.k_cache, "v_cache": self.v_cache, "scale": 1.0}
        attend(**{**arguments, "meta": replace(self.meta, **meta or {}), **changed})

    def wide(self, head_dim: int, value_dim: int | None = None) -> dict[str, Tensor]:
        """Return queries and caches of wider heads."""
        caches = self.k_cache.new_zeros(*self.k_cache.shape[:3], head_dim)
        return {
            "q": self.q.new_zeros(*self.q.shape[:2], head_dim),
            "k_cache": caches,
            "v_cache": caches[..., :value_dim],
        }

    def rotate(self, **changed: Any) -> None:
        k = self.q[:, :2].clone()
        angle, slots = self.q[0, :1, :8].clone(), self.slots[:1, 0].long()
        caches = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        rotate_and_store(
            **{"q": self.q, "k": k, "v": k, "cos": angle, "sin": angle, **caches, "slots": slots}
            | changed
        )

    def mlp(self, **changed: Any) -> None:
        arguments = {"hidden": self.x, "slots": self.slots, "weights": self.weights}
        grouped_mlp(**{**arguments, "experts": self.experts, **changed})


CALLS: list[tuple[Callable[[Good], object], str]] = [
    (lambda g: rms_norm(g.x, g.weight[:4], eps=1.0), r"weight \(4,\) for rows of 8"),
    (lambda g: rms_norm(g.x.T, g.weight[:4], eps=1.0), r"contiguous.*strides \(1, 8\)"),
    (lambda g: rms_norm(g.x.bfloat16(), g.weight, eps=1.0), r"bfloat16.*weight of torch.float32"),
    (lambda g: rms_norm(g.x, g.weight, eps=1.0, out=g.x[:2]), r"shapes differ: \(4, 8\)"),
    (lambda g: add_rms_norm(g.x[None], g.x[None], g.weight, eps=1.0), r"must be \[T, H\]"),
    (lambda g: swiglu(g.x[:, :5]), r"gate_up is \(4, 5\)"),
    (lambda g: swiglu(g.x[:, :6], out=g.x[:, :4]), r"out is \(4, 4\).*4 rows of 3"),
    (lambda g: linear(g.x[:, 1:], g.packed), r"x is \(4, 7\).*8 inputs"),
    (lambda g: linear(g.x, g.packed, out=g.x.new_empty(4, 9)), r"out is \(4, 9\).*4 rows of 8"),
    (lambda g: linear(g.x, g.packed, g.weight[:7]), r"bias is \(7,\) for 8 outputs"),
    (lambda g: linear(g.x.half(), g.packed), r"x is torch\.float16"),
    (lambda g: g.attend(q=g.q[:, :3]), "3 query heads for 2 key/value heads"),
    (lambda g: g.attend(q=g.q[..., :8]), r"caches .* for heads of 8"),
    (lambda g: g.attend(k_cache=g.k_cache.half(), v_cache=g.v_cache.half()), r"torch\.float16"),
    (lambda g: g.attend(sinks=g.weight[:2]), r"sinks \(2,\) for 4 heads"),
    (lambda g: g.attend(v_cache=g.k_cache[..., :8], out=g.q), r"out \(1, 4, 16\)"),
    (lambda g: g.attend(v_cache=g.v_cache[..., :8]), r"values .* 8\) are not the first .* 16\)"),
    (lambda g: g.attend(**g.wide(320)), "heads of 256 numbers, not of 320"),
    (lambda g: g.attend(**g.wide(577, 512)), r"latents of 512 \+ 64 .* latents of 512 \+ 65"),
    (lambda g: g.attend(scale=-0.5), r"scaled by -0\.5, which"),
    (lambda g: g.attend(sliding_window=0), "a sliding window of 0"),
    (lambda g: g.attend(meta={"context_lens": g.meta.context_lens.long()}), "contiguous int32"),
    (lambda g: g.attend(meta={"tree_lens": g.meta.query_start}), r"\(2,\) for 1 sequences"),
    (lambda g: g.attend(meta={"tree_mask": torch.ones(2, 1).bool()}), r"\(2, 1\) for 1 rows"),
    (lambda g: g.rotate(q_norm=g.q.new_ones(32)), r"q_norm \(32,\) for heads of 16"),
    (lambda g: g.rotate(q_norm=g.q.new_ones(16).double()), r"q_norm is torch.float64"),
    (lambda g: g.rotate(slots=g.slots[:, 0].long()), r"slots \(4,\) for 1 tokens"),
    (lambda g: g.rotate(k=g.q[:, :1]), r"k \(1, 1, 16\), v \(1, 2, 16\)"),
    (lambda g: g.rotate(k_cache=g.k_cache.half(), v_cache=g.v_cache.half()), r"torch.float16"),
    (lambda g: g.rotate(k_cache=g.k_cache[:, :, :1], v_cache=g.v_cache[:, :, :1]), r"caches \("),
    (lambda g: g.rotate(cos=g.q[0, :1, :4]), r"cos \(1, 4\)"),
    (lambda g: route(g.x, RoutingRule(13)), "top_k 13 of 8 experts"),
    (lambda g: route(g.x, RoutingRule(2, weights_dtype=torch.half)), "float16"),
    (lambda g: local_slots(g.slots.long(), g.slots, out=g.slots[None]), r"out is torch.int32"),
    (lambda g: local_slots(g.slots, g.slots), r"experts are torch\.int32"),
    (lambda g: local_slots(g.slots.long().T, g.slots), "must be contiguous"),
    (lambda g: g.mlp(hidden=g.x[:, :7]), r"hidden is \(4, 7\), not \(4, 8\)"),
    (lambda g: g.mlp(out=g.x[:1]), r"out is \(1, 8\)"),
    (lambda g: g.mlp(hidden=g.x.bfloat16()), "bfloat16, the experts of"),
    (lambda g: g.mlp(weights=g.weights.double()), r"weights are .*float64"),
    (lambda g: draw(g.x[:2], g.plan), "2 rows of logits, 4 in the plan"),
    (lambda g: draw(g.x.half(), g.plan), "float16"),
]


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    good = Good(device)
    good.attend()
    good.rotate()
    good.mlp()
    for call, message in CALLS:
        with pytest.raises(ValueError, match=message):
            call(good)
