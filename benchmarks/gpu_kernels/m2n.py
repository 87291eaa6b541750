"""M2N entries: one side's kernels on one device, with all windows on it.

The other side is there at once: expert nodes answer by a copy of the requests' headers between
dispatch and combine, attention nodes send by counting their flags up before gather and reply.
These small kernels are part of the calls. The work is the copies that cannot be avoided.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_kernels import Entry
from benchmarks.roofline import FP32, I64, Work
from kernels.m2n_windows import (
    FLAG,
    HEADER_WORDS,
    INCARNATION,
    PARTS,
    ROWS,
    STEP,
    VERSION,
    Control,
    WindowShape,
    host_words,
    step_words,
)
from kernels.runtime import open_runtime
from kernels.triton.m2n.attention_port import AttentionPort
from kernels.triton.m2n.expert_port import ExpertPort

PATIENCE_NS: Final = 10**9
LIFE: Final = 1
"""The incarnation of every node."""


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


def control_of(num_peers: int, device: torch.device) -> Control:
    """Give the words that kernels share with the host."""
    host = open_runtime(str(device)).host_buffer(host_words(num_peers) * 8).view(torch.int64)
    return Control(host, device)


def check(control: Control) -> None:
    """Raise RuntimeError if a kernel saw a fault, after which none sends or waits any more."""
    if control.fault is not None:
        raise RuntimeError(f"the kernels saw {control.fault}")


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
    control = control_of(num_nodes, device)
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
        incarnation=LIFE,
        peers=[LIFE] * num_nodes,
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
        return out

    name = str(wire).removeprefix("torch.")
    return Entry(
        "m2n dispatch + combine",
        f"{num_rows} x {width}, {top_k} of {num_experts} experts on {num_nodes} nodes, {name}",
        exchange_work(exchange, num_sent),
        call,
        goal_beyond_s=GOAL_BEYOND_S if num_rows == GOAL_ROWS else None,
        check=lambda: check(control),
    )


class Service(NamedTuple):
    """Rows of bf16 that each of several attention nodes sends, of a window for `bucket`."""

    num_rows: int
    bucket: int
    hidden: int
    top_k: int
    num_nodes: int
    wire: torch.dtype


SERVICES: Final = tuple(
    Service(num_rows, num_rows, 7168, 8, 2, wire)
    for num_rows in (1, 128)
    for wire in (torch.bfloat16, torch.float8_e4m3fn)
)


def service_work(service: Service) -> Work:
    """Give the work: rows are read and written as they come in and as their sums go out."""
    rows = service.num_rows * service.num_nodes
    pairs = rows * service.top_k * 2 * FP32
    scales = rows * FP32 if service.wire == torch.float8_e4m3fn else 0
    taken = rows * service.hidden * (service.wire.itemsize + 2) + 2 * pairs + scales
    return Work(taken + rows * service.hidden * 2 * 2, 0)


def service_entry(service: Service, device: torch.device) -> Entry:
    """Give the entry of a gather and a reply, whose sums are the rows themselves."""
    num_rows, bucket, width, top_k, num_nodes, wire = service
    shape = WindowShape(
        rows=bucket, hidden_size=width, top_k=top_k, wire=wire, answer=torch.bfloat16
    )
    header_bytes = num_nodes * HEADER_WORDS * 8
    window_bytes = num_nodes * (shape.request_bytes + shape.answer_bytes)
    memory = torch.zeros(header_bytes + window_bytes, dtype=torch.uint8, device=device)
    headers = memory[:header_bytes].view(torch.int64).view(num_nodes, HEADER_WORDS)
    headers[:, ROWS], headers[:, PARTS] = num_rows, 1
    headers[:, STEP], headers[:, VERSION], headers[:, INCARNATION] = 1, 1, LIFE
    requests_at = memory.data_ptr() + header_bytes
    answers_at = requests_at + num_nodes * shape.request_bytes
    control = control_of(num_nodes, device)
    step = step_words(
        patience_ns=PATIENCE_NS, step=1, version=1, participants=tuple(range(num_nodes))
    )
    port = ExpertPort(
        shape,
        [
            shape.request_at(requests_at + node * shape.request_bytes)._replace(
                header=headers[node].data_ptr()
            )
            for node in range(num_nodes)
        ],
        [shape.answer_at(answers_at + node * shape.answer_bytes) for node in range(num_nodes)],
        control=control,
        step=torch.tensor(step, dtype=torch.int64, device=device),
        limits=torch.ones(1, dtype=torch.int64, device=device),
        incarnation=LIFE,
        peers=[LIFE] * num_nodes,
        compute=torch.bfloat16,
    )
    flags = headers[:, FLAG]

    def call(_: int) -> Tensor:
        flags.add_(1)
        joined = port.gather(0, layer=0, num_participants=num_nodes, bucket=bucket)
        port.reply(joined.hidden, 0, num_participants=num_nodes)
        return joined.hidden

    name = str(wire).removeprefix("torch.")
    return Entry(
        "m2n gather + reply",
        f"{num_rows} x {width} of {num_nodes} nodes each, {name}",
        service_work(service),
        call,
        check=lambda: check(control),
    )
