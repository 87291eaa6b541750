"""A device that does queued work only when waited for, so that a missing wait shows.

Tensors are the host's and kernels run when they are called. Only effects that the host could see
too early are delayed: a copy to a pinned buffer arrives when a later event happens (the buffer
holds rubbish before), and a pinned buffer that was copied from must not change until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.runtime import Event, HostRuntime, Stream

RUBBISH = 0xA5


class DelayedRuntime(HostRuntime):
    """A Runtime with delayed copies; use as a context manager around all code that copies."""

    is_asynchronous = True  # type: ignore[misc,assignment]

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None] | DelayedEvent] = deque()
        # By address. Buffers are kept, so that no new tensor gets the address of a freed one.
        self._pinned: dict[int, Tensor] = {}
        self._stream = _DelayedStream(self)
        self._mode = _Copies(self)
        self.num_waits = 0
        self.now_s = 0.0

    def __enter__(self) -> DelayedRuntime:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)

    def current_stream(self) -> Stream:
        return self._stream

    def host_buffer(self, num_bytes: int) -> Tensor:
        buffer = super().host_buffer(num_bytes)
        self._pinned[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    @property
    def is_busy(self) -> bool:
        """Say whether queued work is left."""
        return bool(self._queue)

    def synchronize(self) -> None:
        while self._queue:
            self.go_on()

    def record(self) -> DelayedEvent:
        event = DelayedEvent(self)
        self._queue.append(event)
        return event

    def go_on(self) -> None:
        """Do the next queued item."""
        item = self._queue.popleft()
        if isinstance(item, DelayedEvent):
            self.now_s += 1.0
            item.at_s = self.now_s
        else:
            item()

    def finish(self, event: Event) -> None:
        """Do queued items until `event` has happened."""
        while not event.is_done():
            self.go_on()

    def copied(self, to: Tensor, source: Tensor) -> bool:
        """Record a copy; return whether it will be done later."""
        if to.untyped_storage().data_ptr() in self._pinned:
            late = source.clone()
            to.fill_(RUBBISH)
            self._queue.append(lambda: _copy(to, late))
            return True
        if source.untyped_storage().data_ptr() in self._pinned:
            sent = source.clone()

            def check() -> None:
                assert torch.equal(source, sent), "a pinned buffer changed during its copy"

            self._queue.append(check)
        return False


def _copy(to: Tensor, source: Tensor) -> None:
    to.numpy()[...] = source.numpy()


class DelayedEvent:
    """An event that happens when the runtime reaches it in its queue."""

    def __init__(self, runtime: DelayedRuntime) -> None:
        self._runtime = runtime
        self.at_s: float | None = None

    def wait(self) -> None:
        self._runtime.num_waits += not self.is_done()
        self._runtime.finish(self)

    def is_done(self) -> bool:
        return self.at_s is not None

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, DelayedEvent)
        assert self.at_s is not None
        assert earlier.at_s is not None
        return self.at_s - earlier.at_s


class _DelayedStream:
    def __init__(self, runtime: DelayedRuntime) -> None:
        self._runtime = runtime

    def record(self, *, timed: bool = False) -> DelayedEvent:
        return self._runtime.record()


class _Copies(TorchDispatchMode):
    def __init__(self, runtime: DelayedRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._runtime.copied(args[0], args[1]):
            return args[0]
        return func(*args, **(kwargs or {}))
