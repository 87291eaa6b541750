"""Every entry of the GPU benchmark, in the order in which it is timed.

Owns the list: a kernel's module beside this one has sizes and a function that makes entries
of one size; here each size is a job, made when its turn comes, so that its tensors go before
the next one's. Jobs with a goal come first, because time may be short for the others. Knows
no clock. Called by benchmarks.gpu_rooflines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from benchmarks.gpu_kernels import (
    L2_BYTES,
    Entry,
    attention,
    grouped_mlp,
    m2n,
    norm,
    rotary,
    router,
    sampling,
)
from kernels.triton_grouped_mlp_weights import FORMATS, GpuExperts

SMALL_CACHE = 4096
"""Bytes that stand for a device's cache where sizes are tiny."""


@dataclass(frozen=True)
class Job:
    """One size of one op; `make` gives its entries."""

    name: str
    has_goal: bool
    make: Callable[[], Iterable[Entry]]


def jobs(device: torch.device) -> list[Job]:
    """Give all jobs at the sizes of real models."""
    experts = _experts_by_format(grouped_mlp.QWEN3_30B, device)
    found = [
        *(_attention(batch, device) for batch in attention.BATCHES),
        *(
            _mlp(weight_format, num_rows, grouped_mlp.QWEN3_30B, experts, device)
            for weight_format in FORMATS
            for num_rows in grouped_mlp.ROWS
        ),
        *(_m2n(exchange, device) for exchange in m2n.EXCHANGES),
        *(
            Job("rotary", False, partial(_rotary, num_rows, rotary.QWEN3_30B, dtype, device))
            for num_rows in rotary.SIZES
            for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        ),
        *(
            Job("norm", False, partial(norm.norm_entries, num_rows, hidden, device))
            for num_rows, hidden in norm.SIZES
        ),
        *(
            Job("router", False, partial(router.router_entries, num_rows, sizes, device))
            for sizes in (router.QWEN3_30B, router.DEEPSEEK_V3)
            for num_rows in router.ROWS
        ),
        *(
            Job("sampling", False, partial(_sampling, name, num_rows, sampling.VOCAB, device))
            for name in sampling.SETTINGS
            for num_rows in sampling.ROWS
        ),
    ]
    # sorted() keeps the order of those that are alike: experts of one format stay together.
    return sorted(found, key=lambda job: not job.has_goal)


def tiny_jobs(device: torch.device) -> list[Job]:
    """Give a job of each kind at sizes that Triton's interpreter runs in seconds."""
    heads = rotary.Heads(4, 2, 16)
    batch = attention.Batch("decode", 2, 1, 20, heads)
    layer = grouped_mlp.Layer(4, 2, 32, 16)
    experts = _experts_by_format(layer, device)
    return [
        _attention(batch, device, SMALL_CACHE),
        _mlp("plain", 3, layer, experts, device, SMALL_CACHE),
        _m2n(m2n.Exchange(2, 32, 4, 2, 2, torch.bfloat16), device),
        Job("rotary", False, partial(_rotary, 2, heads, torch.bfloat16, device)),
        Job("norm", False, partial(norm.norm_entries, 2, 32, device)),
        Job("router", False, partial(router.router_entries, 2, router.Router(4, 2), device)),
        Job("sampling", False, partial(_sampling, "greedy", 2, 64, device)),
    ]


def _attention(batch: attention.Batch, device: torch.device, cache_bytes: int = L2_BYTES) -> Job:
    def make() -> Iterable[Entry]:
        yield attention.attention_entry(batch, device, cache_bytes)

    return Job(f"attention {batch.op}", batch.goal is not None, make)


def _experts_by_format(
    layer: grouped_mlp.Layer, device: torch.device
) -> Callable[[str], GpuExperts]:
    """Make a format's experts once for all its jobs, as long as they follow each other."""
    return lru_cache(maxsize=1)(
        lambda weight_format: grouped_mlp.random_experts(layer, weight_format, device)
    )


def _mlp(
    weight_format: str,
    num_rows: int,
    layer: grouped_mlp.Layer,
    experts: Callable[[str], GpuExperts],
    device: torch.device,
    cache_bytes: int = L2_BYTES,
) -> Job:
    def make() -> Iterable[Entry]:
        yield grouped_mlp.mlp_entry(num_rows, layer, experts(weight_format), device, cache_bytes)

    has_goal = weight_format == "plain" and num_rows in grouped_mlp.GOALS
    return Job(f"grouped_mlp {weight_format}", has_goal, make)


def _m2n(exchange: m2n.Exchange, device: torch.device) -> Job:
    def make() -> Iterable[Entry]:
        yield m2n.exchange_entry(exchange, device)

    return Job("m2n", exchange.num_rows == 128, make)


def _rotary(
    num_rows: int, heads: rotary.Heads, dtype: torch.dtype, device: torch.device
) -> Iterable[Entry]:
    yield rotary.rotary_entry(num_rows, heads, dtype, device)


def _sampling(name: str, num_rows: int, vocab: int, device: torch.device) -> Iterable[Entry]:
    yield sampling.sampling_entry(name, num_rows, vocab, device)
