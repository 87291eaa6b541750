"""Memory that a peer on the same host may write: allocated, named, and mapped there.

One interface, two kinds: memory of an NVIDIA GPU, shared by CUDA's driver (IPC handles), and
memfds, for nodes whose device is the CPU. A handle is bytes, which the handshake carries. Knows no
windows: ipc_pairs.py lays them out. Belongs to the node's one busy thread.

The driver is called by ctypes: torch's allocator cannot share its memory if its segments can grow,
and must not reuse shared memory for other tensors. Every call is checked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from m2n_comm.sealed_memory import make_sealed, map_sealed
from topspin.errors import ConfigError, FrameError, PeerLost

_HOST_HANDLE: Final = struct.Struct("<ii")
_HANDLE_BYTES: Final = 64
_LAZY_ENABLE_PEER_ACCESS: Final = 1
# The driver shares whole pages of this size; a smaller allocation would expose its neighbours.
_CUDA_PAGE_BYTES: Final = 2 * 2**20


def whole_pages(num_bytes: int) -> int:
    """Return the GPU memory used for `num_bytes` that a peer may write."""
    return -(-num_bytes // _CUDA_PAGE_BYTES) * _CUDA_PAGE_BYTES


class Allocation(NamedTuple):
    """Zeroed memory of this node, u8, and the handle by which a peer can map it."""

    tensor: Tensor
    handle: bytes

    @property
    def address(self) -> int:
        """Return its first address, for kernels of this node."""
        return self.tensor.data_ptr()


class PeerMemory(Protocol):
    """Memory of one device. `kind` is the same at both ends of a pair."""

    @property
    def kind(self) -> str: ...

    @property
    def outlives_peers(self) -> bool:
        """Say whether it may be freed while a peer still has it mapped."""

    def allocate(self, num_bytes: int) -> Allocation:
        """Return zeroed memory. Raises ConfigError if there is not enough."""

    def free(self, allocation: Allocation) -> None:
        """Free memory; the kernels that used it must have ended."""

    def open(self, handle: bytes, num_bytes: int) -> int:
        """Map a peer's memory and return its address for kernels of this node.

        Raises FrameError for an invalid handle or memory of another size, PeerLost if the peer
        has gone, ConfigError if this device cannot reach it.
        """

    def close(self, address: int) -> None:
        """Unmap memory of open(); the kernels that used it must have ended."""


def open_memory(device: torch.device) -> PeerMemory:
    """Return the memory of a runtime's device. Raises ConfigError without a driver."""
    return HostMemory() if device.type == "cpu" else CudaMemory(device)


class HostMemory:
    """Anonymous shared memory; the name is a descriptor of the process that made it."""

    kind: Final = "memfd"
    outlives_peers: Final = True

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._mapped: dict[int, mmap.mmap] = {}

    def allocate(self, num_bytes: int) -> Allocation:
        """Return zeroed memory, sealed against resizing."""
        fd = make_sealed(num_bytes)
        try:
            tensor = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        except BaseException:
            os.close(fd)
            raise
        self._fds[tensor.data_ptr()] = fd
        return Allocation(tensor, _HOST_HANDLE.pack(os.getpid(), fd))

    def free(self, allocation: Allocation) -> None:
        """Drop the memory; it is unmapped with its last view."""
        os.close(self._fds.pop(allocation.address))

    def open(self, handle: bytes, num_bytes: int) -> int:
        """Map a peer's memory; see PeerMemory. A peer of the same user may be any process."""
        if len(handle) != _HOST_HANDLE.size:
            raise FrameError(f"memory of a peer: a handle of {len(handle)} bytes is none")
        pid, number = _HOST_HANDLE.unpack(handle)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLost(f"memory of process {pid}: {error.strerror}") from error
        try:
            memory = map_sealed(fd, num_bytes)
        finally:
            os.close(fd)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._mapped[address] = memory
        return address

    def close(self, address: int) -> None:
        """Unmap memory of open()."""
        self._mapped.pop(address).close()


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaDriver:
    """The calls of CUDA's driver that share memory. A context must be current."""

    def __init__(self, library: Any) -> None:
        """`library` is libcuda.so.1 as ctypes loads it."""
        address, out = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)
        signatures = {
            "cuMemAlloc_v2": (out, ctypes.c_size_t),
            "cuMemFree_v2": (address,),
            "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), address),
            "cuIpcOpenMemHandle_v2": (out, IpcHandle, ctypes.c_uint),
            "cuIpcCloseMemHandle": (address,),
            "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
        }
        self._functions = {}
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        """Free memory of allocate(); may wait for the device."""
        self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """Return the handle of memory of allocate()."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map another process's memory, of this GPU or of one that this one can reach."""
        address = ctypes.c_uint64()
        taken = IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), taken, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap memory of open()."""
        self._call("cuIpcCloseMemHandle", address)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            known = self._functions["cuGetErrorName"](status, ctypes.byref(text)) == 0
            error = text.value.decode() if known and text.value else f"error {status}"
            raise ConfigError(f"{name}: {error}")


class CudaMemory:
    """Memory of one GPU; peers are other processes, on this GPU or one that reaches it.

    A process cannot open its own handles. Freeing memory that a peer has mapped is undefined.
    """

    kind: Final = "cuda"
    outlives_peers: Final = False

    def __init__(self, device: torch.device, driver: CudaDriver | None = None) -> None:
        """Raises ConfigError if the driver is not there."""
        self._device = device
        if driver is None:
            torch.empty(1, device=device)  # makes the device's context, and it is current then
            try:
                driver = CudaDriver(ctypes.CDLL("libcuda.so.1"))
            except (OSError, AttributeError) as error:
                raise ConfigError(f"--transport cuda_ipc: CUDA's driver: {error}") from error
        self._driver = driver

    def allocate(self, num_bytes: int) -> Allocation:
        """Return zeroed memory in whole driver pages; the tensor is its first `num_bytes`."""
        size = whole_pages(num_bytes)
        try:
            address = self._driver.allocate(size)
        except ConfigError as error:
            raise ConfigError(
                f"--transport cuda_ipc: no {size} bytes on {self._device} for windows: {error}"
            ) from error
        tensor = _view(address, num_bytes, self._device)
        tensor.zero_()
        torch.cuda.synchronize(self._device)
        return Allocation(tensor, self._driver.export(address))

    def free(self, allocation: Allocation) -> None:
        """Free memory that no peer has mapped any more."""
        self._driver.free(allocation.address)

    def open(self, handle: bytes, num_bytes: int) -> int:
        """Map a peer's memory; see PeerMemory. The handshake has given its size."""
        if len(handle) != _HANDLE_BYTES:
            raise FrameError(f"memory of a peer: a handle of {len(handle)} bytes is none")
        try:
            return self._driver.open(handle)
        except ConfigError as error:
            raise ConfigError(
                f"--transport cuda_ipc: {self._device} cannot map a peer's memory: {error}; its "
                "GPU must be visible here and reachable by peer access"
            ) from error

    def close(self, address: int) -> None:
        """Unmap memory of open()."""
        self._driver.close(address)


def _view(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return memory of a GPU as a tensor that does not own it."""

    class Interface:
        __cuda_array_interface__: Final = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Interface(), device=device)
