"""Every entry of the GPU benchmark, in the order in which it is timed.

Owns the list: a kernel's module beside this one has sizes and a function that makes entries
of one size; here each size is a job, made when its turn comes, so that its tensors go before
the next one's. Each module is imported when its jobs are asked for, so that one that cannot
be imported leaves the others. Knows no clock. Called by benchmarks.gpu_rooflines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import torch

from benchmarks.gpu_kernels import L2_BYTES, Entry

SMALL_CACHE: Final = 4096
"""Bytes that stand for a device's cache where sizes are tiny."""


@dataclass(frozen=True)
class Job:
    """One size of one op; `make` gives its entries."""

    name: str
    has_goal: bool
    make: Callable[[], Iterable[Entry]]


JobsOf = Callable[[torch.device, bool], list[Job]]
"""(device, whether sizes are tiny) -> a module's jobs."""


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Put jobs with a goal first, because time may be short for the others."""
    # What is alike keeps its order: jobs that share their weights stay together.
    return sorted(jobs, key=lambda job: not job.has_goal)


def attention_jobs(device: torch.device, is_tiny: bool) -> list[Job]:
    """Decode, verification and prefill."""
    from benchmarks.gpu_kernels import attention
    from benchmarks.gpu_kernels.rotary import Heads

    tiny = attention.Batch("decode", 2, 1, 20, Heads(4, 2, 16))
    cache_bytes = SMALL_CACHE if is_tiny else L2_BYTES

    def job(batch: attention.Batch) -> Job:
        def make() -> Iterable[Entry]:
            yield attention.attention_entry(batch, device, cache_bytes)

        return Job(f"attention {batch.op}", batch.goal is not None, make)

    return [job(batch) for batch in ((tiny,) if is_tiny else attention.BATCHES)]


def mlp_jobs(device: torch.device, is_tiny: bool) -> list[Job]:
    """The experts in every format of weights, which jobs of one format share."""
    from benchmarks.gpu_kernels import grouped_mlp
    from kernels.triton.grouped_mlp.weights import FORMATS

    layer = grouped_mlp.Layer(4, 2, 32, 16) if is_tiny else grouped_mlp.QWEN3_30B
    cache_bytes = SMALL_CACHE if is_tiny else L2_BYTES
    experts = lru_cache(maxsize=1)(partial(grouped_mlp.random_experts, layer, device=device))

    def job(weight_format: str, num_rows: int) -> Job:
        def make() -> Iterable[Entry]:
            weights = experts(weight_format)
            yield grouped_mlp.mlp_entry(num_rows, layer, weights, device, cache_bytes)

        has_goal = weight_format == "plain" and num_rows in grouped_mlp.GOALS
        return Job(f"grouped_mlp {weight_format}", has_goal, make)

    if is_tiny:
        return [job("plain", 3)]
    return [job(name, num_rows) for name in FORMATS for num_rows in grouped_mlp.ROWS]


def linear_jobs(device: torch.device, is_tiny: bool) -> list[Job]:
    """Projections and the LM head in every format of weights."""
    from benchmarks.gpu_kernels import linear

    cache_bytes = SMALL_CACHE if is_tiny else L2_BYTES

    def job(matrix: linear.Matrix, weight_format: str, num_rows: int) -> Job:
        def make() -> Iterable[Entry]:
            yield linear.linear_entry(num_rows, matrix, weight_format, device, cache_bytes)

        return Job(f"linear {weight_format}", False, make)

    if is_tiny:
        return [job(linear.Matrix("o", 16, 32), "int8", 2)]
    return [
        job(matrix, weight_format, num_rows)
        for matrix in linear.MATRICES
        for weight_format in linear.FORMATS_OF[matrix]
        for num_rows in linear.rows_of(matrix)
    ]


def m2n_jobs(device: torch.device, is_tiny: bool) -> list[Job]:
    """Dispatch and combine of an attention node, gather and reply of an expert node."""
    from benchmarks.gpu_kernels import m2n

    tiny = m2n.Exchange(2, 32, 4, 2, 2, torch.bfloat16)
    tiny_service = m2n.Service(2, 2, 32, 2, 2, torch.bfloat16)

    def job(exchange: m2n.Exchange) -> Job:
        def make() -> Iterable[Entry]:
            yield m2n.exchange_entry(exchange, device)

        return Job("m2n", exchange.num_rows == m2n.GOAL_ROWS, make)

    def service_job(service: m2n.Service) -> Job:
        def make() -> Iterable[Entry]:
            yield m2n.service_entry(service, device)

        return Job("m2n", False, make)

    return [
        *(job(exchange) for exchange in ((tiny,) if is_tiny else m2n.EXCHANGES)),
        *(service_job(service) for service in ((tiny_service,) if is_tiny else m2n.SERVICES)),
    ]


def rotary_jobs(device: torch.device, is_tiny: bool) -> list[Job]:
    """QK-norm, rotation and KV write."""
    from benchmarks.gpu_kernels import rotary

    heads = rotary.Heads(4, 2, 16) if is_tiny else rotary.QWEN3_30B

    def job(num_rows: int, dtype: torch.dtype) -> Job:
        def make() -> Iterable[Entry]:
            yield rotary.rotary_entry(num_rows, heads, dtype, device)

        return Job("rotary", False, make)

    if is_tiny:
        return [job(2, torch.bfloat16)]
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    return [job(num_rows, dtype) for num_rows in rotary.SIZES for dtype in dtypes]


def norm_jobs(device: torch.device, is_tiny: bool) -> list[Job]:
    """RMSNorm with and without a residual."""
    from benchmarks.gpu_kernels import norm

    return [
        Job("norm", False, partial(norm.norm_entries, num_rows, hidden, device))
        for num_rows, hidden in (((2, 32),) if is_tiny else norm.SIZES)
    ]


def router_jobs(device: torch.device, is_tiny: bool) -> list[Job]:
    """Routing and grouping."""
    from benchmarks.gpu_kernels import router

    if is_tiny:
        sizes = [(2, router.Router(4, 2))]
    else:
        shapes = (router.QWEN3_30B, router.DEEPSEEK_V3)
        sizes = [(num_rows, shape) for shape in shapes for num_rows in router.ROWS]
    return [
        Job("router", False, partial(router.router_entries, num_rows, shape, device))
        for num_rows, shape in sizes
    ]


def sampling_jobs(device: torch.device, is_tiny: bool) -> list[Job]:
    """Sampling with several settings."""
    from benchmarks.gpu_kernels import sampling

    def job(name: str, num_rows: int, vocab: int) -> Job:
        def make() -> Iterable[Entry]:
            yield sampling.sampling_entry(name, num_rows, vocab, device)

        return Job("sampling", False, make)

    if is_tiny:
        return [job("greedy", 2, 64)]
    return [
        job(name, num_rows, sampling.VOCAB)
        for name in sampling.SETTINGS
        for num_rows in sampling.ROWS
    ]


CATALOGUE: Final[dict[str, JobsOf]] = {
    "attention": attention_jobs,
    "grouped_mlp": mlp_jobs,
    "linear": linear_jobs,
    "m2n": m2n_jobs,
    "rotary": rotary_jobs,
    "norm": norm_jobs,
    "router": router_jobs,
    "sampling": sampling_jobs,
}
"""The jobs of each module, by its name."""
