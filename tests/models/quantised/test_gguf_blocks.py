"""GGUF's blocks against the `gguf` library's dequantisation, and as kernels hold their codes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from kernels.cpu.quantised import QuantisedOps
from models.quantised.coded import StoredMatrix
from models.quantised.gguf_blocks import unpack
from models.quantised.scheme import GGUF_SCHEMES
from topspin.plan.precision import Format

WIDTH = 512


def blocks(kind: Kind, num_rows: int, *, seed: int = 0) -> np.ndarray:
    """Return rows of blocks of random bytes, with scales that are finite, of both signs."""
    rng = np.random.default_rng(seed)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    found = rng.integers(0, 256, (num_rows, WIDTH // per_block, size), dtype=np.uint8)
    if kind == Kind.MXFP4:
        found[..., 0] %= 250  # an exponent
        return found.reshape(num_rows, -1)
    num_scales = 2 if kind in (Kind.Q4_1, Kind.Q4_K, Kind.Q5_1, Kind.Q5_K) else 1
    scales = rng.normal(0, 0.1, (num_rows, WIDTH // per_block, num_scales)).astype(np.float16)
    where = slice(-2, None) if kind == Kind.Q6_K else slice(0, 2 * num_scales)
    found[..., where] = scales.view(np.uint8)
    return found.reshape(num_rows, -1)


def unpacked(kind: Kind, data: np.ndarray) -> StoredMatrix:
    return unpack(torch.from_numpy(data), GGUF_SCHEMES[kind.name], torch.float32)


def library(kind: Kind, data: np.ndarray) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", [Kind[name] for name in GGUF_SCHEMES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_numbers_are_the_librarys_bit_for_bit(kind: Kind, num_rows: int) -> None:
    data = blocks(kind, num_rows)
    found = unpacked(kind, data)
    assert torch.equal(found.dequantised(), library(kind, data))
    assert int(found.codes.max()) < 1 << found.bits


@pytest.mark.parametrize(
    ("kind", "weight_format"),
    [(Kind.Q4_0, "int4"), (Kind.Q4_1, "int4"), (Kind.Q5_0, "int8"), (Kind.Q8_0, "int8")],
)
def test_kernels_multiply_the_codes_themselves(kind: Kind, weight_format: Format) -> None:
    """With steps and lows of bf16's digits, and rows of 8 bits, only the sums are rounded."""
    data = blocks(kind, 48).reshape(48, WIDTH // 32, -1)
    where = slice(0, 4 if kind == Kind.Q4_1 else 2)
    steps = data[..., where].copy().view(np.float16).astype(np.float32)
    steps = torch.from_numpy(steps).bfloat16().half().numpy()
    data[..., where] = steps.view(np.uint8)
    data = data.reshape(48, -1)
    rng = np.random.default_rng(1)
    codes = rng.integers(-127, 128, (3, WIDTH // 32, 32))
    codes[..., 0] = 127  # so that a row's own steps are powers of two
    rows = torch.from_numpy(codes.reshape(3, WIDTH) / 64).float()
    ops = QuantisedOps()
    weight = ops.pack_linear(unpacked(kind, data), weight_format)
    assert weight.weight_format == weight_format
    expected = rows.double() @ library(kind, data).double().t()
    found = ops.linear(rows, weight).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
