"""Turns the settings asked for into an engine plan: replaces every "auto", or raises ConfigError.

Pure: knows the checkpoint, the host's cores and a measured layout only as arguments. Called by
`topspin serve` before anything is started; all later code gets the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topspin.cores import DEFAULT_LAYOUT, LayoutChoice, split_cores
from topspin.devices import (
    CPU,
    KernelName,
    NodePlaces,
    NodeRole,
    Place,
    assign_devices,
    auto_micro_batches,
    auto_transport,
    parse_device,
)
from topspin.errors import ConfigError
from topspin.expert_table import even_shares
from topspin.plan.flags import Shorthand, part, settled
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.precision import ROLE_PARTS, Rules, rules_of
from topspin.plan.retrieval import policy_of
from topspin.plan.rules.checks import check_model, check_plan, check_precision
from topspin.plan.rules.model_facts import ModelFacts
from topspin.plan.setting import AUTO
from topspin.plan.settings import (
    CPU_BATCH,
    CPU_KV_CACHE_BYTES,
    GPU_BATCH,
    GPU_WINDOW_ROWS,
    WINDOW_ROWS,
    BalancePolicy,
    ExecutionPolicy,
    FailoverPolicy,
    SchedulingPolicy,
    TraceSection,
)
from topspin.plan.spec import (
    AttentionNode,
    DraftNode,
    EnginePlan,
    ExpertNode,
    LinkSpec,
    PlannedModel,
)
from topspin.plan.speculation import DEFAULT, OFF, cached_tokens


def resolve(
    model: ModelFacts,
    *,
    cores: Sequence[int] = (0,),
    measured: LayoutChoice | None = None,
    **asked: Any,
) -> EnginePlan:
    """Return the plan of the settings `asked` for, checked, by the checkpoint's facts above all.

    Their names are those of topspin.plan.flags; `path` is the user's name for the model. What is
    left out, None or "auto" is chosen here; `speculation` may be "off". `cores` are the host's, for
    --layout split. `measured` is the layout for "auto" (None: the default). Raises ConfigError
    naming the setting, its value and a fix.
    """
    may_speculate = asked.get("speculation") != OFF
    asked = settled(asked if may_speculate else asked | {"speculation": None})
    short = part(Shorthand, asked)
    nodes = _nodes(short, model, deterministic=asked.get("deterministic", False))
    on_gpu = nodes.attention.is_gpu or nodes.experts.is_gpu
    layout = short.layout or (DEFAULT_LAYOUT if measured is None else measured.layout)
    if layout == "split" and on_gpu:
        raise ConfigError(
            "--layout split: a node on a GPU needs no cores of its own; leave --layout out"
        )
    if measured is not None and short.layout is None:
        asked = {"transport": measured.transport, "num_threads": measured.num_threads} | asked
    asked = {
        # float16 checkpoints run in bfloat16: CPUs have no fast float16 matmul.
        "dtype": "float32" if model.dtype == "float32" else "bfloat16",
        "max_model_len": model.max_positions,
        "transport": auto_transport(nodes),
        "wait": "spin" if layout == "split" else "block",
        **(GPU_BATCH if nodes.attention.is_gpu else CPU_BATCH)._asdict(),
    } | asked
    if not nodes.attention.is_gpu:
        asked = {"kv_cache_bytes": CPU_KV_CACHE_BYTES} | asked
        # The drafts of a sequence share one selection of its keys: tokens can be others.
        if may_speculate and short.kv_retrieval_tokens is None:
            asked.setdefault("speculation", DEFAULT)
        # The share of a GPU's memory means nothing here, and printed plans leave it out.
        asked.pop("gpu_memory_utilization", None)
    if not model.shares_prefixes:
        asked["prefix_caching"] = False
    if short.kernels == "reference" and on_gpu:
        asked["recordings"] = False  # plain torch reads tensors on the host, which no graph does
    transport = asked["transport"]
    plan = EnginePlan(
        model=part(PlannedModel, asked),
        precision=_precision(short, model, nodes),
        kv_cache=part(KvCacheSpec, asked, retrieval=policy_of(short.kv_retrieval_tokens)),
        nodes=(
            *_equal_nodes(asked, nodes, short, model, cores if layout == "split" else ()),
            *_drafts(asked, nodes, short.draft_nodes),
        ),
        links=(
            part(
                LinkSpec,
                asked,
                payload="fp32" if asked["dtype"] == "float32" else "bf16",
                window_rows=GPU_WINDOW_ROWS if transport == "cuda_ipc" else WINDOW_ROWS,
            ),
        ),
        execution=part(ExecutionPolicy, asked),
        scheduling=part(
            SchedulingPolicy,
            asked,
            micro_batches=auto_micro_batches(nodes, transport),
        ),
        speculation=asked.get("speculation"),
        balance=asked.get("balance", BalancePolicy()),
        failover=part(FailoverPolicy, asked, restart=True),
        trace=asked.get("trace", TraceSection()),
    )
    check_plan(plan)
    try:
        check_precision(plan, model)
    except ConfigError as error:
        raise ConfigError(f"--quantization {short.quantization or AUTO}: {error}") from error
    check_model(plan, model)
    return plan


def _nodes(short: Shorthand, model: ModelFacts, *, deterministic: bool) -> NodePlaces:
    """Return how many nodes of each role there are and where they compute.

    A dense model has no expert nodes. Raises ConfigError for more than have something to do.
    """
    num_experts = short.expert_nodes
    if not model.num_experts:
        if num_experts > 1:
            raise ConfigError(f"--expert-nodes {num_experts}: a dense model has no experts to hold")
        num_experts = 0
    elif num_experts > model.num_experts:
        raise ConfigError(
            f"--expert-nodes {num_experts}: the model has {model.num_experts} experts per "
            "layer, so that many nodes at most have something to do"
        )
    attention = parse_device("--attention-device", short.attention_device)
    experts = parse_device("--expert-device", short.expert_device)
    kernels = short.kernels
    if deterministic and (attention, experts) != (CPU, CPU):
        raise ConfigError(
            "--deterministic: only the kernels for the CPU add in a fixed order; leave "
            "--attention-device and --expert-device at cpu"
        )
    if deterministic and kernels is None:
        kernels = "deterministic"
    return NodePlaces(
        short.attention_nodes,
        num_experts,
        _place(attention, kernels),
        _place(experts, short.expert_kernels or kernels),
    )


def _place(device: str, kernels: KernelName | None) -> Place:
    return Place(device, kernels or ("cpu" if device == CPU else "triton"))


def _precision(short: Shorthand, model: ModelFacts, nodes: NodePlaces) -> Rules:
    """Return the rules asked for, by default the checkpoint's own: each role by its kernels."""
    if short.quantization is not None:
        return rules_of(short.quantization)
    places: dict[NodeRole, Place] = {"attention": nodes.attention, "expert": nodes.experts}
    return tuple(
        rule
        for role, place in places.items()
        for rule in model.precision.get(place.kernels, ())
        if rule.part in ROLE_PARTS[role]
    )


def _equal_nodes(
    asked: Mapping[str, Any],
    nodes: NodePlaces,
    short: Shorthand,
    model: ModelFacts,
    cores: Sequence[int],
) -> list[AttentionNode | ExpertNode]:
    """Return equal nodes of each role, attention first; separate processes divide `cores`."""
    devices = assign_devices(nodes, transport=asked["transport"])
    own: list[tuple[int, ...]] = [()] * (nodes.num_attention + nodes.num_experts)
    if cores and asked["transport"] != "local":
        own = split_cores(cores, len(own))
    slots = model.num_experts + _num_copies(short, nodes, model)
    shares = even_shares(slots, nodes.num_experts) if nodes.num_experts else []

    def fixed(place: Place, index: int, device: str, cores: tuple[int, ...]) -> dict[str, Any]:
        named = {"index": index, "device": device, "kernels": place.kernels, "cores": cores}
        return {**asked, **named}

    attention = [
        part(AttentionNode, fixed(nodes.attention, index, device, own[index]))
        for index, device in enumerate(devices.attention)
    ]
    experts = [
        part(
            ExpertNode,
            fixed(nodes.experts, index, device, own[nodes.num_attention + index]),
            experts=share,
        )
        for index, (device, share) in enumerate(zip(devices.experts, shares, strict=True))
    ]
    return [*attention, *experts]


def _num_copies(short: Shorthand, nodes: NodePlaces, model: ModelFacts) -> int:
    """Return the slots for second copies, which must fit those that expert nodes can have."""
    most = model.num_experts * (nodes.num_experts - 1) if nodes.num_experts else 0
    if short.redundant_experts > most:
        raise ConfigError(
            f"--redundant-experts {short.redundant_experts}: {nodes.num_experts} expert nodes hold "
            f"{most} second copies of {model.num_experts} experts at most, never two on one node"
        )
    return short.redundant_experts


def _drafts(asked: Mapping[str, Any], nodes: NodePlaces, count: int) -> list[DraftNode]:
    """Return equal draft nodes on the CPU, each with room for the texts of all that ask it."""
    if not count:
        return []
    seats = asked["max_num_seqs"] * -(-nodes.num_attention // count)
    return [
        DraftNode(
            index=index,
            device=CPU,
            kernels="cpu",
            wait="block",
            num_threads=asked.get("num_threads"),
            kv_cache_tokens=cached_tokens(seats, asked["max_model_len"]),
        )
        for index in range(count)
    ]
