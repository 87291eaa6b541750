"""M2N entries: dispatch and combine of one device with expert nodes' windows on it.

The nodes answer at once: a small kernel between the two copies the sequences into the
answers' flags, and is part of the call. The work is the copies that cannot be avoided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_kernels import Entry
from benchmarks.roofline import FP32, I64, Work
from kernels.triton_m2n import AnswerWindow, DeviceNet, RequestWindow

PATIENCE_NS: Final = 10**9


class Exchange(NamedTuple):
    """Rows of bf16, to experts spread evenly over nodes; answers in bf16."""

    num_rows: int
    hidden: int
    num_experts: int
    top_k: int
    num_nodes: int
    wire: torch.dtype


GOAL_ROWS: Final = 128
GOAL_BEYOND_S: Final = 25e-6
"""The project's goal for 128 x 7168: beyond the copies' floor, on one H200."""
EXCHANGES: Final = tuple(
    Exchange(num_rows, 7168, 256, 8, 4, wire)
    for num_rows in (1, 128)
    for wire in (torch.bfloat16, torch.float8_e4m3fn)
)


def exchange_work(exchange: Exchange, num_sent: int) -> Work:
    """Give the work for `num_sent` rows to all nodes together.

    Dispatch reads rows, experts and weights, and writes rows, slots and weights; combine
    reads the answers and writes fp32 sums. Each number of an answer is added once.
    """
    rows, top_k = exchange.num_rows, exchange.top_k
    given = rows * (exchange.hidden * 2 + top_k * (I64 + FP32))
    sent = num_sent * (exchange.hidden * exchange.wire.itemsize + top_k * 2 * FP32)
    scales = num_sent * FP32 if exchange.wire == torch.float8_e4m3fn else 0
    answers = num_sent * exchange.hidden * 2 + rows * exchange.hidden * FP32
    return Work(given + sent + scales + answers, num_sent * exchange.hidden)


def exchange_entry(exchange: Exchange, device: torch.device) -> Entry:
    """Give the entry of a dispatch and a combine."""
    num_rows, width, num_experts, top_k, num_nodes, wire = exchange

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    flags = zeros(num_nodes, dtype=torch.int64)
    words = zeros(2, num_nodes, dtype=torch.int64)
    requests = [
        RequestWindow(
            zeros(num_rows, top_k, dtype=torch.int32),
            zeros(num_rows, top_k),
            zeros(num_rows, width, dtype=wire),
            zeros(num_rows),
            words[0, node : node + 1],
            words[1, node : node + 1],
        )
        for node in range(num_nodes)
    ]
    answers = [
        AnswerWindow(zeros(num_rows, width, dtype=torch.bfloat16), flags[node : node + 1])
        for node in range(num_nodes)
    ]
    net = DeviceNet(requests, answers, max_rows=num_rows)
    rng = torch.Generator().manual_seed(0)
    experts = torch.rand(num_rows, num_experts, generator=rng).topk(top_k, dim=-1).indices
    ids = torch.arange(num_experts)
    owners = ids % num_nodes == torch.arange(num_nodes)[:, None]
    slot_of = torch.where(owners, ids // num_nodes, -1).int().to(device)
    num_sent = sum(row.unique().numel() for row in experts % num_nodes)
    hidden = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
    weights = torch.full((num_rows, top_k), 1 / top_k, device=device)
    experts, out = experts.to(device), zeros(num_rows, width)

    def call(_: int) -> Tensor:
        net.dispatch(hidden, experts, weights, slot_of)
        flags.copy_(net.sequences)
        return net.combine(out, patience=PATIENCE_NS)

    name = str(wire).removeprefix("torch.")
    return Entry(
        "m2n dispatch + combine",
        f"{num_rows} x {width}, {top_k} of {num_experts} experts on {num_nodes} nodes, {name}",
        exchange_work(exchange, num_sent),
        call,
        goal_beyond_s=GOAL_BEYOND_S if num_rows == GOAL_ROWS else None,
    )


def entries(device: torch.device) -> Iterator[Entry]:
    """Give all entries, one at a time: its tensors go when the next one is asked for."""
    for exchange in EXCHANGES:
        yield exchange_entry(exchange, device)
