"""Every processor's form of the products of bytes against torch's integers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.cpu.quantised import BITS, quantise
from kernels.cpu.simd import integers
from kernels.cpu.simd.integers import GROUP, ROW_GROUP_BYTES, dot_tile
from kernels.cpu.simd.lanes import I64, LANES
from tests.kernels.cases.matrices import slow_rows
from tests.kernels.cpu.simd.forms import Form, compile_form
from topspin.plan.precision import E2M1_INTEGERS, E2M1_ZERO, Format

# By processor, as LLVM names them.
FORMS = {
    "sapphirerapids": Form(("avx512vnni", "avx512f", "avx512bw", "avx2"), "vpdpbusd.*%zmm"),
    "alderlake": Form(("avxvnni", "avx2"), "vpdpbusd.*%ymm"),
    "haswell": Form(("avx2",), "vpmaddubsw.*%ymm"),
    "x86-64": Form((), ""),
}
NUM_GROUPS = 3


def as_row_groups(codes: Tensor) -> Tensor:
    """Return rows i8[R, groups, GROUP] as the kernels keep them, with scales of 1."""
    sums = codes.sum(-1, dtype=torch.float32)[..., None]
    pieces = (codes.view(torch.uint8), torch.ones_like(sums).view(torch.uint8))
    whole = torch.cat((*pieces, sums.view(torch.uint8)), dim=-1)
    assert whole.shape[-1] == ROW_GROUP_BYTES
    return whole.flatten(1)


@pytest.mark.parametrize(
    ("processor", "mode", "num_rows"),
    slow_rows(
        product(FORMS, sorted(BITS), [1, 4]),
        beside=[
            (processor, mode, 4 if row % 2 else 1)
            for row, (processor, mode) in enumerate(product(FORMS, sorted(BITS)))
            if (processor, mode) not in (("x86-64", "int4"), ("x86-64", "mxfp4"))
        ],
    ),
)
def test_products_of_bytes_are_exact(
    processor: str, mode: Format, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the largest codes, whose products fill the words in which they are added."""
    torch.manual_seed(0)
    most = 24 if mode == "mxfp4" else 2 ** BITS[mode] - 1
    codes = torch.randint(0, most + 1, (LANES, NUM_GROUPS, GROUP))
    codes[::2] = most
    # A zero and the largest code in each group make its step 1 and its lowest number 0.
    codes[..., 5], codes[..., 6] = 0, most
    lowest = 1
    if mode == "mxfp4":  # whose lowest number is given by its step
        codes, lowest = torch.tensor(E2M1_INTEGERS)[codes % 16], -E2M1_ZERO
        codes[::2], codes[..., 5], codes[..., 6] = most, 0, most
    rows = torch.randint(-127, 128, (num_rows, NUM_GROUPS, GROUP), dtype=torch.int8)
    rows[0, 0], rows[0, 1] = 127, -127
    weight = quantise(codes.flatten(1).float() + lowest, mode)
    operations = {"tile": (dot_tile.__wrapped__(num_rows, BITS[mode]), [I64] * 4)}
    compiled = compile_form(processor, FORMS[processor], integers, operations, monkeypatch)
    if compiled is None:
        return
    out, row_groups = torch.empty(num_rows, LANES), as_row_groups(rows)
    places = torch.tensor([row.data_ptr() for row in row_groups], dtype=torch.int64)
    compiled["tile"](weight.data.data_ptr(), NUM_GROUPS, places.data_ptr(), out.data_ptr())
    wanted = rows.flatten(1).long() @ (codes.flatten(1) + lowest).T
    assert torch.equal(out, wanted.float())
