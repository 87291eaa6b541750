"""Nodes, links and small plans of them, for the tests of plans."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.topspin.plans import plan
from topspin.plan.spec import AttentionNode, DraftNode, EnginePlan, ExpertNode, LinkSpec, StageNode
from topspin.plan.speculation import Speculation

ATTENTION = AttentionNode(
    index=0,
    device="cpu",
    kernels="cpu",
    wait="block",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_cache_bytes=2**20,
)
EXPERT = ExpertNode(index=0, device="cpu", kernels="cpu", wait="block", experts=8)
DRAFT = DraftNode(index=0, device="cpu", kernels="cpu", wait="block", kv_cache_tokens=99)
SELF = Speculation(method="draft_model", model="self-int4")
LINK = LinkSpec(transport="shm", payload="bf16", window_rows=32)
LOCAL = replace(LINK, transport="local")
ON_GPU: dict[str, Any] = {"device": "cuda:0", "kernels": "triton"}


def made_of(*nodes: Any, link: LinkSpec = LINK, **fields: Any) -> EnginePlan:
    return EnginePlan(model=plan().model, nodes=nodes, links=(link,), **fields)


def stage(index: int, layers: tuple[int, int] | None, *, of: int = 0, **fields: Any) -> StageNode:
    return StageNode(
        index=index,
        device="cpu",
        kernels="cpu",
        wait="block",
        of=of,
        layers=layers,
        kv_cache_bytes=2**18,
        **fields,
    )


HEAD = replace(ATTENTION, layers=(0, 1))


def cut(*stages: StageNode, head: Any = HEAD, **fields: Any) -> EnginePlan:
    """Return a plan whose attention node's layers are cut."""
    return made_of(head, *stages, EXPERT, **fields)
