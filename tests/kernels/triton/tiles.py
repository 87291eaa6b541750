"""Tiles and splits small enough that the tests' few numbers fill several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.sampling import SampleResult
from kernels.triton.attention.launches import AttentionTiles
from kernels.triton.ops import TritonOps
from kernels.triton.sampling import launches as triton_sampling

SMALL_TILES = AttentionTiles(
    max_short_len=8,
    short_keys=16,
    min_chunk=16,
    max_splits=4,
    long_rows=16,
    long_keys=16,
    short_warps=1,
    long_warps=1,
)
"""Small enough that short contexts fill several blocks, splits and tiles of rows."""


def small_splits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SampleResult]:
    """Return the GPU's, which cuts the tests' few scores into several splits of several blocks."""
    for name, size in (("SPLIT_SIZE", 128), ("BLOCK", 64), ("TALLY_BLOCK", 64)):
        monkeypatch.setattr(triton_sampling, name, size)

    def sample(logits: Tensor, *arguments: Any, **options: Any) -> SampleResult:
        result = TritonOps().sample(logits.to(device), *arguments, **options)
        return SampleResult(*(None if each is None else each.cpu() for each in result))

    return sample
