"""Every processor's form of the products of bytes against torch's integers."""

from __future__ import annotations

import ctypes
import re
from itertools import product

import llvmlite.binding as llvm
import pytest
import torch
from llvmlite import ir
from torch import Tensor

from kernels.cpu.quantised import BITS, quantise
from kernels.cpu.simd import integers
from kernels.cpu.simd.integers import GROUP, ROW_GROUP_BYTES, dot_tile
from kernels.cpu.simd.lanes import I64, LANES
from tests.kernels.matrices import slow_rows
from topspin.plan.precision import Format

# By processor, as LLVM names them: the features that choose the form, and its instruction.
FORMS = {
    "sapphirerapids": (("avx512vnni", "avx512f", "avx2"), "vpdpbusd.*%zmm"),
    "alderlake": (("avxvnni", "avx2"), "vpdpbusd.*%ymm"),
    "haswell": (("avx2",), "vpmaddubsw.*%ymm"),
    "x86-64": ((), ""),
}
NUM_GROUPS = 3


def compile_tile(processor: str, rows: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the LLVM IR of a function `tile`, in the form of a processor."""
    features = FORMS[processor][0]
    monkeypatch.setattr(integers, "cpu_has", lambda *names: set(names) <= set(features))
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    dot_tile.__wrapped__(rows, bits)(builder, *function.args)
    builder.ret_void()
    return str(module)


def run_tile(text: str, weight: Tensor, rows: Tensor) -> Tensor:
    """Call `tile` with u8 data of a block and u8[R, groups * ROW_GROUP_BYTES]."""
    module = llvm.parse_assembly(text)
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    out = torch.empty(len(rows), LANES)
    places = torch.tensor([row.data_ptr() for row in rows], dtype=torch.int64)
    arguments = (weight.data_ptr(), NUM_GROUPS, places.data_ptr(), out.data_ptr())
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    kind(engine.get_function_address("tile"))(*arguments)
    return out


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
        ],
    ),
)
def test_products_of_bytes_are_exact(
    processor: str, mode: Format, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the largest codes, whose products fill the words in which they are added."""
    torch.manual_seed(0)
    most = 2 ** BITS[mode] - 1
    codes = torch.randint(0, most + 1, (LANES, NUM_GROUPS, GROUP))
    codes[::2] = most
    # A zero and the largest code in each group make its step 1 and its lowest number 0.
    codes[..., 5], codes[..., 6] = 0, most
    rows = torch.randint(-127, 128, (num_rows, NUM_GROUPS, GROUP), dtype=torch.int8)
    rows[0, 0], rows[0, 1] = 127, -127
    weight = quantise(codes.flatten(1).float() + 1, mode)
    text = compile_tile(processor, num_rows, BITS[mode], monkeypatch)
    features, instruction = FORMS[processor]
    machine = llvm.Target.from_triple("x86_64-unknown-linux").create_target_machine(cpu=processor)
    assert re.search(instruction, machine.emit_assembly(llvm.parse_assembly(text)))
    present = llvm.get_host_cpu_features()
    if not all(present.get(feature, False) for feature in features):
        return
    wanted = rows.flatten(1).long() @ (codes.flatten(1) + 1).T
    assert torch.equal(run_tile(text, weight.data, as_row_groups(rows)), wanted.float())
