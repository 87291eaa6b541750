"""Turns the settings asked for into an engine plan: replaces every "auto", or raises ConfigError.

Pure: knows the checkpoint, the host's cores and a measured layout only as arguments. Called by
`topspin serve` before anything is started; all later code gets the plan. check_model() is also for
plans that were read from a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from topspin.cores import DEFAULT_LAYOUT, LayoutChoice, split_cores
from topspin.devices import (
    CPU,
    NodeRole,
    Nodes,
    assign_devices,
    auto_micro_batches,
    auto_transport,
    check_options,
    parse_device,
)
from topspin.errors import ConfigError
from topspin.expert_table import even_shares
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.optional import check_held
from topspin.plan.precision import (
    KERNEL_FORMATS,
    ROLE_PARTS,
    Rules,
    check_rules,
    formats,
    rules_of,
)
from topspin.plan.retrieval import policy_of
from topspin.plan.setting import check_ranges
from topspin.plan.settings import (
    CPU_KV_CACHE_BYTES,
    DETERMINISTIC_KERNELS,
    GPU_WINDOW_ROWS,
    WINDOW_ROWS,
    BalancePolicy,
    ComputeSection,
    EngineConfig,
    ExecutionPolicy,
    FailoverPolicy,
    M2NSection,
    ModelSection,
    SchedulerSection,
    SchedulingPolicy,
    Section,
    TopologySection,
)
from topspin.plan.spec import (
    AttentionNode,
    DraftNode,
    EnginePlan,
    ExpertNode,
    LinkSpec,
    Payload,
    PlannedModel,
    Wait,
)
from topspin.plan.speculation import cached_tokens
from topspin.plan.stages import check_ends

Policy = TypeVar("Policy", bound=Section)


class ModelFacts(NamedTuple):
    """The facts of a checkpoint that a plan depends on.

    `num_experts` is the number of routed experts per MoE layer; 0, for a dense model, makes an
    engine without expert nodes. `shares_prefixes`: a token's key and value depend only on the
    tokens before it. `windows` are those of all layers, None where a layer has none; (): of none.
    `precision` are a quantised checkpoint's rules by the kernels that serve it as it is.
    """

    dtype: str
    max_positions: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    shares_prefixes: bool = True
    windows: tuple[int | None, ...] = ()
    precision: Mapping[str, Rules] = MappingProxyType({})


def resolve(
    config: EngineConfig,
    model: ModelFacts,
    *,
    cores: Sequence[int] = (0,),
    measured: LayoutChoice | None = None,
) -> EnginePlan:
    """Validate `config` and make the plan, by the checkpoint's facts above all.

    `cores` are the host's, for --layout split. `measured` is the layout for "auto" (None: the
    default). Raises ConfigError naming the setting, its value and a fix.
    """
    check_ranges(config)
    topology = _topology(config.topology, model.num_experts)
    compute = _compute(config.compute, measured)
    nodes = compute.nodes(topology)
    _check_copies(config.balance.redundant_experts, topology.expert_nodes, model.num_experts)
    planned = _model(config.model, model)
    link, wait = _m2n(config.m2n, nodes, compute, dtype=planned.dtype, measured=measured)
    plan = EnginePlan(
        model=planned,
        precision=_precision(config.model, model, nodes),
        kv_cache=KvCacheSpec(
            block_size=config.cache.block_size,
            dtype=config.cache.kv_cache_dtype,
            retrieval=policy_of(config.cache.kv_retrieval_tokens),
            spill=config.cache.kv_spill,
        ),
        nodes=(
            *_nodes(config, compute, nodes, link, wait, model.num_experts, cores),
            *_drafts(config, planned, compute, nodes),
        ),
        links=(link,),
        execution=_policy(ExecutionPolicy, compute),
        scheduling=_scheduling(config.scheduler, nodes, link, compute, model),
        speculation=config.speculation.config,
        balance=_policy(BalancePolicy, config.balance),
        failover=_policy(FailoverPolicy, config.failover),
        trace=config.trace,
    )
    plan.check()
    try:
        check_precision(plan, model)
    except ConfigError as error:
        raise ConfigError(f"--quantization {config.model.quantization}: {error}") from error
    return plan


def _precision(asked: ModelSection, model: ModelFacts, nodes: Nodes) -> Rules:
    """Return the rules asked for, by default the checkpoint's own: each role by its kernels."""
    if asked.quantization != "auto":
        return rules_of(asked.quantization)
    places: dict[NodeRole, str] = {
        "attention": nodes.attention.kernels,
        "expert": nodes.experts.kernels,
    }
    return tuple(
        rule
        for role, kernels in places.items()
        for rule in model.precision.get(kernels, ())
        if rule.part in ROLE_PARTS[role]
    )


def check_precision(plan: EnginePlan, model: ModelFacts) -> None:
    """Raise ConfigError if a rule does not fit the checkpoint, or a node's kernels."""
    for node in (*plan.attention, *plan.stages, *plan.experts):
        check_rules(
            plan.precision,
            num_layers=model.num_layers,
            moe_layers=model.moe_layers,
            num_experts=model.num_experts,
            kernels={node.role if node.role == "expert" else "attention": node.kernels},
        )
    if plan.local_experts is None:
        return
    for node in plan.attention:
        unknown = formats(plan.precision, "expert") - set(KERNEL_FORMATS.get(node.kernels, ()))
        if unknown:
            raise ConfigError(
                f"local_experts: {node} is to hold experts in {', '.join(sorted(unknown))}, which "
                f"its kernels {node.kernels} do not have"
            )


def check_model(plan: EnginePlan, model: ModelFacts) -> None:
    """Raise ConfigError, naming the field, if `plan` does not fit the checkpoint."""
    if plan.model.max_model_len > model.max_positions:
        raise ConfigError(
            f"model.max_model_len {plan.model.max_model_len}: the model has positions up to "
            f"{model.max_positions}, which model.hf_overrides can extend"
        )
    if plan.scheduling.prefix_caching and not model.shares_prefixes:
        raise ConfigError(
            "scheduling.prefix_caching: this model rotates a key by its own prompt's length, so "
            "prompts cannot share keys; set it to false"
        )
    if plan.experts and not model.num_experts:
        raise ConfigError(f"nodes: {len(plan.experts)} expert nodes for a dense model")
    if plan.local_experts is not None:
        plan.local_experts.check(model.moe_layers, num_expert_nodes=len(plan.experts))
    elif model.num_experts and not plan.experts:
        raise ConfigError(
            f"nodes: no expert node for a model with {model.num_experts} routed experts per layer"
        )
    held = [node.experts for node in plan.experts]
    for node in plan.experts:
        if node.experts > model.num_experts:
            raise ConfigError(
                f"{node}: experts {node.experts}: the model has {model.num_experts} per layer, and "
                "a node holds no second copy"
            )
    if plan.experts and sum(held) < model.num_experts:
        raise ConfigError(
            f"nodes: expert nodes hold {' + '.join(map(str, held))} experts per layer of the "
            f"model's {model.num_experts}"
        )
    check_held(plan, model.num_experts)
    check_ends(plan, model.num_layers)
    check_precision(plan, model)
    plan.kv_cache.check_layers(model.windows or (None,) * model.num_layers)


def _policy(kind: type[Policy], section: Section) -> Policy:
    """Return the settings of `section` that `kind`, one of its bases, has."""
    return kind(**{name: getattr(section, name) for name in kind.__struct_fields__})


def _nodes(
    config: EngineConfig,
    compute: ComputeSection,
    nodes: Nodes,
    link: LinkSpec,
    wait: Wait,
    num_experts: int,
    cores: Sequence[int],
) -> tuple[AttentionNode | ExpertNode, ...]:
    """Return equal nodes of each role, attention first."""
    num_nodes = nodes.num_attention + nodes.num_experts
    own: list[tuple[int, ...]] = [()] * num_nodes
    if compute.layout == "split" and link.transport != "local":
        own = split_cores(cores, num_nodes)
    devices = assign_devices(nodes, transport=link.transport)
    limits = config.scheduler.batch_limits(is_gpu=nodes.attention.is_gpu)
    cache_bytes = config.cache.kv_cache_bytes
    if cache_bytes is None and not nodes.attention.is_gpu:
        cache_bytes = CPU_KV_CACHE_BYTES
    # Meaningless on the CPU, where printed plans leave it out.
    share: dict[str, Any] = {"gpu_memory_utilization": config.cache.gpu_memory_utilization}
    attention = [
        AttentionNode(
            index=index,
            device=device,
            kernels=nodes.attention.kernels,
            num_threads=compute.num_threads,
            cores=own[index],
            wait=wait,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv_cache_bytes=cache_bytes,
            **(share if nodes.attention.is_gpu else {}),
        )
        for index, device in enumerate(devices.attention)
    ]
    slots = num_experts + config.balance.redundant_experts
    shares = even_shares(slots, nodes.num_experts) if nodes.num_experts else []
    experts = [
        ExpertNode(
            index=index,
            device=device,
            kernels=nodes.experts.kernels,
            num_threads=compute.num_threads,
            cores=own[nodes.num_attention + index],
            wait=wait,
            experts=share,
        )
        for index, (device, share) in enumerate(zip(devices.experts, shares, strict=True))
    ]
    return (*attention, *experts)


def _drafts(
    config: EngineConfig, model: PlannedModel, compute: ComputeSection, nodes: Nodes
) -> list[DraftNode]:
    """Return equal draft nodes on the CPU, each with room for the texts of all that ask it."""
    count, speculation = config.topology.draft_nodes, config.speculation.config
    num_attention = nodes.num_attention
    if not count:
        return []
    if speculation is None or speculation.model is None:
        raise ConfigError(
            f"--draft-nodes {count}: there is no draft model to compute; give one with "
            '--speculative-config \'{"method": "draft_model", "model": ...}\''
        )
    if count > num_attention:
        raise ConfigError(
            f"--draft-nodes {count}: {num_attention} attention nodes ask one each, so that many "
            "at most have something to do"
        )
    limits = config.scheduler.batch_limits(is_gpu=nodes.attention.is_gpu)
    seats = limits.max_num_seqs * -(-num_attention // count)
    return [
        DraftNode(
            index=index,
            device=CPU,
            kernels="cpu",
            wait="block",
            num_threads=compute.num_threads,
            kv_cache_tokens=cached_tokens(seats, model.max_model_len),
        )
        for index in range(count)
    ]


def _scheduling(
    scheduler: SchedulerSection,
    nodes: Nodes,
    link: LinkSpec,
    compute: ComputeSection,
    model: ModelFacts,
) -> SchedulingPolicy:
    limits = scheduler.batch_limits(is_gpu=nodes.attention.is_gpu)
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {limits.max_num_batched_tokens} is less than "
            f"--max-num-seqs {limits.max_num_seqs}: not every running sequence could "
            "advance by a token in a step"
        )
    policy = _policy(SchedulingPolicy, scheduler)
    micro_batches = policy.micro_batches
    if micro_batches is None:
        micro_batches = auto_micro_batches(nodes, link.transport, compute.gpu_streams)
    return msgspec.structs.replace(
        policy,
        micro_batches=micro_batches,
        prefix_caching=policy.prefix_caching and model.shares_prefixes,
    )


def _model(asked: ModelSection, model: ModelFacts) -> PlannedModel:
    dtype = asked.dtype
    if dtype == "auto":
        # float16 checkpoints run in bfloat16: CPUs have no fast float16 matmul.
        dtype = "float32" if model.dtype == "float32" else "bfloat16"
    if asked.max_model_len is not None and asked.max_model_len > model.max_positions:
        raise ConfigError(
            f"--max-model-len {asked.max_model_len}: the model has positions up to "
            f"{model.max_positions}, which --hf-overrides can extend"
        )
    return PlannedModel(
        path=asked.path,
        dtype=dtype,
        max_model_len=asked.max_model_len or model.max_positions,
        hf_overrides=asked.hf_overrides,
    )


def _topology(topology: TopologySection, num_experts: int) -> TopologySection:
    """Check that every expert node has an expert; a dense model has no expert nodes."""
    if not num_experts:
        if topology.expert_nodes > 1:
            raise ConfigError(
                f"--expert-nodes {topology.expert_nodes}: a dense model has no experts to hold"
            )
        return msgspec.structs.replace(topology, expert_nodes=0)
    if topology.expert_nodes > num_experts:
        raise ConfigError(
            f"--expert-nodes {topology.expert_nodes}: the model has {num_experts} experts per "
            "layer, so that many nodes at most have something to do"
        )
    return topology


def _compute(compute: ComputeSection, measured: LayoutChoice | None) -> ComputeSection:
    """Check devices and kernels and choose the kernels of both roles, and the layout."""
    compute = msgspec.structs.replace(
        compute,
        attention_device=parse_device("--attention-device", compute.attention_device),
        expert_device=parse_device("--expert-device", compute.expert_device),
    )
    if compute.layout == "auto":
        threads = compute.num_threads
        if measured is not None and threads is None:
            threads = measured.num_threads
        layout = DEFAULT_LAYOUT if measured is None else measured.layout
        compute = msgspec.structs.replace(compute, layout=layout, num_threads=threads)
    places = compute.place("attention"), compute.place("expert")
    on_cpu = not any(place.is_gpu for place in places)
    if compute.deterministic:
        if compute.kernels not in ("auto", "cpu", DETERMINISTIC_KERNELS):
            raise ConfigError(
                f"--deterministic with compute.kernels {compute.kernels}: their sums depend on "
                "the batch; leave compute.kernels at auto"
            )
        if not on_cpu:
            raise ConfigError(
                "--deterministic: only the kernels for the CPU add in a fixed order; leave "
                "--attention-device and --expert-device at cpu"
            )
        return msgspec.structs.replace(
            compute, kernels=DETERMINISTIC_KERNELS, expert_kernels=DETERMINISTIC_KERNELS
        )
    if compute.kernels == DETERMINISTIC_KERNELS:
        raise ConfigError(
            f"compute.kernels {compute.kernels}: the nodes' answers must be added in order as "
            "well; use --deterministic"
        )
    if any(place.kernels == "cpu" and place.is_gpu for place in places):
        raise ConfigError(
            "compute.kernels cpu: a GPU has none of these; leave it at auto, or "
            "--attention-device and --expert-device at cpu"
        )
    # Plain torch reads tensors on the host, which a graph cannot capture.
    is_plain = compute.kernels == "reference" and not on_cpu
    return msgspec.structs.replace(
        compute,
        kernels=places[0].kernels,
        expert_kernels=places[1].kernels,
        recordings=compute.recordings and not is_plain,
    )


def _m2n(
    m2n: M2NSection,
    nodes: Nodes,
    compute: ComputeSection,
    *,
    dtype: str,
    measured: LayoutChoice | None,
) -> tuple[LinkSpec, Wait]:
    """Return the link, and how nodes wait."""
    transport = m2n.transport
    if transport == "auto":
        transport = auto_transport(nodes) if measured is None else measured.transport
    plain: Payload = "fp32" if dtype == "float32" else "bf16"
    payload = plain if m2n.payload == "auto" else m2n.payload
    natural_wait: Wait = "spin" if compute.layout == "split" else "block"
    check_options(
        nodes,
        transport,
        payload="auto" if payload == plain else payload,
        layout=compute.layout,
    )
    rows = GPU_WINDOW_ROWS if transport == "cuda_ipc" else WINDOW_ROWS
    link = LinkSpec(
        transport=transport,
        payload=payload,
        window_rows=rows if m2n.window_rows is None else m2n.window_rows,
        latency_us=m2n.link_latency_us,
        gbps=m2n.link_gbps,
        deadline_s=m2n.deadline_s,
    )
    return link, natural_wait if m2n.wait == "auto" else m2n.wait


def _check_copies(redundant_experts: int, num_nodes: int, num_experts: int) -> None:
    """Check that second copies fit the slots that expert nodes can have."""
    most = num_experts * (num_nodes - 1) if num_nodes else 0
    if redundant_experts > most:
        raise ConfigError(
            f"--redundant-experts {redundant_experts}: {num_nodes} expert nodes hold "
            f"{most} second copies of {num_experts} experts at most, never two on one node"
        )
