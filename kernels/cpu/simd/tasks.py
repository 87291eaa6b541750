"""The tasks of a kernel: threads claim them, finish them, and wait until all are done.

Owns the header of a kernel's block: for each of NUM_PHASES phases a count of claimed and a count of
finished tasks, all 0 when the kernel begins. A kernel may be run by any number of threads, and a
thread may come when others are done: it then finds nothing to claim. Nobody waits for a thread that
has no task, so a thread that has lost its core holds up nobody; that is why there is no barrier.

A kernel returns when all its tasks are done, so that the next one may read its results:

    task = claim_task(block, 0)
    while task < num_tasks:
        ...
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)

A kernel that one thread runs alone claims nothing. It may leave its work to Python
(`leave_undone`), since only the thread that began a program can go there.

Knows no kernel. Used by `kernels.cpu.compiled` and `m2n_comm.host.frames.hops`, inside compiled
functions only.
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir
from numba.core import types

from kernels.cpu.simd.lanes import I32, I64, call, constant, cpu_has, operation, pointer

NUM_PHASES: Final = 4
HEADER_BYTES: Final = 64
# Looks of a waiting thread before it yields to others.
SPINS: Final = 2000

_PHASE_BYTES: Final = 16
assert NUM_PHASES * _PHASE_BYTES <= HEADER_BYTES

# The header of a kernel that one thread runs alone: whether it is done, how many threads sleep
# until then, and whether Python is to do it.
IS_DONE, NUM_SLEEPERS, IS_UNDONE = range(0, 24, 8)


def _word(builder: ir.IRBuilder, block: ir.Value, phase: ir.Value, offset: int) -> ir.Value:
    begin = builder.add(block, builder.mul(phase, constant(_PHASE_BYTES)))
    return pointer(builder, builder.add(begin, constant(offset)), I64)


@operation(types.int64, [types.int64, types.int64])
def claim_task(builder: ir.IRBuilder, block: ir.Value, phase: ir.Value) -> ir.Value:
    """Return the number of a task that no other thread has: 0, 1, 2 and so on."""
    claims = _word(builder, block, phase, 0)
    return builder.atomic_rmw("add", claims, constant(1), "monotonic")


@operation(types.none, [types.int64, types.int64])
def finish_task(builder: ir.IRBuilder, block: ir.Value, phase: ir.Value) -> None:
    """Count a claimed task as done; what this thread has written is visible to who waits."""
    builder.atomic_rmw("add", _word(builder, block, phase, 8), constant(1), "release")


@operation(types.none, [types.int64])
def leave_undone(builder: ir.IRBuilder, block: ir.Value) -> None:
    """Let Python do the work of this kernel, which one thread runs alone."""
    builder.store(constant(1), pointer(builder, builder.add(block, constant(IS_UNDONE)), I64))


@operation(types.none, [types.int64, types.int64, types.int64])
def wait_for_tasks(
    builder: ir.IRBuilder, block: ir.Value, phase: ir.Value, count: ir.Value
) -> None:
    """Wait until `count` tasks of a phase are done; yields after SPINS looks."""
    before = builder.block
    done = _word(builder, block, phase, 8)
    look, again = builder.append_basic_block("look"), builder.append_basic_block("again")
    after = builder.append_basic_block("done")
    builder.branch(look)
    builder.position_at_end(look)
    looks = builder.phi(I32)
    looks.add_incoming(ir.Constant(I32, 0), before)
    seen = builder.load_atomic(done, "acquire", 8)
    builder.cbranch(builder.icmp_signed("<", seen, count), again, after)
    builder.position_at_end(again)
    if cpu_has("sse2"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    with builder.if_then(builder.icmp_signed(">", looks, ir.Constant(I32, SPINS))):
        call(builder, "sched_yield", I32, [])
    looks.add_incoming(builder.add(looks, ir.Constant(I32, 1)), builder.block)
    builder.branch(look)
    builder.position_at_end(after)
