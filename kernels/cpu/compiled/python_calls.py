"""Python in a recorded step: done again at the same place of every replay.

`call_again` is for what takes a step's time seldom, as the way of rows to another node does once
per range of layers. Knows no step. Used by attention_nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels.cpu.compiled.runtime import Kernel, record, recording
from kernels.cpu.simd.tasks import leave_undone


def call_again(action: Callable[[], None]) -> None:
    """Call `action`; if this thread is recording(), every replay calls it too, on one thread.

    Nothing that it does is recorded, so it must find its numbers where they are at each replay.
    """
    record(call_python, (), action)
    with recording(None):
        action()


@Kernel
def call_python(block: int) -> None:
    """Leave all to Python."""
    leave_undone(block)
