"""RMSNorm entries: the residual stream of a decode batch and of a chunk of a prompt.

Rows are what the op before has just written, so they are not made cold.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import roofline
from benchmarks.gpu_kernels import Entry
from kernels.triton_norm import add_rms_norm, rms_norm

EPS = 1e-6
SIZES = ((1, 2048), (64, 2048), (128, 7168), (8192, 2048), (8192, 7168))


def norm_entries(num_rows: int, hidden: int, device: torch.device) -> Iterator[Entry]:
    """Give the entries of x bf16[R, H], with and without a residual."""
    x, residual, out = torch.randn(3, num_rows, hidden, dtype=torch.bfloat16, device=device)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    # The sum would grow without bound over many calls: nothing is what is added.
    nothing = torch.zeros_like(x)
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
        lambda _: add_rms_norm(nothing, residual, weight, eps=EPS, out=out),
    )
