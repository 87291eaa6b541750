"""Linux as compiled code uses it: to sleep, to wake threads and processes, and for the time.

Owns the system calls. A futex is the lower half of an i64 (x86-64 is little-endian). Knows no
thread and no task. Used by `kernels.cpu.compiled`, inside compiled functions only.
"""

from __future__ import annotations

import errno
from typing import Final

from llvmlite import ir
from numba.core import types

from kernels.cpu.simd.lanes import I32, I64, call, constant, cpu_has, operation, pointer

_SYS_FUTEX: Final = 202
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129
_SYS_FADVISE64: Final = 221
_WILL_NEED: Final = 3
_EVERYONE: Final = 2**31 - 1
_MONOTONIC, _THREAD_CPUTIME = 1, 3
_NS_PER_S: Final = 10**9


def _futex(builder: ir.IRBuilder, word: ir.Value, action: int, value: ir.Value) -> None:
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    known = builder.module.globals.get("syscall")
    function = known or ir.Function(builder.module, kind, "syscall")
    builder.call(function, [constant(_SYS_FUTEX), word, constant(action), value, constant(0)])


@operation(types.none, [types.int64, types.int64])
def sleep_while(builder: ir.IRBuilder, word: ir.Value, value: ir.Value) -> None:
    """Sleep until woken if the i64 at `word` is `value`; may also return for no reason.

    A writer that changes the word, then sees that someone sleeps or may be about to, must wake.
    """
    _futex(builder, word, _WAIT_PRIVATE, value)


@operation(types.none, [types.int64])
def wake_all(builder: ir.IRBuilder, word: ir.Value) -> None:
    """Wake all threads that sleep at `word`."""
    _futex(builder, word, _WAKE_PRIVATE, constant(_EVERYONE))


@operation(types.int64, [types.int64])
def read_shared(builder: ir.IRBuilder, word: ir.Value) -> ir.Value:
    """Read an i64 that other threads write; what they wrote before it is visible afterwards."""
    return builder.load_atomic(pointer(builder, word, I64), "acquire", 8)


@operation(types.int64, [types.int64, types.int64])
def add_shared(builder: ir.IRBuilder, word: ir.Value, number: ir.Value) -> ir.Value:
    """Add to an i64 that other threads read; returns its previous value. A full fence."""
    return builder.atomic_rmw("add", pointer(builder, word, I64), number, "seq_cst")


@operation(types.int64, [types.int64, types.int64])
def exchange_shared(builder: ir.IRBuilder, word: ir.Value, number: ir.Value) -> ir.Value:
    """Write an i64 that others read; returns its previous value. A full fence."""
    return builder.atomic_rmw("xchg", pointer(builder, word, I64), number, "seq_cst")


@operation(types.none, [types.int64])
def ring(builder: ir.IRBuilder, bell: ir.Value) -> None:
    """Add 1 to an eventfd; one whose counter is full has woken its reader already."""
    with builder.goto_entry_block():
        memory = builder.alloca(I64)
    builder.store(constant(1), memory)
    kind = ir.FunctionType(I64, [ir.IntType(32), I64, I64])
    known = builder.module.globals.get("write")
    function = known or ir.Function(builder.module, kind, "write")
    address = builder.ptrtoint(memory, I64)
    builder.call(function, [builder.trunc(bell, ir.IntType(32)), address, constant(8)])


@operation(types.int64, [types.int64, types.int64, types.int64, types.int64])
def read_file(
    builder: ir.IRBuilder, fd: ir.Value, target: ir.Value, num_bytes: ir.Value, offset: ir.Value
) -> ir.Value:
    """Read from a file to the address `target`; returns how many bytes, negative: none."""
    kind = ir.FunctionType(I64, [ir.IntType(32), I64, I64, I64])
    known = builder.module.globals.get("pread64")
    function = known or ir.Function(builder.module, kind, "pread64")
    arguments = [builder.trunc(fd, ir.IntType(32)), target, num_bytes, offset]
    return builder.call(function, arguments)


@operation(types.none, [types.int64, types.int64, types.int64])
def ask_file(builder: ir.IRBuilder, fd: ir.Value, offset: ir.Value, num_bytes: ir.Value) -> None:
    """Ask for a part of a file that will be read; does not wait for it."""
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    known = builder.module.globals.get("syscall")
    function = known or ir.Function(builder.module, kind, "syscall")
    builder.call(function, [constant(_SYS_FADVISE64), fd, offset, num_bytes, constant(_WILL_NEED)])


WOULD_WAIT: Final = -errno.EAGAIN
MAY_RETRY: Final = -errno.EINTR


def _pass_message(
    builder: ir.IRBuilder, name: str, fd: ir.Value, message: ir.Value, flags: ir.Value
) -> ir.Value:
    kind = ir.FunctionType(I64, [I32, I64, I32])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    passed = builder.call(function, [builder.trunc(fd, I32), message, builder.trunc(flags, I32)])
    name = "__errno_location"
    place = builder.module.globals.get(name)
    place = place or ir.Function(builder.module, ir.FunctionType(I32.as_pointer(), []), name)
    number = builder.sext(builder.load(builder.call(place, [])), I64)
    has_failed = builder.icmp_signed("<", passed, constant(0))
    return builder.select(has_failed, builder.neg(number), passed)


@operation(types.int64, [types.int64, types.int64, types.int64])
def receive_message(
    builder: ir.IRBuilder, fd: ir.Value, message: ir.Value, flags: ir.Value
) -> ir.Value:
    """Read what a socket has into the segments of a struct msghdr at `message`.

    Returns the number of bytes, 0 at the end of the connection; or WOULD_WAIT, MAY_RETRY, or
    another negative errno.
    """
    return _pass_message(builder, "recvmsg", fd, message, flags)


@operation(types.int64, [types.int64, types.int64, types.int64])
def send_message(
    builder: ir.IRBuilder, fd: ir.Value, message: ir.Value, flags: ir.Value
) -> ir.Value:
    """Send the segments of a struct msghdr; returns the number of bytes or as receive_message."""
    return _pass_message(builder, "sendmsg", fd, message, flags)


@operation(types.int64, [types.int64] * 6)
def call_function(builder: ir.IRBuilder, function: ir.Value, *arguments: ir.Value) -> ir.Value:
    """Call a C function of up to five integers or pointers, which returns an int."""
    kind = ir.FunctionType(I32, [I64] * 5)
    place = builder.inttoptr(function, kind.as_pointer())
    return builder.sext(builder.call(place, arguments), I64)


@operation(types.none, [])
def pause(builder: ir.IRBuilder) -> None:
    """Tell the processor that this thread looks at a word in a loop."""
    if cpu_has("sse2"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


@operation(types.none, [])
def yield_core(builder: ir.IRBuilder) -> None:
    """Let another thread that is ready have this core."""
    call(builder, "sched_yield", ir.IntType(32), [])


@operation(types.int64, [])
def now_ns(builder: ir.IRBuilder) -> ir.Value:
    """Return CLOCK_MONOTONIC."""
    return _clock(builder, _MONOTONIC)


@operation(types.int64, [])
def thread_ns(builder: ir.IRBuilder) -> ir.Value:
    """Return the time that this thread has had a core."""
    return _clock(builder, _THREAD_CPUTIME)


def _clock(builder: ir.IRBuilder, clock: int) -> ir.Value:
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(I64, 2))
    address = builder.ptrtoint(memory, I64)
    kind = ir.FunctionType(I32, [I32, I64])
    known = builder.module.globals.get("clock_gettime")
    function = known or ir.Function(builder.module, kind, "clock_gettime")
    builder.call(function, [ir.Constant(I32, clock), address])
    seconds = builder.load(pointer(builder, address, I64))
    rest = builder.load(pointer(builder, builder.add(address, constant(8)), I64))
    return builder.add(builder.mul(seconds, constant(_NS_PER_S)), rest)


@operation(types.none, [types.int64])
def sleep_ns(builder: ir.IRBuilder, duration: ir.Value) -> None:
    """Sleep for that long, and for the kernel's timer slack; a signal may end it early."""
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(I64, 2))
    address = builder.ptrtoint(memory, I64)
    second = constant(_NS_PER_S)
    builder.store(builder.sdiv(duration, second), pointer(builder, address, I64))
    rest = pointer(builder, builder.add(address, constant(8)), I64)
    builder.store(builder.srem(duration, second), rest)
    kind = ir.FunctionType(I32, [I64, I64])
    known = builder.module.globals.get("nanosleep")
    function = known or ir.Function(builder.module, kind, "nanosleep")
    builder.call(function, [address, constant(0)])
