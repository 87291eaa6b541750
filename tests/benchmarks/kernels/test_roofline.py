"""The bytes and operations of each op, against tensors counted and torch's own flop counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.kernels import roofline
from benchmarks.kernels.byte_floor import BITS
from benchmarks.kernels.roofline import OpWork, Roofline
from kernels import reference
from kernels.contracts import RoutingRule
from kernels.dispatch import select_ops


def test_linear_counts_the_tensors_and_the_products() -> None:
    x, weight = torch.zeros(5, 24).bfloat16(), torch.zeros(7, 24).bfloat16()
    with FlopCounterMode(display=False) as counter:
        out = reference.linear(x, reference.pack_linear(weight))
    found = roofline.linear(5, 24, 7)
    assert found == OpWork(x.nbytes + weight.nbytes + out.nbytes, counter.get_total_flops())
    wide = roofline.linear(5, 24, 7, out_bytes=4)
    assert wide.num_bytes - found.num_bytes == out.float().nbytes - out.nbytes


@pytest.mark.parametrize("precision", ["int8", "int4", "mxfp4"])
def test_quantised_weights_are_as_large_as_the_kernels_make_them(precision: str) -> None:
    """Outputs in whole blocks: padding is the kernels' choice and not counted."""
    packed = select_ops("cpu", torch.bfloat16, [precision]).pack_linear(
        torch.randn(32, 80), precision
    )
    assert roofline.weight_bytes(32, 80, BITS[precision]) == packed.data.nbytes


def test_experts_count_what_is_touched_and_every_pair() -> None:
    hidden, ffn = 16, 8
    gate_up, down = torch.zeros(4, 2 * ffn, hidden), torch.zeros(4, hidden, ffn)
    experts = reference.pack_experts(gate_up.bfloat16(), down.bfloat16())
    rows = torch.zeros(3, hidden).bfloat16()
    slots = torch.tensor([[0, 2], [2, 0], [2, -1]], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        out = reference.grouped_mlp(rows, slots, torch.ones(3, 2), experts).out
    found = roofline.grouped_mlp(hidden, ffn, num_rows=3, num_pairs=5, num_touched=2)
    expert_bytes = experts.gate_up[0].data.nbytes + experts.down[0].data.nbytes
    assert found.num_bytes == 2 * expert_bytes + rows.nbytes + out.nbytes
    assert found.flops == counter.get_total_flops()


@pytest.mark.parametrize(("num_new", "context"), [(1, 7), (4, 4), (3, 9)])
def test_attention_counts_what_each_row_sees(num_new: int, context: int) -> None:
    seen = reference.visible(
        num_new, context, sliding_window=None, tree=None, device=torch.device("cpu")
    )
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}
    found = roofline.paged_attention([num_new, 1], [context, 5], **shape)
    # A visible key takes 8 multiply-adds for its score and 8 for its value, in each head.
    assert found.flops == 2 * (8 + 8) * 6 * (int(seen.sum()) + 5)
    keys, queries = torch.zeros(context + 5, 2, 8).bfloat16(), torch.zeros(num_new + 1, 6, 8)
    assert found.num_bytes == 2 * keys.nbytes + 2 * queries.bfloat16().nbytes
    wide = roofline.paged_attention([num_new, 1], [context, 5], **shape, number_bytes=4)
    assert wide == roofline.OpWork(2 * found.num_bytes, found.flops)
    latent = roofline.paged_attention([num_new, 1], [context, 5], **shape, rank=6)
    assert latent.flops == found.flops * 14 / 16
    outputs = torch.zeros(num_new + 1, 6, 6).bfloat16()
    assert latent.num_bytes == keys.nbytes + queries.bfloat16().nbytes + outputs.nbytes


def test_small_ops_count_their_tensors() -> None:
    x, weight = torch.zeros(3, 8).bfloat16(), torch.zeros(8).bfloat16()
    assert roofline.rms_norm(3, 8).num_bytes == 2 * x.nbytes + weight.nbytes
    assert roofline.add_rms_norm(3, 8).num_bytes == 4 * x.nbytes + weight.nbytes
    routing = reference.route(x, RoutingRule(2, renormalise=True))
    written = routing.experts.nbytes + routing.weights.nbytes
    assert roofline.route(3, 8, 2).num_bytes == x.nbytes + written
    slots = routing.experts.int()
    groups = reference.permute(slots, 8)
    assert roofline.permute(3, 8, 2).num_bytes == slots.nbytes + sum(t.nbytes for t in groups)
    q, k = torch.zeros(3, 4, 8).bfloat16(), torch.zeros(3, 2, 8).bfloat16()
    cos, positions = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    rotated = roofline.rotate_and_store(3, num_heads=4, num_kv_heads=2, head_dim=8, has_norms=True)
    assert rotated.num_bytes == 2 * q.nbytes + 4 * k.nbytes + 2 * cos.nbytes + positions.nbytes
    logits, tokens = torch.zeros(3, 50), torch.zeros(3, dtype=torch.int64)
    assert roofline.sample(3, 50, draws=False).num_bytes == logits.nbytes + tokens.nbytes


def test_the_slower_of_memory_and_arithmetic_is_the_limit() -> None:
    machine = Roofline(bytes_per_s=100.0, flops_per_s=1000.0)
    reads, computes = OpWork(200, 1000), OpWork(100, 4000)
    assert machine.least_s(reads) == 2.0
    assert machine.bound(reads) == "memory"
    assert machine.least_s(computes) == 4.0
    assert machine.bound(computes) == "compute"
    assert machine.fraction(reads, 4.0) == 0.5
