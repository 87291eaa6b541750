"""What numbers settings may have, with the message that names the flag of one that may not.

Pure. Called by topspin.resolve.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from topspin.errors import ConfigError

if TYPE_CHECKING:
    from topspin.config import EngineConfig

MAX_MICRO_BATCHES = 4
# Nodes speak every topspin.progress.INTERVAL_S.
MIN_PROGRESS_DEADLINE_S = 2.0


def in_range(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{option} {value}: must be between {low} and {high}")


def not_negative(option: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{option} {value}: must be a number, not negative")


def positive(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option} {value}: must be a positive number")


def check_copies(redundant_experts: int, num_nodes: int, num_experts: int) -> None:
    """Check the second copies against what the expert nodes can hold."""
    most = num_experts * (num_nodes - 1) if num_nodes else 0
    if redundant_experts > most:
        raise ConfigError(
            f"--redundant-experts {redundant_experts}: {num_nodes} expert nodes hold "
            f"{most} second copies of {num_experts} experts at most, never two on one node"
        )


def check_limits(config: EngineConfig) -> None:
    """Check every numeric limit; raises ConfigError for the first that does not hold."""
    in_range("--attention-nodes", config.topology.attention_nodes, 1, 1024)
    in_range("--expert-nodes", config.topology.expert_nodes, 1, 1024)
    in_range("--max-num-seqs", config.batch.max_num_seqs, 1, 65536)
    in_range("--max-num-batched-tokens", config.batch.max_num_batched_tokens, 1, 2**20)
    in_range("--max-queued-requests", config.scheduler.max_queued_requests, 0, 2**20)
    in_range("--max-preemptions", config.scheduler.max_preemptions, 0, 2**20)
    in_range("--block-size", config.cache.block_size, 1, 1024)
    if config.cache.kv_cache_bytes is not None:
        in_range("--kv-cache-memory", config.cache.kv_cache_bytes, 1, 2**50)
    # A GPU's kernels have a program per row, of which there can be no more.
    in_range("--m2n-window-rows", config.m2n.rows_per_window, 1, 2**16 - 1)
    in_range("--port", config.gateway.port, 0, 65535)
    in_range("--trace-stamps", config.trace.num_stamps, 1, 2**21)
    in_range("--gpu-streams", config.compute.gpu_streams, 1, 2)
    if not 0 < config.cache.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {config.cache.gpu_memory_utilization:g}: must be above 0 "
            "and at most 1"
        )
    if config.model.max_model_len is not None:
        in_range("--max-model-len", config.model.max_model_len, 1, 2**24)
    if config.scheduler.micro_batches is not None:
        in_range("--micro-batches", config.scheduler.micro_batches, 1, MAX_MICRO_BATCHES)
    if config.compute.num_threads is not None:
        in_range("--num-threads", config.compute.num_threads, 1, 4096)
    if config.compute.spin_count is not None:
        in_range("--omp-spin-count", config.compute.spin_count, 0, 2**31 - 1)
    in_range("--redundant-experts", config.balance.redundant_experts, 0, 2**20)
    in_range("--expert-load-half-life", config.balance.half_life_pairs, 1, 2**30)
    not_negative("--expert-balance-interval", config.balance.interval_s)
    not_negative("--expert-balance-min-gain", config.balance.min_gain)
    not_negative("--link-latency-us", config.m2n.link_latency_us)
    if config.m2n.link_gbps is not None:
        positive("--link-gbps", config.m2n.link_gbps)
    positive("--step-deadline", config.m2n.deadline_s)
    positive("--restart-deadline", config.failover.restart_deadline_s)
    positive("--halt-deadline", config.failover.halt_deadline_s)
    positive("--progress-deadline", config.failover.progress_deadline_s)
    if config.failover.progress_deadline_s < MIN_PROGRESS_DEADLINE_S:
        raise ConfigError(
            f"--progress-deadline {config.failover.progress_deadline_s:g}: must be at least "
            f"{MIN_PROGRESS_DEADLINE_S:g}, since a node speaks twice a second"
        )
    if config.batch.max_num_batched_tokens < config.batch.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.batch.max_num_batched_tokens} is less than "
            f"--max-num-seqs {config.batch.max_num_seqs}: not every running sequence could "
            "advance by a token in a step"
        )
