"""Vectors of sixteen lanes for kernels that numba compiles.

Owns two numba types, F32x16 and I32x16, the functions that write operations on them in LLVM
IR, and the operations on scalars in memory (`kernels.cpu.simd.vectors`: those on vectors). LLVM
splits the vectors on processors with narrower registers, so every kernel runs everywhere;
only the bf16 dot product has two forms: AVX512-BF16's instruction, and shifts and
multiplications where the processor lacks it. Memory is given by int64 addresses
(`tensor.data_ptr()`), since a call that unpacks arrays takes longer than a small kernel.

The lanes of an I32x16 often hold 32 bf16 numbers, two per lane, the even one in the lower half.
Knows no tensor and no kernel. The operations work inside compiled functions only; used by
`kernels.cpu.compiled`.

A new operation is a function from an IR builder and operands to the result:

    @operation(F32x16, [F32x16, F32x16])
    def add(builder, a, b):
        return builder.fadd(a, b)

and code compiled by numba calls `add(x, y)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import register_model

LANES: Final = 16
# Features of the processor, by LLVM's names and with commas between them, which no kernel uses.
HIDDEN_VARIABLE: Final = "TOPSPIN_HIDDEN_CPU_FEATURES"
ALL_FEATURES: Final = "all"

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
F32_LANES, I32_LANES = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_LANE_NAMES: Final = {"float": "f32", "i32": "i32", "i16": "i16", "i8": "i8"}
_INDICES = ir.Constant(I32_LANES, list(range(LANES)))


class Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat)

    def __hash__(self) -> int:
        return hash(Bfloat)


class Vector(types.Type):
    """A numba type whose values are LLVM vectors of type `lanes`."""

    def __init__(self, name: str, lanes: ir.VectorType) -> None:
        super().__init__(name=name)
        self.lanes = lanes


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.lanes)


F32x16 = Vector("F32x16", F32_LANES)
I32x16 = Vector("I32x16", I32_LANES)


def cpu_has(*features: str) -> bool:
    """Return whether this processor has all of LLVM's `features` and may use them."""
    hidden = os.environ.get(HIDDEN_VARIABLE, "").split(",")
    present = llvmlite.binding.get_host_cpu_features()
    return ALL_FEATURES not in hidden and all(
        present.get(feature, False) and feature not in hidden for feature in features
    )


Emit = Callable[..., ir.Value]


def operation(
    result: types.Type, operands: Sequence[types.Type], *, apart: bool = False
) -> Callable[[Emit], Callable[..., Any]]:
    """Return a decorator: compiled code can call the IR that `emit`(builder, *values) writes.

    `apart`: it is a function of its own, which is not inlined. For loops over tiles: together with
    the loops around them LLVM 22 has dropped and misplaced some of their writes.
    """

    def register(emit: Emit) -> Callable[..., Any]:
        def lower(context: Any, builder: ir.IRBuilder, _: Any, values: Any) -> ir.Value:
            if apart:
                written = builder.call(_function_of(builder.module, emit, result, values), values)
            else:
                written = emit(builder, *values)
            return context.get_dummy_value() if result is types.none else written

        template = type(
            emit.__name__,
            (ConcreteTemplate,),
            {"key": emit, "cases": [signature(result, *operands)]},
        )
        infer_global(emit, types.Function(template))
        lower_builtin(emit, *operands)(lower)
        return emit

    return register


def _function_of(
    module: ir.Module, emit: Emit, result: types.Type, values: Sequence[ir.Value]
) -> ir.Function:
    """Return the function of this module that does what `emit` writes; a vector or nothing."""
    name = f"{emit.__module__}.{emit.__qualname__}.{id(emit)}"
    known = module.globals.get(name)
    if known is not None:
        return known
    returned = result.lanes if isinstance(result, Vector) else ir.VoidType()
    kind = ir.FunctionType(returned, [value.type for value in values])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    written = emit(builder, *function.args)
    if isinstance(result, Vector):
        builder.ret(written)
    else:
        builder.ret_void()
    return function


# The functions that operations are made of.


def pointer(builder: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    """Make an address i64 a pointer."""
    return builder.inttoptr(address, to.as_pointer())


def load(builder: ir.IRBuilder, address: ir.Value, what: ir.Type) -> ir.Value:
    """Read a value at any multiple of two bytes."""
    return builder.load(pointer(builder, address, what), align=2)


def store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write a value at any multiple of two bytes."""
    builder.store(value, pointer(builder, address, value.type), align=2)


def constant(number: int) -> ir.Constant:
    """Return an i64."""
    return ir.Constant(I64, number)


def lanes_of(kind: ir.VectorType, number: float) -> ir.Constant:
    """Return the vector constant with `number` in all lanes."""
    return ir.Constant(kind, [number] * LANES)


def broadcast(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Return the vector all of whose lanes are `scalar`."""
    kind = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, lanes_of(I32_LANES, 0))


def call(
    builder: ir.IRBuilder, function: str, result: ir.Type, operands: Sequence[ir.Value]
) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    known = builder.module.globals.get(function)
    return builder.call(known or ir.Function(builder.module, kind, function), operands)


def count_up(
    builder: ir.IRBuilder,
    count: ir.Value,
    carried: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """Write a loop over 0 <= index < count (i64) with values carried between iterations."""
    before = builder.block
    head = builder.append_basic_block("head")
    turn = builder.append_basic_block("turn")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(constant(0), before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, count), turn, after)
    builder.position_at_end(turn)
    results = body(index, list(values))
    for phi, value in zip(values, results, strict=True):
        phi.add_incoming(value, builder.block)
    index.add_incoming(builder.add(index, constant(1)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return a * b + c of F32 lanes, rounded once."""
    return call(builder, "llvm.fma.v16f32", F32_LANES, [a, b, c])


def even_numbers(builder: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    """Widen the lower bf16 of each lane to fp32."""
    return builder.bitcast(builder.shl(pairs, lanes_of(I32_LANES, 16)), F32_LANES)


def odd_numbers(builder: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    """Widen the upper bf16 of each lane to fp32."""
    return builder.bitcast(builder.and_(pairs, lanes_of(I32_LANES, 0xFFFF0000)), F32_LANES)


def dot_pairs(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Add to each lane of total (fp32) the two products of the bf16 pairs of a and b."""
    if cpu_has("avx512bf16", "avx512f"):
        kind = ir.VectorType(Bfloat(), 2 * LANES)
        return call(
            builder,
            "llvm.x86.avx512bf16.dpbf16ps.512",
            F32_LANES,
            [total, builder.bitcast(a, kind), builder.bitcast(b, kind)],
        )
    total = fused(builder, odd_numbers(builder, a), odd_numbers(builder, b), total)
    return fused(builder, even_numbers(builder, a), even_numbers(builder, b), total)


def first_lanes(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Return the mask of the first `count` (i64, any number) lanes."""
    return builder.icmp_signed("<", _INDICES, broadcast(builder, builder.trunc(count, I32)))


def load_first(
    builder: ir.IRBuilder, address: ir.Value, kind: ir.VectorType, count: ir.Value
) -> ir.Value:
    """Read the first `count` lanes; the others are 0 and not read from memory."""
    where = pointer(builder, address, kind)
    return either(
        builder,
        count,
        lambda: load(builder, address, kind),
        lambda: masked_load(builder, where, kind, count),
    )


def masked_load(
    builder: ir.IRBuilder, where: ir.Value, kind: ir.VectorType, count: ir.Value
) -> ir.Value:
    """Read the first `count` lanes at a pointer; the others are 0 and not read from memory."""
    name = f"llvm.masked.load.v16{_LANE_NAMES[str(kind.element)]}.p0"
    operands = [where, ir.Constant(I32, 2), first_lanes(builder, count), lanes_of(kind, 0)]
    return call(builder, name, kind, operands)


def store_first(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value) -> None:
    """Write the first `count` lanes, and no other memory."""
    name = f"llvm.masked.store.v16{_LANE_NAMES[str(value.type.element)]}.p0"
    where = pointer(builder, address, value.type)

    def masked() -> None:
        operands = [value, where, ir.Constant(I32, 2), first_lanes(builder, count)]
        call(builder, name, ir.VoidType(), operands)

    either(builder, count, lambda: store(builder, address, value), masked)


def either(
    builder: ir.IRBuilder,
    count: ir.Value,
    whole: Callable[[], ir.Value | None],
    masked: Callable[[], ir.Value | None],
) -> ir.Value | None:
    """Do `whole` if `count` (i64) covers all lanes, else `masked`; return the value, if any.

    Only AVX512 masks bytes and words in hardware: elsewhere a masked access is a branch per lane.
    """
    if cpu_has("avx512bw"):
        return masked()
    covers = builder.icmp_signed(">=", count, constant(LANES))
    with builder.if_else(covers) as (then, otherwise):
        with then:
            first, first_block = whole(), builder.block
        with otherwise:
            second, second_block = masked(), builder.block
    if first is None or second is None:
        return None
    joined = builder.phi(first.type)
    joined.add_incoming(first, first_block)
    joined.add_incoming(second, second_block)
    return joined


def rounded(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the bf16 nearest to each float, in the lower halves of i32 lanes."""
    bits = builder.bitcast(value, I32_LANES)
    last = builder.and_(builder.lshr(bits, lanes_of(I32_LANES, 16)), lanes_of(I32_LANES, 1))
    up = builder.add(builder.add(bits, lanes_of(I32_LANES, 0x7FFF)), last)
    quiet = builder.or_(bits, lanes_of(I32_LANES, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.lshr(builder.select(is_nan, quiet, up), lanes_of(I32_LANES, 16))


def paired(builder: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Round two vectors to bf16 and put them into the lower and upper halves of i32 lanes."""
    upper = builder.shl(rounded(builder, odd), lanes_of(I32_LANES, 16))
    return builder.or_(rounded(builder, even), upper)


def sum_each(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """Return the vector whose lane i is the sum of the lanes of vectors[i]; 16 vectors.

    Each of four rounds halves the number of vectors: it adds two halves of two vectors at once.
    """
    rows = list(vectors)
    width = LANES // 2
    while width:
        # After this round a vector's lanes with bit `width` clear belong to the first.
        half = len(rows) // 2
        rows = [
            builder.fadd(*exchanged(builder, a, b, width))
            for a, b in zip(rows[:half], rows[half:], strict=True)
        ]
        width //= 2
    return rows[0]


def exchanged(
    builder: ir.IRBuilder, a: ir.Value, b: ir.Value, width: int
) -> tuple[ir.Value, ir.Value]:
    """Exchange the lanes of a with bit `width` set for the lanes of b without it."""
    low = [lane if not lane & width else (lane ^ width) + LANES for lane in range(LANES)]
    high = [lane + width if not lane & width else lane + LANES for lane in range(LANES)]
    return shuffled(builder, a, b, low), shuffled(builder, a, b, high)


def shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(I32_LANES, list(lanes)))


# Scalars in memory.


@operation(types.int64, [types.int64])
def read_i64(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read an i64."""
    return load(builder, address, I64)


@operation(types.int64, [types.int64])
def read_i32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read an i32."""
    return builder.sext(load(builder, address, I32), I64)


@operation(types.float32, [types.int64])
def read_f32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read a float."""
    return load(builder, address, F32)


@operation(types.float64, [types.int64])
def read_f64(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read a double."""
    return load(builder, address, ir.DoubleType())


@operation(types.none, [types.int64, types.float64])
def write_f64(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write a double."""
    store(builder, address, value)


@operation(types.none, [types.int64, types.int64])
def write_i32(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write the lower half of an i64."""
    store(builder, address, builder.trunc(value, I32))


@operation(types.none, [types.int64, types.int64])
def write_i8(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write the lowest byte of an i64."""
    byte = builder.trunc(value, ir.IntType(8))
    builder.store(byte, pointer(builder, address, byte.type), align=1)


@operation(types.int64, [types.int64])
def read_u8(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read an unsigned byte."""
    return builder.zext(builder.load(pointer(builder, address, ir.IntType(8)), align=1), I64)


@operation(types.float32, [types.int64])
def read_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read a bf16 number."""
    bits = builder.zext(load(builder, address, ir.IntType(16)), I32)
    return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)


@operation(types.none, [types.int64, types.int64])
def write_i64(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write an i64."""
    store(builder, address, value)


@operation(types.none, [types.int64, types.float32])
def write_f32(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write a float."""
    store(builder, address, value)


@operation(types.none, [types.int64, types.int64])
def call_with(builder: ir.IRBuilder, function: ir.Value, argument: ir.Value) -> None:
    """Call a C function of one i64."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    builder.call(pointer(builder, function, kind), [argument])


@operation(types.none, [types.int64, types.int64])
def prefetch(builder: ir.IRBuilder, address: ir.Value, num_bytes: ir.Value) -> None:
    """Prefetch the cache lines of memory that may be read later."""
    lines = builder.sdiv(builder.add(num_bytes, constant(63)), constant(64))

    def ask(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        line = builder.add(address, builder.mul(index, constant(64)))
        where = pointer(builder, line, I64)
        hints = [ir.Constant(I32, hint) for hint in (0, 3, 1)]
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [where, *hints])
        return []

    count_up(builder, lines, [], ask)


STACK_BYTES: Final = "num_bytes"
"""The attribute of a stack()'s operation that says its size, which is part of a kernel's code."""


def stack(num_bytes: int) -> Callable[..., Any]:
    """Return an operation that reserves stack memory in the calling kernel; it returns the address.

    The memory is the kernel's until it returns; its content is undefined.
    """

    def reserve(builder: ir.IRBuilder) -> ir.Value:
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(ir.IntType(8), num_bytes))
            memory.align = 64
            return builder.ptrtoint(memory, I64)

    found = operation(types.int64, [])(reserve)
    setattr(found, STACK_BYTES, num_bytes)
    return found
