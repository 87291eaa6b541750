"""Entries of products with one weight: their work, and that they run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_kernels.linear import (
    LM_HEAD,
    QKV,
    Matrix,
    linear_entry,
    linear_work,
    rows_of,
    weight_bytes,
)
from kernels.triton.grouped_mlp.weights import FORMATS, pack_weight


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_weight_has_the_bytes_of_its_tensors(weight_format: str) -> None:
    weight = pack_weight(torch.randn(200, 300).bfloat16(), weight_format)
    size = weight.data.nbytes + (0 if weight.scales is None else weight.scales.nbytes)
    assert weight_bytes(Matrix("o", 200, 300), weight_format) == size


def test_work() -> None:
    work = linear_work(3, Matrix("o", 10, 4), "plain")
    assert work.num_bytes == 10 * 4 * 2 + 3 * (4 + 10) * 2
    assert work.flops == 2 * 3 * 10 * 4
    # The LM head's results are fp32.
    assert linear_work(3, Matrix("lm_head", 10, 4), "plain").num_bytes == work.num_bytes + 3 * 20
    assert max(rows_of(LM_HEAD)) < max(rows_of(QKV))


@pytest.mark.parametrize("weight_format", ["plain", "int4"])
def test_calls_go_through_other_weights(weight_format: str, device: torch.device) -> None:
    matrix = Matrix("o", 16, 32)
    size = weight_bytes(matrix, weight_format)
    entry = linear_entry(2, matrix, weight_format, device, cache_bytes=2 * size)
    assert entry.copies == 3
    first, second, again = (entry.call(idx).clone() for idx in (0, 1, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
