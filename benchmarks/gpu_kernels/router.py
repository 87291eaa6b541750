"""Router entries: top-k alone, and with the grouping of pairs by expert.

Logits are what the op before has just written, so they are not made cold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks import roofline
from benchmarks.gpu_kernels import Entry
from benchmarks.roofline import Work
from kernels.triton.router.launches import permute, route, route_and_permute, route_sigmoid


class Router(NamedTuple):
    """How many experts a layer has, and how many a token takes."""

    num_experts: int
    top_k: int


QWEN3_30B = Router(128, 8)
DEEPSEEK_V3 = Router(256, 8)
ROWS = (1, 128, 8192)


def routed_work(num_rows: int, router: Router) -> Work:
    """Give the work of routing and grouping: the slots between the two are written only."""
    alone = roofline.route(num_rows, *router)
    groups = roofline.permute(num_rows, *router)
    return Work(alone.num_bytes + groups.num_bytes, alone.flops + groups.flops)


def router_entries(num_rows: int, router: Router, device: torch.device) -> Iterator[Entry]:
    """Give the entries of logits bf16[R, E]."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, router.num_experts, generator=rng).to(device, torch.bfloat16)
    bias = torch.randn(router.num_experts, generator=rng).to(device)
    settings = {"top_k": router.top_k, "renormalise": True}
    shape = f"{num_rows} rows, {router.top_k} of {router.num_experts} experts"
    alone = roofline.route(num_rows, *router)
    slots = route(logits, **settings).experts.int()
    yield Entry("route", shape, alone, lambda _: route(logits, **settings))
    yield Entry("route_sigmoid", shape, alone, lambda _: route_sigmoid(logits, bias, **settings))
    yield Entry(
        "permute",
        shape,
        roofline.permute(num_rows, *router),
        lambda _: permute(slots, router.num_experts),
    )
    yield Entry(
        "route_and_permute",
        shape,
        routed_work(num_rows, router),
        lambda _: route_and_permute(logits, **settings),
    )
