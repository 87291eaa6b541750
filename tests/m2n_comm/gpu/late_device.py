"""A device that defers all work: enqueued operations run when an event is waited for.

So a host that reads a copy without waiting for it reads old data, and one that overwrites the
source of a pending copy changes the result. Copies with non_blocking, to or from a runtime's host
buffers, are enqueued (inside `copies_are_late`); a test enqueues its computations. SlowRuntime does
the same on a real GPU, as late as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.runtime import CudaRuntime, HostRuntime

SLEEP_CYCLES = 200_000


class LateRuntime(HostRuntime):
    """One stream, in the CPU's memory; belongs to one thread."""

    is_asynchronous = True

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []
        self._num_run = 0
        self._buffers: set[int] = set()

    @property
    def num_waiting(self) -> int:
        """Return the number of enqueued operations that have not run."""
        return len(self._waiting)

    def enqueue(self, work: Callable[[], object]) -> None:
        """Run `work` after everything enqueued before it, when an event is waited for."""
        self._waiting.append(work)

    def host_buffer(self, num_bytes: int) -> Tensor:
        buffer = super().host_buffer(num_bytes)
        self._buffers.add(buffer.untyped_storage().data_ptr())
        return buffer

    def owns(self, tensor: Tensor) -> bool:
        """Say whether `tensor` lies in one of this runtime's host buffers."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def current_stream(self) -> Any:
        return self

    def record(self, *, timed: bool = False) -> Any:
        return _LateEvent(self, self._num_run + len(self._waiting))

    def synchronize(self) -> None:
        self.run_until(self._num_run + len(self._waiting))

    def run_until(self, number: int) -> None:
        """Run the first `number` operations, counted from the beginning."""
        while self._num_run < number:
            self._num_run += 1
            self._waiting.pop(0)()

    def has_run(self, number: int) -> bool:
        """Say whether `number` operations have run."""
        return self._num_run >= number


class SlowRuntime(CudaRuntime):
    """A GPU with a pause of a tenth of a millisecond before each operation."""

    def __init__(self) -> None:
        super().__init__(0)

    def enqueue(self, work: Callable[[], object]) -> None:
        """Call `work`, which enqueues something, after a pause."""
        torch.cuda._sleep(SLEEP_CYCLES)
        work()


class _LateEvent:
    def __init__(self, runtime: LateRuntime, number: int) -> None:
        self._runtime = runtime
        self._number = number

    def wait(self) -> None:
        self._runtime.run_until(self._number)

    def is_done(self) -> bool:
        return self._runtime.has_run(self._number)


@contextmanager
def copies_are_late(runtimes: Sequence[LateRuntime | SlowRuntime]) -> Iterator[None]:
    """Enqueue this thread's asynchronous copies on the runtime that has the buffer.

    A GPU does that by itself.
    """
    late = [runtime for runtime in runtimes if isinstance(runtime, LateRuntime)]
    if late:
        with _LateCopies(late):
            yield
    else:
        yield


class _LateCopies(TorchDispatchMode):
    def __init__(self, runtimes: Sequence[LateRuntime]) -> None:
        super().__init__()
        self._runtimes = runtimes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = kwargs or {}
        is_late = func is torch.ops.aten.copy_.default and (
            values.get("non_blocking") or (len(args) > 2 and args[2])
        )
        if not is_late:
            return func(*args, **values)
        target, source = args[:2]
        for runtime in self._runtimes:
            if runtime.owns(target) or runtime.owns(source):
                runtime.enqueue(lambda: func(target, source))
                return target
        raise AssertionError("an asynchronous copy of memory that no runtime has pinned")
