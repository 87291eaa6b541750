"""Operations compiled in the form of a processor: its machine code, and functions to call here."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from kernels.cpu.simd.lanes import F32, I64

_C_TYPES = {I64: ctypes.c_int64, F32: ctypes.c_float}


class Form(NamedTuple):
    """The features of a processor that choose a form, and the form's instruction."""

    features: Sequence[str]
    instruction: str


def compile_form(
    processor: str,
    form: Form,
    module: ModuleType,
    operations: Mapping[str, tuple[Callable[..., object], Sequence[ir.Type]]],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any] | None:
    """Write operations of a module as a processor, by LLVM's name, has them.

    Its machine code has the form's instruction. Returns functions of C by name, None where this
    processor cannot run them; they hold what they need.
    """
    monkeypatch.setattr(module, "cpu_has", lambda *names: set(names) <= set(form.features))
    written = ir.Module()
    for name, (operation, operands) in operations.items():
        function = ir.Function(written, ir.FunctionType(ir.VoidType(), operands), name)
        builder = ir.IRBuilder(function.append_basic_block())
        operation(builder, *function.args)
        builder.ret_void()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple("x86_64-unknown-linux").create_target_machine(cpu=processor)
    assembly = machine.emit_assembly(llvm.parse_assembly(str(written)))
    assert re.search(form.instruction, assembly)
    present = llvm.get_host_cpu_features()
    if not all(present.get(feature, False) for feature in form.features):
        return None
    host = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=present.flatten()
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(written)), host)
    engine.finalize_object()
    found = {}
    for name, (_, operands) in operations.items():
        kind = ctypes.CFUNCTYPE(None, *(_C_TYPES[each] for each in operands))
        found[name] = kind(engine.get_function_address(name))
        found[name].engine = engine
    return found
