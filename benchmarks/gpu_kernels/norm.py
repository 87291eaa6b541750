"""RMSNorm entries: the residual stream of a decode batch and of a chunk of a prompt.

Rows are what the op before has just written, so they are not made cold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import roofline
from benchmarks.gpu_kernels import Entry
from kernels.triton.norm import NormTiles, add_rms_norm, rms_norm

EPS = 1e-6
SIZES = ((1, 2048), (64, 2048), (128, 7168), (8192, 2048), (8192, 7168))


def norm_call(
    num_rows: int, hidden: int, device: torch.device
) -> Callable[[NormTiles | None], Tensor]:
    """Give the call with a residual of x bf16[R, H]; tiles None: those that the op chooses."""
    residual, out = torch.randn(2, num_rows, hidden, dtype=torch.bfloat16, device=device)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    # The sum would grow without bound over many calls: nothing is what is added.
    nothing = torch.zeros_like(out)
    return lambda tiles: add_rms_norm(nothing, residual, weight, eps=EPS, out=out, tiles=tiles)


def norm_entries(num_rows: int, hidden: int, device: torch.device) -> Iterator[Entry]:
    """Give the entries of x bf16[R, H], with and without a residual."""
    x, out = torch.randn(2, num_rows, hidden, dtype=torch.bfloat16, device=device)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    add = norm_call(num_rows, hidden, device)
    shape = f"{num_rows} x {hidden}"
    yield Entry(
        "rms_norm",
        shape,
        roofline.rms_norm(num_rows, hidden),
        lambda _: rms_norm(x, weight, eps=EPS, out=out),
    )
    yield Entry(
        "add_rms_norm",
        shape,
        roofline.add_rms_norm(num_rows, hidden),
        lambda _: add(None),
    )
