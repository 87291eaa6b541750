"""The interface to a device: streams, events, graphs, pinned memory, and free memory.

Owns every call into a GPU's runtime that is not a kernel, so that the code which schedules work
on a device is the same for a GPU and the host. `HostRuntime` is the host: enqueued work is done
at once, and a captured body is run again at each replay (under `NoSync`, which refuses
operations that a GPU's graph could not hold, so that tests without a GPU find them). Knows no op
and no node. Called by the nodes at start-up, by m2n_comm and by attention_nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from topspin.errors import ConfigError
from topspin.trace import Ring, Stamps

Replay = Callable[[], None]
"""Enqueues the captured work on the current stream."""


class DeviceMemory(NamedTuple):
    """Bytes of a device: in total, free, and `cached`: reserved by this process but not in use."""

    total: int
    free: int
    cached: int = 0


class Event(Protocol):
    """A point in a stream, reached when everything enqueued before it is done."""

    def wait(self) -> None:
        """Wait, on the host, until the event is reached."""

    def is_done(self) -> bool:
        """Return whether the event is reached; never waits."""

    def seconds_since(self, earlier: Event) -> float:
        """Return the time from `earlier` to this; both must be recorded timed and be reached."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def record(self, *, timed: bool = False) -> Event:
        """Return the event of all work enqueued here so far; `timed`: for Event.seconds_since."""


class Runtime(Protocol):
    """One device."""

    @property
    def device(self) -> torch.device:
        """The torch device of its tensors."""

    @property
    def is_asynchronous(self) -> bool:
        """Return whether enqueued work runs concurrently with the host."""

    def current_stream(self) -> Stream: ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return pinned, zeroed u8[num_bytes] on the host; copies to and from it do not wait."""

    def upload(self, tensor: Tensor) -> Tensor:
        """Enqueue the copy of a host's tensor to the device; return the copy.

        `tensor` is not to change any more: on the host it is its own copy.
        """

    def capture(self, body: Callable[[], None]) -> Replay:
        """Record the work that `body` enqueues; return a function that replays it.

        The replay uses the same tensors. Call `body` once before, so that kernels are compiled. It
        must not read a tensor's values on the host; tensors it makes keep their content until
        another recording runs.
        """

    def prepare_capture(self) -> None:
        """Compile and start what recordings need besides their kernels, so that no step waits."""

    def stamps_of(self, ring: Ring | None) -> Stamps | None:
        """Return what stamps `ring`; if recordings run on the host, at each replay too."""

    def call_again(self, action: Callable[[], None]) -> None:
        """Call `action`; if recordings run on the host, at each replay too."""

    def synchronize(self) -> None:
        """Wait until all enqueued work is done."""

    def memory(self) -> DeviceMemory: ...

    def reserved_bytes(self) -> int:
        """Return the bytes that this process's allocator holds, in use or not."""

    def release_cached(self) -> None:
        """Return cached memory of this process to the device; may wait for the device.

        Pieces of memory that are partly in use stay.
        """

    def reset_peak(self) -> None:
        """Reset the peak to the memory allocated now."""

    def peak_bytes(self) -> int:
        """Return the most bytes that this process has had allocated since reset_peak()."""


def open_runtime(device: str, kernels: str = "") -> Runtime:
    """Return the runtime of "cpu", "cuda" (the first GPU), or "cuda:N".

    With the `kernels` "cpu" its recordings are programs of them. Raises ConfigError for a device
    that this machine or this build of torch does not have.
    """
    if device == "cpu" and kernels == "cpu":
        from kernels.cpu.recorder import CpuRuntime

        return CpuRuntime()
    if device == "cpu":
        return HostRuntime()
    kind, colon, number = device.partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ConfigError(f"device {device!r}: must be cpu, cuda or cuda:N")
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise ConfigError(f"device {device}: torch {torch.__version__} is built without CUDA")
    count = torch.cuda.device_count()
    if int(number or 0) >= count:
        raise ConfigError(f"device {device}: {count} GPUs are visible to this process")
    return CudaRuntime(int(number or 0))


class HostRuntime:
    """The host as a device: enqueued work is done at once."""

    device: Final = torch.device("cpu")
    is_asynchronous: Final = False

    def current_stream(self) -> Stream:
        return _HOST_STREAM

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def capture(self, body: Callable[[], None]) -> Replay:
        def replay() -> None:
            with NoSync():  # type: ignore[no-untyped-call]
                body()

        return replay

    def prepare_capture(self) -> None:
        pass

    def stamps_of(self, ring: Ring | None) -> Stamps | None:
        return ring

    def call_again(self, action: Callable[[], None]) -> None:
        action()

    def synchronize(self) -> None:
        pass

    def memory(self) -> DeviceMemory:
        raise ConfigError("device cpu: memory is not budgeted as a GPU's is")

    def reserved_bytes(self) -> int:
        return 0

    def release_cached(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0


class _HostEvent:
    def __init__(self, at_s: float | None = None) -> None:
        self._at_s = time.perf_counter() if at_s is None else at_s

    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _HostEvent)
        return self._at_s - earlier._at_s


def host_event(time_ns: int) -> Event:
    """Return an event of the host that was reached at this CLOCK_MONOTONIC (perf_counter's)."""
    return _HostEvent(time_ns * 1e-9)


class _HostStream:
    def record(self, *, timed: bool = False) -> Event:
        return _HostEvent()


_HOST_STREAM: Final = _HostStream()


class NoSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose shape or control flow depends on a tensor's values.

    On a GPU they wait for the device, and a graph cannot hold them.
    """

    _REFUSED: Final = frozenset(
        {
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.masked_select.default,
            torch.ops.aten.equal.default,
            torch.ops.aten._unique2.default,
            torch.ops.aten.unique_dim.default,
            torch.ops.aten.repeat_interleave.Tensor,
            torch.ops.aten.is_nonzero.default,
        }
    )

    _INDEXED: Final = frozenset(
        {
            torch.ops.aten.index.Tensor,
            torch.ops.aten.index_put.default,
            torch.ops.aten.index_put_.default,
        }
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._REFUSED or (func in self._INDEXED and _has_mask(args[1])):
            raise AssertionError(f"{func} looks at a tensor from the host: no graph can hold it")
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


class CudaRuntime:
    """One NVIDIA GPU, by torch's CUDA runtime. Belongs to one thread."""

    is_asynchronous: Final = True

    def __init__(self, index: int) -> None:
        self.device: Final = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._keeper: Any = None
        self._recorder: Any = None

    def current_stream(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.device))

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, tensor: Tensor) -> Tensor:
        # A copy from other memory would wait for all that is enqueued. Torch's allocator of pinned
        # memory keeps the source until the copy is done.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def capture(self, body: Callable[[], None]) -> Replay:
        # One pool for all graphs: they never run at the same time, and share its memory. A tiny
        # graph keeps the pool alive, since torch rejects a pool that no graph uses.
        if self._keeper is None:
            # Torch's default stream for recordings belongs to the first device that made one.
            self._recorder = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._keeper = self._record(lambda: torch.zeros(1, device=self.device), None)
        graph: torch.cuda.CUDAGraph = self._record(body, self._keeper.pool())
        return graph.replay

    def prepare_capture(self) -> None:
        pass

    def stamps_of(self, ring: Ring | None) -> Stamps | None:
        return ring

    def call_again(self, action: Callable[[], None]) -> None:
        action()

    def _record(self, body: Callable[[], object], pool: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # Every recording writes a tensor of torch's generator, which the first recording creates:
        # created in inference mode (a node's), it could not be written outside of that mode.
        # A failed recording would leave its stream as torch's current one.
        with (
            torch.inference_mode(),
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(
                graph, pool=pool, stream=self._recorder, capture_error_mode="thread_local"
            ),
        ):
            body()
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return DeviceMemory(total=total, free=free, cached=cached)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


class CudaStream:
    """A stream of a GPU."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self._raw = raw

    def record(self, *, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._raw)
        return CudaEvent(event)


class CudaEvent:
    """An event of a GPU."""

    def __init__(self, raw: torch.cuda.Event) -> None:
        self.raw = raw

    def wait(self) -> None:
        self.raw.synchronize()

    def is_done(self) -> bool:
        return bool(self.raw.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        elapsed_ms = earlier.raw.elapsed_time(self.raw)
        return float(elapsed_ms) / 1000
