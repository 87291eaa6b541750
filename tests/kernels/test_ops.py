"""Every op of the host's kernels against the reference: each pair of values of its factors."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import select_ops
from tests.kernels.cases.against_reference import HOST, compare_all
from tests.kernels.cases.ops import OPS
from tests.pairwise import cover_pairs


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kernels", ["cpu", "deterministic"])
def test_an_op_gives_the_numbers_of_the_reference(kernels: str, name: str) -> None:
    op = OPS[name]
    compare_all(op, select_ops(kernels, torch.float32), HOST, cover_pairs(*op.factors.values()))
