"""Turns the settings asked for into an engine's: replaces every "auto", or raises ConfigError.

Pure: knows the checkpoint's facts, and a measured layout, only as arguments. Called by
`topspin serve` before anything is started; all later code gets concrete values.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from topspin.config import (
    CPU_KV_CACHE_BYTES,
    DETERMINISTIC_KERNELS,
    GPU_WINDOW_ROWS,
    QUANTIZATIONS,
    WINDOW_ROWS,
    ComputeSection,
    EngineConfig,
    M2NSection,
    ModelSection,
    Payload,
    SchedulerSection,
    TopologySection,
)
from topspin.cores import DEFAULT_LAYOUT, LayoutChoice
from topspin.devices import (
    CPU,
    NodeRole,
    Nodes,
    auto_micro_batches,
    auto_transport,
    check_options,
    check_transport,
    parse_device,
)
from topspin.errors import ConfigError
from topspin.settings import check_ranges
from topspin.units import check_origins


def resolve(
    config: EngineConfig,
    *,
    checkpoint_dtype: str,
    max_position_embeddings: int,
    num_experts: int,
    shares_prefixes: bool = True,
    measured: LayoutChoice | None = None,
) -> EngineConfig:
    """Validate `config` and replace every "auto", by the checkpoint's facts above all.

    `num_experts` is the number of routed experts per MoE layer; 0, for a dense model, makes an
    engine without expert nodes. `shares_prefixes`: a token's key and value depend only on the
    tokens before it. `measured` is the layout for "auto" (None: the default). Raises ConfigError
    naming the setting, its value and a fix.
    """
    check_ranges(config)
    check_origins(config.gateway.allowed_origins)
    topology = _topology(config.topology, num_experts)
    compute = _compute(config.compute, measured)
    nodes = compute.nodes(topology)
    scheduler = _scheduler(config.scheduler, nodes, shares_prefixes=shares_prefixes)
    _check_quantization(config.model, nodes, deterministic=compute.deterministic)
    _check_copies(config.balance.redundant_experts, topology.expert_nodes, num_experts)
    model = _model(config.model, checkpoint_dtype, max_position_embeddings)
    m2n = _m2n(config.m2n, nodes, compute, dtype=model.dtype, measured=measured)
    if scheduler.micro_batches is None:
        auto = auto_micro_batches(nodes, m2n.transport, compute.gpu_streams)
        scheduler = msgspec.structs.replace(scheduler, micro_batches=auto)
    cache = config.cache
    if cache.kv_cache_bytes is None and compute.attention_device == CPU:
        cache = msgspec.structs.replace(cache, kv_cache_bytes=CPU_KV_CACHE_BYTES)
    return msgspec.structs.replace(
        config,
        model=model,
        topology=topology,
        scheduler=scheduler,
        compute=compute,
        cache=cache,
        m2n=m2n,
    )


def _model(model: ModelSection, checkpoint_dtype: str, max_positions: int) -> ModelSection:
    dtype = model.dtype
    if dtype == "auto":
        # float16 checkpoints run in bfloat16: CPUs have no fast float16 matmul.
        dtype = "float32" if checkpoint_dtype == "float32" else "bfloat16"
    max_model_len = model.max_model_len or max_positions
    if max_model_len > max_positions:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model has positions up to {max_positions}"
        )
    names = model.served_names or (Path(model.path).name,)
    return msgspec.structs.replace(
        model, dtype=dtype, max_model_len=max_model_len, served_names=names
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


def _scheduler(
    scheduler: SchedulerSection, nodes: Nodes, *, shares_prefixes: bool
) -> SchedulerSection:
    limits = scheduler.batch_limits(is_gpu=nodes.attention.is_gpu)
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {limits.max_num_batched_tokens} is less than "
            f"--max-num-seqs {limits.max_num_seqs}: not every running sequence could "
            "advance by a token in a step"
        )
    return msgspec.structs.replace(
        scheduler,
        **limits._asdict(),
        prefix_caching=scheduler.prefix_caching and shares_prefixes,
    )


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
        cuda_graphs=compute.cuda_graphs and not is_plain,
    )


def _m2n(
    m2n: M2NSection,
    nodes: Nodes,
    compute: ComputeSection,
    *,
    dtype: str,
    measured: LayoutChoice | None,
) -> M2NSection:
    transport = m2n.transport
    if transport == "auto":
        transport = auto_transport(nodes) if measured is None else measured.transport
    check_transport(nodes, transport)
    plain: Payload = "fp32" if dtype == "float32" else "bf16"
    payload = plain if m2n.payload == "auto" else m2n.payload
    natural_wait = "spin" if compute.layout == "split" else "block"
    check_options(
        nodes,
        transport,
        payload="auto" if payload == plain else payload,
        wait="auto" if m2n.wait == natural_wait else m2n.wait,
        link_latency_us=m2n.link_latency_us,
        link_gbps=m2n.link_gbps,
        gpu_streams=compute.gpu_streams,
        layout=compute.layout,
    )
    rows = GPU_WINDOW_ROWS if transport == "cuda_ipc" else WINDOW_ROWS
    return msgspec.structs.replace(
        m2n,
        transport=transport,
        payload=payload,
        wait=natural_wait if m2n.wait == "auto" else m2n.wait,
        window_rows=rows if m2n.window_rows is None else m2n.window_rows,
    )


def _check_quantization(model: ModelSection, nodes: Nodes, *, deterministic: bool) -> None:
    """Raise ConfigError if either role's kernels do not support the quantization."""
    known = [name for name, modes in QUANTIZATIONS.items() if model.quantization in modes]
    roles: list[NodeRole] = ["attention", "expert"] if nodes.num_experts else ["attention"]
    for role in roles:
        place = nodes.attention if role == "attention" else nodes.experts
        if model.quantization != "none" and place.kernels not in known:
            asked = "--deterministic" if deterministic else f"compute.kernels {place.kernels}"
            raise ConfigError(
                f"--quantization {model.quantization} with {asked} on {role} nodes: only the "
                f"kernels {' and '.join(known)} compute with such weights; leave one of the two "
                "out"
            )


def _check_copies(redundant_experts: int, num_nodes: int, num_experts: int) -> None:
    """Check that second copies fit the slots that expert nodes can have."""
    most = num_experts * (num_nodes - 1) if num_nodes else 0
    if redundant_experts > most:
        raise ConfigError(
            f"--redundant-experts {redundant_experts}: {num_nodes} expert nodes hold "
            f"{most} second copies of {num_experts} experts at most, never two on one node"
        )
