"""From what was asked for to what an engine does: every "auto" replaced, or a ConfigError.

Pure: knows the checkpoint's facts only as arguments. Called by `topspin serve` before anything is
started, and again when a calibration has chosen the layout.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from topspin.config import (
    CPU_KV_CACHE_BYTES,
    DETERMINISTIC_KERNELS,
    QUANTIZATIONS,
    ComputeSection,
    EngineConfig,
    Quantization,
    TopologySection,
)
from topspin.devices import (
    CPU,
    NodeRole,
    auto_micro_batches,
    auto_transport,
    check_options,
    check_transport,
    parse_device,
)
from topspin.errors import ConfigError
from topspin.limits import check_copies, check_limits


def resolve(
    config: EngineConfig, *, checkpoint_dtype: str, max_position_embeddings: int, num_experts: int
) -> EngineConfig:
    """Validate `config` and replace every "auto" by what the checkpoint says.

    `num_experts` is the number of routed experts per MoE layer; 0, for a dense model, makes
    an engine without expert nodes. Raises ConfigError naming the option, its value and what
    would do.
    """
    compute = _resolve_compute(config.compute)
    batch = config.scheduler.batch_limits(is_gpu=compute.place("attention").is_gpu)
    config = msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, **batch._asdict())
    )
    check_limits(config)
    _check_quantization(config.model.quantization, compute, has_experts=num_experts > 0)
    dtype = config.model.dtype
    if dtype == "auto":
        # float16 checkpoints run in bfloat16: CPUs have no fast float16 matmul.
        dtype = "float32" if checkpoint_dtype == "float32" else "bfloat16"
    max_model_len = config.model.max_model_len or max_position_embeddings
    if max_model_len > max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model has positions up to "
            f"{max_position_embeddings}"
        )
    topology = _resolve_topology(config.topology, num_experts)
    check_copies(config.balance.redundant_experts, topology.expert_nodes, num_experts)
    cache = config.cache
    if cache.kv_cache_bytes is None and compute.attention_device == CPU:
        cache = msgspec.structs.replace(cache, kv_cache_bytes=CPU_KV_CACHE_BYTES)
    settled = msgspec.structs.replace(config, topology=topology, compute=compute)
    transport = config.m2n.transport
    transport = auto_transport(settled.nodes) if transport == "auto" else transport
    check_transport(settled.nodes, transport)
    check_options(
        settled.nodes,
        transport,
        payload=config.m2n.payload,
        wait=config.m2n.wait,
        link_latency_us=config.m2n.link_latency_us,
        link_gbps=config.m2n.link_gbps,
        gpu_streams=compute.gpu_streams,
        layout=compute.layout,
    )
    micro_batches = config.scheduler.micro_batches
    if micro_batches is None:
        micro_batches = auto_micro_batches(settled.nodes, transport, compute.gpu_streams)
    names = config.model.served_names or (Path(config.model.path).name,)
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(
            config.model, dtype=dtype, max_model_len=max_model_len, served_names=names
        ),
        topology=topology,
        scheduler=msgspec.structs.replace(config.scheduler, micro_batches=micro_batches),
        compute=compute,
        cache=cache,
        m2n=msgspec.structs.replace(config.m2n, transport=transport),
    )


def _resolve_topology(topology: TopologySection, num_experts: int) -> TopologySection:
    """Check that expert nodes have something to hold; a dense model has none."""
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


def _resolve_compute(compute: ComputeSection) -> ComputeSection:
    """Check devices; choose the kernels that --deterministic needs or refuse others."""
    compute = msgspec.structs.replace(
        compute,
        attention_device=parse_device("--attention-device", compute.attention_device),
        expert_device=parse_device("--expert-device", compute.expert_device),
    )
    places = compute.place("attention"), compute.place("expert")
    on_cpu = not any(place.is_gpu for place in places)
    if compute.deterministic:
        if compute.kernels not in ("auto", "cpu", DETERMINISTIC_KERNELS):
            raise ConfigError(
                f"--deterministic with --kernels {compute.kernels}: their sums depend on the "
                "batch; leave --kernels at auto"
            )
        if not on_cpu:
            raise ConfigError(
                "--deterministic: only the kernels for the CPU add in a fixed order; leave "
                "--attention-device and --expert-device at cpu"
            )
        return msgspec.structs.replace(compute, kernels=DETERMINISTIC_KERNELS)
    if compute.kernels == DETERMINISTIC_KERNELS:
        raise ConfigError(
            f"--kernels {compute.kernels}: the nodes' answers must be added in order as well; "
            "use --deterministic"
        )
    if any(place.kernels == "cpu" and place.is_gpu for place in places):
        raise ConfigError(
            "--kernels cpu: a GPU has none of these; leave --kernels at auto, or "
            "--attention-device and --expert-device at cpu"
        )
    if compute.kernels == "auto" and on_cpu:
        return msgspec.structs.replace(compute, kernels="cpu")
    if compute.kernels == "reference" and not on_cpu:
        # Plain torch looks at tensors from the host, which no graph can hold.
        return msgspec.structs.replace(compute, cuda_graphs=False)
    return compute


def _check_quantization(
    quantization: Quantization, compute: ComputeSection, *, has_experts: bool
) -> None:
    """Refuse kernels, of either role, that do not know weights in so many bits."""
    known = [name for name, modes in QUANTIZATIONS.items() if quantization in modes]
    roles: tuple[NodeRole, ...] = ("attention", "expert") if has_experts else ("attention",)
    for role in roles:
        place = compute.place(role)
        if quantization != "none" and place.kernels not in known:
            asked = "--deterministic" if compute.deterministic else f"--kernels {place.kernels}"
            raise ConfigError(
                f"--quantization {quantization} with {asked} on {role} nodes: only the kernels "
                f"{' and '.join(known)} compute with such weights; leave one of the two out"
            )
