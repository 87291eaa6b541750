"""`topspin serve`: the engine configuration that its flags mean, and the start.

Owns what each flag (topspin.cli.flags) is in a section of topspin.config. Everything that
can be refused is refused here, before a process is started. Called by topspin.cli.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

import msgspec

from models.config import load_model_config
from models.hub import resolve_model
from server.gateway.sampling_defaults import load_sampling_defaults
from topspin.cli.flags import ServeArguments
from topspin.cli.quantization import describe_loss
from topspin.config import (
    BalanceSection,
    CacheSection,
    ComputeSection,
    EngineConfig,
    FailoverSection,
    GatewaySection,
    M2NSection,
    ModelSection,
    SchedulerSection,
    TopologySection,
    TraceSection,
)
from topspin.devices import TRITON, assign_devices
from topspin.errors import ConfigError
from topspin.launch.calibrate import calibrate
from topspin.launch.engine import launch
from topspin.launch.gpu_check import check_gpus
from topspin.limits import MAX_MICRO_BATCHES
from topspin.resolve import resolve
from topspin.units import parse_size


def engine_config(arguments: ServeArguments) -> EngineConfig:
    """Return the resolved configuration that `arguments` mean.

    Raises ConfigError naming the flag or the model that cannot be served, and why.
    """
    path = resolve_model(arguments.model)
    model = load_model_config(path)
    settle = partial(
        resolve,
        checkpoint_dtype=model.dtype,
        max_position_embeddings=model.context_length,
        num_experts=model.moe.num_experts if model.moe is not None else 0,
    )
    sections = _sections(arguments, path)
    load_sampling_defaults(path, sections.gateway.generation_config)
    resolved = settle(sections)
    if resolved.compute.layout != "auto":
        return resolved
    # Whatever can be refused has been; the transport may still be chosen with the layout.
    asked = msgspec.structs.replace(resolved, m2n=sections.m2n)
    return settle(calibrate(asked, emit=_to_stderr))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _sections(arguments: ServeArguments, path: Path) -> EngineConfig:
    """Fill the sections, unresolved."""
    names = tuple(arguments.served_model_name)
    if not names and not Path(arguments.model).expanduser().is_dir():
        # A hub id or the default model; the name of its cache folder says nothing.
        names = (arguments.model,)
    return EngineConfig(
        model=ModelSection(
            path=str(path.resolve()),
            served_names=names,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            quantization=arguments.quantization,
        ),
        topology=TopologySection(
            attention_nodes=arguments.attention_nodes, expert_nodes=arguments.expert_nodes
        ),
        scheduler=SchedulerSection(
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            micro_batches=_micro_batches(arguments.micro_batches),
            prefix_caching=arguments.enable_prefix_caching,
            max_queued_requests=arguments.max_queued_requests,
            max_preemptions=arguments.max_preemptions,
        ),
        cache=CacheSection(
            block_size=arguments.block_size,
            kv_cache_bytes=(
                parse_size(arguments.kv_cache_memory, option="--kv-cache-memory")
                if arguments.kv_cache_memory is not None
                else None
            ),
            gpu_memory_utilization=(
                arguments.gpu_memory_utilization
                if arguments.gpu_memory_utilization is not None
                else CacheSection().gpu_memory_utilization
            ),
        ),
        m2n=M2NSection(
            transport=arguments.transport,
            payload=arguments.m2n_payload,
            wait=arguments.m2n_wait,
            window_rows=arguments.m2n_window_rows,
            link_latency_us=arguments.link_latency_us,
            link_gbps=arguments.link_gbps,
            deadline_s=arguments.step_deadline,
        ),
        compute=ComputeSection(
            kernels=arguments.kernels,
            num_threads=arguments.num_threads,
            deterministic=arguments.deterministic,
            layout=arguments.layout,
            spin_count=arguments.omp_spin_count,
            attention_device=arguments.attention_device,
            expert_device=arguments.expert_device,
            cuda_graphs=not arguments.enforce_eager,
            gpu_streams=arguments.gpu_streams,
        ),
        balance=BalanceSection(
            redundant_experts=arguments.redundant_experts,
            interval_s=arguments.expert_balance_interval,
            min_gain=arguments.expert_balance_min_gain,
            half_life_pairs=arguments.expert_load_half_life,
        ),
        trace=TraceSection(enabled=arguments.trace, num_stamps=arguments.trace_stamps),
        gateway=GatewaySection(
            host=arguments.host,
            port=arguments.port,
            generation_config=arguments.generation_config,
            allowed_origins=arguments.allowed_origins,
        ),
        failover=FailoverSection(
            restart=arguments.restart == "on",
            restart_deadline_s=arguments.restart_deadline,
            halt_deadline_s=arguments.halt_deadline,
            progress_deadline_s=arguments.progress_deadline,
        ),
    )


def _micro_batches(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"--micro-batches {text}: must be auto or between 1 and {MAX_MICRO_BATCHES}"
        ) from None


def serve(arguments: ServeArguments) -> int:
    """Run an engine until it is stopped; returns the exit status (see launch).

    Raises ConfigError before any process is started, EngineError if one cannot be.
    """
    config = engine_config(arguments)
    check_packages(config)
    devices = assign_devices(config.nodes, transport=config.m2n.transport)
    check_gpus((*devices.attention, *devices.experts))
    for option in without_effect(arguments, config):
        _to_stderr(f"topspin: {option} has no effect: attention is not on a GPU")
    if (loss := describe_loss(config.model, config.nodes)) is not None:
        _to_stderr(loss)
    return launch(config)


def without_effect(arguments: ServeArguments, config: EngineConfig) -> list[str]:
    """Return the options that were given and change nothing on the devices of `config`."""
    given = {
        "--gpu-memory-utilization": arguments.gpu_memory_utilization is not None,
        "--enforce-eager": arguments.enforce_eager,
    }
    if config.nodes.attention.is_device:
        return []
    return [option for option, is_given in given.items() if is_given]


def check_packages(config: EngineConfig) -> None:
    """Raise ConfigError if `config` needs a package that is not installed; imports none."""
    if config.m2n.transport == "nixl" and importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            "--transport nixl: the nixl package is not installed; install it with "
            "pip install 'topspin[rdma]', or use --transport shm or tcp"
        )
    for place in config.nodes.attention, config.nodes.experts:
        if place.kernels == TRITON and importlib.util.find_spec("triton") is None:
            raise ConfigError(
                f"--kernels {TRITON}, which {place.device} needs: the triton package is not "
                "installed; torch's builds for GPUs bring it"
            )
