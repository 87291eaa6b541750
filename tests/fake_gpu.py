"""A GPU for programs on a machine without one: its tensors have shapes and strides, no contents.

What it shows is what no interpreter can: that the lines for GPUs alone are right by name and
argument, that nothing looks at the device while a graph is recorded, and that every launch is
one that Triton accepts (and, if asked to, compiles for Hopper). Tensors on "cuda" are torch's fake
ones, those on the host are real; torch.cuda's functions have their own signatures and answer for
one H200. Whatever is read from the device is 0. Knows no module of ours. For programs that run in
a process of their own, since torch and Triton are changed.
"""

from __future__ import annotations

import ctypes
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
GIB = 2**30
SHARED_BYTES = 227 * 1024
ELAPSED_MS = 10.0
"""Between any two events."""
MAX_GRID = (2**31, 2**16, 2**16)

# Of c10::DeviceType; and where torch keeps who knows which device of a type is current.
CUDA, META = 1, 14
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"

_COPIES = (aten.copy_.default, aten._to_copy.default)
_LOOKS = {
    aten._local_scalar_dense.default: lambda x: 0.0 if x.is_floating_point() else 0,
    aten.nonzero.default: lambda x: torch.zeros(0, x.ndim, dtype=torch.int64),
    aten._unique2.default: lambda x: (torch.zeros(1, dtype=x.dtype), *torch.zeros(2, 1).long()),
    aten.equal.default: lambda x: False,
}
"""What waits for the device, and what is found there."""


@dataclass
class FakeGpu:
    """What has happened on the device so far."""

    is_recording: bool = False
    recorded: int = 0
    replayed: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    compiled: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each variant, by kernel."""
    waits: Counter[str] = field(default_factory=Counter)
    """Operations that waited for the device, by name."""

    def wait(self, what: str) -> None:
        """Note a wait. Raises RuntimeError where a GPU does, while a graph is recorded."""
        if self.is_recording:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.waits[what] += 1


class _NeverInitialised(FakeTensorMode):
    """Does not open a context for tensors on "cuda"."""

    avoid_device_init = True


class _Tensors(TorchDispatchMode):
    """Operations with tensors on the device give tensors without contents; others are real."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._fake = _NeverInitialised(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            return args[0].clone()
        device = kwargs.get("device")
        is_going_there = device is not None and torch.device(device).type == "cuda"
        is_there = any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs)))
        if not (is_going_there or is_there):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func in _LOOKS:
            self._gpu.wait(str(func))
            return _LOOKS[func](args[0])
        if func in _COPIES:
            return self._copy(func, args, kwargs, is_going_there)
        return self._on_device(func, args, kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Any, is_going_there: bool) -> Any:
        source = args[1] if func is aten.copy_.default else args[0]
        target = args[0] if func is aten.copy_.default else None
        leaves = func is aten._to_copy.default and "device" in kwargs and not is_going_there
        crosses = leaves or not (
            isinstance(source, FakeTensor) and (target is None or isinstance(target, FakeTensor))
        )
        if crosses and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            self._gpu.wait(f"{func} {tuple(source.shape)}")
        if target is not None and not isinstance(target, FakeTensor):
            return target
        found = self._on_device(func, args, kwargs)
        return torch.zeros(found.shape, dtype=found.dtype) if leaves else found

    def _on_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        def placed(each: Any) -> Any:
            if not isinstance(each, Tensor) or isinstance(each, FakeTensor):
                return each
            if each.ndim and func not in (*_COPIES, aten.index.Tensor):
                raise RuntimeError(f"{func}: {tuple(each.shape)} is on the host, not on the device")
            return self._fake.from_tensor(each)

        args, kwargs = tree_map(placed, (args, kwargs))
        with self._fake:
            return func(*args, **kwargs)


class _Generator:
    """A generator of the device; those of the host are torch's."""

    _of_host = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls._of_host(device) if torch.device(device).type == "cpu" else super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self.device = torch.device(device)

    def manual_seed(self, seed: int) -> _Generator:
        return self


def _normal(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def normal_(self: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> Tensor:
        of_host = None if isinstance(generator, _Generator) else generator
        return real(self, mean, std, generator=of_host)

    return normal_


class _Event:
    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._is_timed = enable_timing
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        assert self._at_s is not None, "waits for an event that was not recorded"

    def synchronize(self) -> None:
        self.wait()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _Event) -> float:
        assert self._is_timed, "an event that was made without enable_timing"
        assert end_event._is_timed, "an event that was made without enable_timing"
        assert self._at_s is not None
        assert end_event._at_s is not None
        return ELAPSED_MS


class _Stream:
    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = next(self._ids)

    def wait_event(self, event: _Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        pass


def _torch_cuda(gpu: FakeGpu) -> dict[str, Any]:
    """Return what replaces members of torch.cuda, by name."""
    cuda = torch.cuda
    current = [_Stream()]
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=140 * GIB, multi_processor_count=132
    )
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "set_device": None, "get_device_name": properties.name,
        "get_device_capability": (9, 0), "get_device_properties": properties,
        "mem_get_info": (139 * GIB, 140 * GIB), "memory_reserved": 0, "memory_allocated": 0,
        "max_memory_allocated": 0, "reset_peak_memory_stats": None, "empty_cache": None,
    }  # fmt: skip

    class CUDAGraph:
        def replay(self) -> None:
            gpu.replayed += 1

        def pool(self) -> tuple[int, int]:
            return 0, 1

    @contextmanager
    def stream(stream: _Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    @contextmanager
    def graph(
        cuda_graph: CUDAGraph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        assert not gpu.is_recording
        gpu.is_recording = True
        # As torch does: what is raised leaves the stream of the recording in place.
        current.append(_Stream())
        try:
            yield
        finally:
            gpu.is_recording = False
        current.pop()
        gpu.recorded += 1

    def cudart() -> Any:
        return SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: 0,
            cudaHostUnregister=lambda address: 0,
        )

    found: dict[str, Any] = {
        name: mock.create_autospec(getattr(cuda, name), return_value=value)
        for name, value in answers.items()
    }
    found["synchronize"] = mock.create_autospec(
        cuda.synchronize, side_effect=lambda device=None: gpu.wait("synchronize")
    )
    found["current_stream"] = mock.create_autospec(
        cuda.current_stream, side_effect=lambda device=None: current[-1]
    )
    found["is_current_stream_capturing"] = lambda: gpu.is_recording
    return {
        **found, "Stream": _Stream, "Event": _Event, "CUDAGraph": CUDAGraph, "graph": graph,
        "stream": stream, "cudart": cudart,
    }  # fmt: skip


class _Launcher:
    """Launches nothing, but checks the grid."""

    gpu: FakeGpu

    def __init__(self, src: Any, metadata: Any) -> None:
        self._name = metadata.name

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        _note_launch(self.gpu, self._name, (x, y, z))


def _note_launch(gpu: FakeGpu, name: str, grid: tuple[int, ...]) -> None:
    for size, most in zip(grid, MAX_GRID, strict=False):
        assert 0 < size < most, f"{name} with a grid of {grid}"
    gpu.launches[name] += 1


class _Driver:
    """Satisfies triton.backends.driver.DriverBase, for Hopper."""

    def __init__(self, launcher: type[_Launcher]) -> None:
        self.launcher_cls = launcher
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (1, 1, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES},
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 1

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> Tensor:
        return torch.empty(64 << 20, dtype=torch.int32, device="cuda")

    def clear_cache(self, cache: Tensor) -> None:
        cache.zero_()


def _triton(gpu: FakeGpu, *, is_compiling: bool) -> Any:
    """Return the context in which kernels go to the device, compiled or only checked."""
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET must not be set"
    driver.set_active(_Driver(type("Launcher", (_Launcher,), {"gpu": gpu})))
    compile_ = JITFunction._do_compile

    def do_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        if is_compiling:
            found = compile_(self, *args, **kwargs)
        else:
            # As if compiled: the arguments were bound and their types found out.
            found = SimpleNamespace(
                function=0, packed_metadata=(), launch_metadata=lambda *args: None,
                run=lambda x, y, z, *rest: _note_launch(gpu, self.__name__, (x, y, z)),
            )  # fmt: skip
            self.device_caches[0][0][args[0]] = found
        gpu.compiled.setdefault(self.__name__, []).append(time.perf_counter() - begin)
        return found

    return mock.patch.object(JITFunction, "_do_compile", do_compile)


def _let_devices_be_current() -> None:
    """Have torch ask nobody when it makes a GPU the current device, as indexing does."""
    # Does so in a build for GPUs, where there is none; in one for CPUs nobody is there to ask.
    torch._C._ensureCUDADeviceGuardSet()
    if torch.version.cuda is None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * (META + 1)).in_dll(library, GUARDS)
        guards[CUDA] = guards[META]


@contextmanager
def fake_gpu(*, is_compiling: bool = False) -> Iterator[FakeGpu]:
    """Put a GPU into this machine; `is_compiling`: with a compiler of kernels."""
    gpu = FakeGpu()
    _let_devices_be_current()
    torch._C._set_only_lift_cpu_tensors(True)
    patches: list[Any] = [
        *(mock.patch.object(torch.cuda, name, new) for name, new in _torch_cuda(gpu).items()),
        mock.patch.object(torch.backends.cuda, "is_built", return_value=True),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch.object(Tensor, "normal_", _normal(Tensor.normal_)),
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context", return_value=None),
        _triton(gpu, is_compiling=is_compiling),
    ]
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(_Tensors(gpu))
        try:
            yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
