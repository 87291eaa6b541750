"""Every processor's form of the scores of coded keys against torch's integers."""

from __future__ import annotations

import ctypes
import re

import llvmlite.binding as llvm
import pytest
import torch
from llvmlite import ir

from kernels.contracts import NUM_CENTROIDS, NUM_SUBSPACES, SEGMENT_KEYS
from kernels.cpu.simd import retrieval
from kernels.cpu.simd.lanes import F32, I64
from kernels.cpu.simd.retrieval import GREATEST, KEYS_AT_ONCE

# By processor, as LLVM names them: the features that choose the form, and its instruction.
FORMS = {
    "sapphirerapids": (("avx512vbmi", "avx512bw", "avx2"), "vpermb.*%zmm"),
    "skylake-avx512": (("avx512bw", "avx2"), "vpshufb.*%zmm"),
    "haswell": (("avx2",), "vpshufb.*%ymm"),
    "x86-64": ((), ""),
}
OPERANDS = {"quantise_table": [I64, F32, I64], "look_up": [I64] * 4}
C_TYPES = {
    "quantise_table": [ctypes.c_int64, ctypes.c_float, ctypes.c_int64],
    "look_up": [ctypes.c_int64] * 4,
}


def write(processor: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the LLVM IR of both operations as functions, in the form of a processor."""
    features = FORMS[processor][0]
    monkeypatch.setattr(retrieval, "cpu_has", lambda *names: set(names) <= set(features))
    module = ir.Module()
    for name, operands in OPERANDS.items():
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), operands), name)
        builder = ir.IRBuilder(function.append_basic_block())
        getattr(retrieval, name)(builder, *function.args)
        builder.ret_void()
    return str(module)


@pytest.mark.parametrize("processor", FORMS)
def test_scores_are_sums_of_rounded_entries(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the least and the greatest sums, whose bytes must not overflow."""
    rng = torch.Generator().manual_seed(0)
    table = torch.randn(NUM_SUBSPACES, NUM_CENTROIDS, generator=rng) * GREATEST / 40
    table[:, 0], table[:, 1] = GREATEST / NUM_SUBSPACES + 0.4, -GREATEST / NUM_SUBSPACES - 0.4
    table[:, 2] = -GREATEST / NUM_SUBSPACES + 1
    codes = torch.randint(NUM_CENTROIDS, (NUM_SUBSPACES, SEGMENT_KEYS), generator=rng).byte()
    codes[:, 0], codes[:, 1], codes[:, 2] = 0, 1, 2
    before = torch.randint(-1000, 1000, (SEGMENT_KEYS,), generator=rng).short()
    before[:3] = -30000
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = write(processor, monkeypatch)
    features, instruction = FORMS[processor]
    target = llvm.Target.from_triple("x86_64-unknown-linux")
    assembly = target.create_target_machine(cpu=processor).emit_assembly(llvm.parse_assembly(text))
    assert re.search(instruction, assembly)
    present = llvm.get_host_cpu_features()
    if not all(present.get(feature, False) for feature in features):
        return
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=present.flatten()
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    quantise_table, look_up = (
        ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address(name))
        for name, kinds in C_TYPES.items()
    )
    entries = torch.empty(NUM_SUBSPACES * NUM_CENTROIDS, dtype=torch.int16)
    doubled = table * 2
    quantise_table(doubled.data_ptr(), 0.5, entries.data_ptr())
    count, scores = SEGMENT_KEYS // KEYS_AT_ONCE - 1, before.clone()
    look_up(entries.data_ptr(), codes.data_ptr(), scores.data_ptr(), count)
    sums = table.round().gather(1, codes.long()).sum(0).short()
    assert torch.equal(scores[:-KEYS_AT_ONCE], torch.maximum(before, sums)[:-KEYS_AT_ONCE])
    assert torch.equal(scores[-KEYS_AT_ONCE:], before[-KEYS_AT_ONCE:])
