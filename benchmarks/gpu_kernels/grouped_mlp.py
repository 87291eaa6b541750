"""Grouped MLP entries: decode and prompts over all experts of a layer, in every weight format.

Weights are cold, as in a step, which reads every layer's once: where the experts that one
routing touches would fit the cache, calls go through several routings that touch others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_kernels import L2_BYTES, Entry, num_copies
from benchmarks.roofline import BF16, Work
from kernels.contracts import ExpertOutput
from kernels.triton.grouped_mlp.launches import grouped_mlp
from kernels.triton.grouped_mlp.weights import GROUP, GpuExperts, pack_experts


class Layer(NamedTuple):
    """The routed experts of a layer."""

    num_experts: int
    top_k: int
    hidden: int
    ffn: int


QWEN3_30B: Final = Layer(128, 8, 2048, 768)
ROWS: Final = (1, 32, 128, 1024, 8192)
# The project's goals for one H200, in bf16.
GOALS: Final = {32: 0.75, 8192: 0.65}


def expert_bytes(layer: Layer, weight_format: str) -> int:
    """Count the bytes of one expert: its numbers, and their scales or steps and lowest numbers."""
    hidden_groups, ffn_groups = (-(-size // GROUP) for size in (layer.hidden, layer.ffn))
    numbers = 3 * layer.hidden * layer.ffn
    if weight_format == "plain":
        return numbers * BF16
    if weight_format == "fp8":
        return numbers + 3 * hidden_groups * ffn_groups * 4
    padded = GROUP * (2 * layer.ffn * hidden_groups + layer.hidden * ffn_groups)
    codes = padded if weight_format == "int8" else padded // 2
    return codes + padded // GROUP * 2 * BF16


def mlp_work(num_rows: int, num_touched: int, layer: Layer, weight_format: str) -> Work:
    """Give the work of R rows of bf16 whose choices touch so many experts."""
    rows = 2 * num_rows * layer.hidden * BF16
    flops = 6 * num_rows * layer.top_k * layer.hidden * layer.ffn
    return Work(num_touched * expert_bytes(layer, weight_format) + rows, flops)


def draw_slots(num_rows: int, layer: Layer, seed: int) -> Tensor:
    """Choose different experts for each row, evenly: slots i32[R, K]."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, layer.num_experts, generator=rng)
    return scores.topk(layer.top_k, dim=-1).indices.int()


def draw_routings(
    num_rows: int, layer: Layer, weight_format: str, cache_bytes: int = L2_BYTES
) -> list[Tensor]:
    """Choose experts as many times as it takes to read more than `cache_bytes` of weights."""
    first = draw_slots(num_rows, layer, 0)
    num_touched = first.unique().numel()
    copies = num_copies(num_touched * expert_bytes(layer, weight_format), cache_bytes)
    # The same routing with experts renamed touches as many, and others.
    step = layer.num_experts // copies or 1
    return [(first + idx * step) % layer.num_experts for idx in range(copies)]


def random_experts(layer: Layer, weight_format: str, device: torch.device) -> GpuExperts:
    """Make a layer's experts, one matrix after the other."""

    def matrices(num_out: int, num_in: int) -> Iterator[Tensor]:
        for _ in range(layer.num_experts):
            yield torch.randn(num_out, num_in, dtype=torch.bfloat16, device=device) / num_in**0.5

    return pack_experts(
        matrices(2 * layer.ffn, layer.hidden),
        matrices(layer.hidden, layer.ffn),
        weight_format=weight_format,
    )


def mlp_entry(
    num_rows: int,
    layer: Layer,
    experts: GpuExperts,
    device: torch.device,
    cache_bytes: int = L2_BYTES,
) -> Entry:
    """Give the entry of R rows, of as many routings as read more than `cache_bytes`."""
    weight_format = experts.weight_format
    drawn = draw_routings(num_rows, layer, weight_format, cache_bytes)
    work = mlp_work(num_rows, drawn[0].unique().numel(), layer, weight_format)
    routings, copies = [each.to(device) for each in drawn], len(drawn)
    hidden = torch.randn(num_rows, layer.hidden, dtype=torch.bfloat16, device=device)
    weights = torch.full((num_rows, layer.top_k), 1 / layer.top_k, device=device)
    out = torch.empty_like(hidden)

    def call(idx: int) -> ExpertOutput:
        return grouped_mlp(hidden, routings[idx % copies], weights, experts, out=out)

    return Entry(
        f"grouped_mlp {weight_format}",
        f"{num_rows} rows, {layer.top_k} of {layer.num_experts} experts, "
        f"{layer.hidden} x {layer.ffn}",
        work,
        call,
        copies,
        GOALS.get(num_rows) if weight_format == "plain" else None,
        product="fp8" if weight_format == "fp8" else "bf16",
    )
