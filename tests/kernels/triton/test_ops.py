"""A GPU's ops through the interface, called as the nodes call them, against the reference.

Every op runs under NoSync, as in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.dispatch import select_ops
from kernels.triton.attention import launches
from tests.kernels.cases.against_reference import compare_all
from tests.kernels.cases.ops import OPS
from tests.kernels.triton.tiles import SMALL_TILES
from tests.pairwise import cover_pairs, cover_values

# What tests of their own call by default.
LONG = ("paged_attention", "grouped_mlp", "rotate_and_store", "norm_rotate_and_store", "route")


@pytest.mark.parametrize(
    ("cover", "name"),
    [
        *((cover_values, name) for name in OPS if name not in LONG),
        *(pytest.param(cover_values, name, marks=pytest.mark.slow) for name in LONG),
        *(pytest.param(cover_pairs, name, marks=pytest.mark.slow) for name in OPS),
    ],
)
def test_an_op_gives_the_numbers_of_the_reference(
    cover: Any, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value of its factors, and slow each pair of values."""
    monkeypatch.setattr(launches, "attention_tiles", lambda *_: SMALL_TILES)
    op, ops = OPS[name], select_ops("triton", torch.float32, device=str(device))
    compare_all(op, ops, device, cover(*op.factors.values()))
