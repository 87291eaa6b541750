"""M2N entries: dispatch and combine of one device with expert nodes' windows on it.

The nodes answer at once: a copy of the requests' headers between the two makes them those of
the answers, and is part of the call. The work is the copies that cannot be avoided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_kernels import Entry
from benchmarks.roofline import FP32, I64, Work
from kernels.m2n_windows import HEADER_WORDS, Control, WindowShape, host_words, step_words
from kernels.runtime import open_runtime
from kernels.triton_m2n import AttentionPort

PATIENCE_NS: Final = 10**9
INCARNATION: Final = 1


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

    shape = WindowShape(
        rows=num_rows, hidden_size=width, top_k=top_k, wire=wire, answer=torch.bfloat16
    )
    # All headers of one direction lie behind each other, so that one copy answers for all nodes;
    # they are views of the windows' memory, which lives as long as the call that has them.
    num_words = 2 * num_nodes * HEADER_WORDS
    window_bytes = num_nodes * (shape.request_bytes + shape.answer_bytes)
    memory = torch.zeros(num_words * 8 + window_bytes, dtype=torch.uint8, device=device)
    headers = memory[: num_words * 8].view(torch.int64).view(2, num_nodes, HEADER_WORDS)
    requests_at = memory.data_ptr() + num_words * 8
    answers_at = requests_at + num_nodes * shape.request_bytes
    host = open_runtime(str(device)).host_buffer(host_words(num_nodes) * 8).view(torch.int64)
    control = Control(host, device)
    step = step_words(patience_ns=PATIENCE_NS, step=1, version=1)
    port = AttentionPort(
        shape,
        [
            shape.request_at(requests_at + node * shape.request_bytes)._replace(
                header=headers[0, node].data_ptr()
            )
            for node in range(num_nodes)
        ],
        [
            shape.answer_at(answers_at + node * shape.answer_bytes)._replace(
                header=headers[1, node].data_ptr()
            )
            for node in range(num_nodes)
        ],
        control=control,
        step=torch.tensor(step, dtype=torch.int64, device=device),
        incarnation=INCARNATION,
        peers=[INCARNATION] * num_nodes,
    )
    rng = torch.Generator().manual_seed(0)
    experts = torch.rand(num_rows, num_experts, generator=rng).topk(top_k, dim=-1).indices
    ids = torch.arange(num_experts)
    owners = ids % num_nodes == torch.arange(num_nodes)[:, None]
    slot_of = torch.where(owners, ids // num_nodes, -1).int()[None].to(device)
    num_sent = sum(row.unique().numel() for row in experts % num_nodes)
    hidden = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
    weights = torch.full((num_rows, top_k), 1 / top_k, device=device)
    experts = experts.to(device)
    out = torch.zeros(num_rows, width, device=device)

    def call(_: int) -> Tensor:
        port.dispatch(hidden, experts, weights, slot_of, layer=0)
        headers[1].copy_(headers[0])
        port.combine(out, layer=0)
        assert control.fault is None
        return out

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
