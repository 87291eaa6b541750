"""Memory that peers write: of this host, and the driver's calls with a fake library."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from kernels.runtime import HostRuntime
from m2n_comm.gpu import memory as device_memory
from m2n_comm.gpu.ipc_forming import IpcForming
from m2n_comm.gpu.ipc_pairs import IpcPair, IpcPairs, inbox_bytes
from m2n_comm.gpu.memory import CudaDriver, CudaMemory, HostMemory, IpcHandle
from m2n_comm.pairing.handshake import Meeting
from m2n_comm.pairing.hello import Identity, PairRegion
from m2n_comm.waits import Waits, wait_on
from tests.m2n_comm.harness import make_shape
from topspin.errors import ConfigError, FrameError, PeerLost

OUT_OF_MEMORY, UNSUPPORTED, UNNAMED = 2, 217, 4711
NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", UNSUPPORTED: b"PEER_ACCESS_UNSUPPORTED"}


def test_what_one_end_writes_the_other_reads() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = HostMemory(), HostMemory()
    mine = ours.allocate(5000)
    assert not mine.tensor.any()
    address = theirs.open(mine.handle, 5000)
    assert address != mine.address
    ctypes.memset(address + 4000, 7, 10)
    assert mine.tensor[4000:4010].tolist() == [7] * 10
    theirs.close(address)
    ours.free(mine)
    assert int(mine.tensor[4000]) == 7  # a view keeps the memory alive
    del mine
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_handle_that_is_none_is_refused() -> None:
    memory = HostMemory()
    mine = memory.allocate(4096)
    with pytest.raises(FrameError, match="4096 bytes, expected 8192"):
        memory.open(mine.handle, 8192)
    with pytest.raises(FrameError, match="a handle of 3 bytes is none"):
        memory.open(b"abc", 4096)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    handle = device_memory._HOST_HANDLE.pack(os.getpid(), unsealed)
    with pytest.raises(FrameError, match="not sealed"):
        memory.open(handle, 4096)
    os.close(unsealed)
    with pytest.raises(PeerLost, match="memory of process"):
        memory.open(handle, 4096)
    memory.free(mine)


def prototype(*arguments: Any) -> Callable[[Callable[..., int]], Any]:
    """Return a C function type for Python functions, with the argument types of CUDA's manual."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)


class Library:
    """libcuda's calls as C functions; memory is this process's own, a handle its address."""

    def __init__(self, fail: dict[str, int] | None = None) -> None:
        fail = fail or {}
        self.calls: list[tuple[Any, ...]] = []
        self.memory: dict[int, Any] = {}
        u64, out = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)

        def status(name: str, *arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return fail.get(name, 0)

        def allocate(address: Any, num_bytes: int) -> int:
            buffer = ctypes.create_string_buffer(min(num_bytes, 2**22))
            address[0] = ctypes.addressof(buffer)
            self.memory[address[0]] = buffer
            return status("alloc", num_bytes)

        def free(address: int) -> int:
            return status("free", address)

        def export(handle: Any, address: int) -> int:
            text = f"{address:064d}".encode()
            ctypes.memmove(handle, text, 64)
            return status("export", address)

        def open_(address: Any, handle: IpcHandle, flags: int) -> int:
            address[0] = int(bytes(handle.reserved))
            return status("open", flags)

        def close(address: int) -> int:
            return status("close", address)

        def name(code: int, text: Any) -> int:
            if code not in NAMES:
                return 1
            text[0] = NAMES[code]
            return 0

        self.cuMemAlloc_v2 = prototype(out, ctypes.c_size_t)(allocate)
        self.cuMemFree_v2 = prototype(u64)(free)
        self.cuIpcGetMemHandle = prototype(ctypes.POINTER(IpcHandle), u64)(export)
        self.cuIpcOpenMemHandle_v2 = prototype(out, IpcHandle, ctypes.c_uint)(open_)
        self.cuIpcCloseMemHandle = prototype(u64)(close)
        self.cuGetErrorName = prototype(ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))(name)


def test_the_driver_is_called_as_it_is_declared() -> None:
    assert ctypes.sizeof(IpcHandle) == 64
    library = Library()
    driver = CudaDriver(library)
    address = driver.allocate(3 * 2**32)
    handle = driver.export(address)
    assert handle == f"{address:064d}".encode()
    assert driver.open(handle) == address
    driver.close(address)
    driver.free(address)
    assert library.calls == [
        ("alloc", 3 * 2**32),
        ("export", address),
        ("open", 1),
        ("close", address),
        ("free", address),
    ]


@pytest.mark.parametrize("name", ["alloc", "export", "open", "close", "free"])
def test_every_call_of_the_driver_is_checked(name: str) -> None:
    driver = CudaDriver(Library({name: UNSUPPORTED}))
    uses: dict[str, Callable[[], Any]] = {
        "alloc": lambda: driver.allocate(16),
        "export": lambda: driver.export(1),
        "open": lambda: driver.open(bytes(b"%064d" % 9)),
        "close": lambda: driver.close(1),
        "free": lambda: driver.free(1),
    }
    with pytest.raises(ConfigError, match=r"cu\w+: PEER_ACCESS_UNSUPPORTED"):
        uses[name]()
    with pytest.raises(ConfigError, match="cuMemAlloc_v2: error 4711"):
        CudaDriver(Library({"alloc": UNNAMED})).allocate(16)


def host_view(address: int, num_bytes: int, _: torch.device) -> torch.Tensor:
    """Replace the view of a GPU's memory."""
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)


def cuda_memory(monkeypatch: pytest.MonkeyPatch, library: Library) -> CudaMemory:
    monkeypatch.setattr(device_memory, "_view", host_view)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return CudaMemory(torch.device("cuda", 1), CudaDriver(library))


def test_memory_of_a_gpu_is_whole_pages_zeroed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    memory = cuda_memory(monkeypatch, library)
    mine = memory.allocate(2**21 + 1)
    assert mine.tensor.nbytes == 2**21 + 1
    assert not mine.tensor.any()
    assert library.calls[0] == ("alloc", 2**22)
    assert memory.open(mine.handle, 2**21 + 1) == mine.address
    with pytest.raises(FrameError, match="a handle of 8 bytes is none"):
        memory.open(mine.handle[:8], 1)
    memory.close(mine.address)
    memory.free(mine)
    assert [name for name, _ in library.calls[-2:]] == ["close", "free"]


def test_errors_of_a_gpus_memory_name_the_option_and_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = cuda_memory(monkeypatch, Library({"alloc": OUT_OF_MEMORY}))
    with pytest.raises(ConfigError, match=r"cuda_ipc: no 2097152 bytes on cuda:1 .*OUT_OF_MEMORY"):
        full.allocate(5)
    apart = cuda_memory(monkeypatch, Library({"open": UNSUPPORTED}))
    with pytest.raises(ConfigError, match=r"cuda:1 cannot map .*PEER_ACCESS_UNSUPPORTED"):
        apart.open(b"%064d" % 1, 5)


class LastingMemory(HostMemory):
    """Memory of this host that, like a GPU's, must not be freed before its peer has gone."""

    outlives_peers = False  # type: ignore[misc,assignment]

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []

    def free(self, allocation: device_memory.Allocation) -> None:
        self.freed.append(allocation.address)
        super().free(allocation)


@pytest.mark.parametrize("peer_leaves", [True, False])
def test_memory_that_a_peer_may_still_write_is_not_freed(
    peer_leaves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("m2n_comm.gpu.ipc_pairs._FAREWELL_S", 0.01)
    shape = make_shape()
    memory, theirs = LastingMemory(), HostMemory()
    mine = memory.allocate(inbox_bytes(shape, "attention"))
    other = theirs.allocate(inbox_bytes(shape, "expert"))
    ours, peer = socket.socketpair()
    pairs = IpcPairs(
        shape,
        role="attention",
        runtime=HostRuntime(),
        memory=memory,
        pairs={
            4: IpcPair(mine, memory.open(other.handle, other.tensor.nbytes), ours, incarnation=1)
        },
        check=wait_on,
    )
    if peer_leaves:
        peer.close()
    pairs.close()
    assert memory.freed == ([mine.address] if peer_leaves else [])
    assert ("expert 4 has not closed its side" in caplog.text) != peer_leaves
    if not peer_leaves:
        assert peer.recv(1) == b""  # we have announced that we write no more
        peer.close()
        memory.free(mine)
    theirs.free(other)


def test_offers_of_a_peer_must_fit() -> None:
    shape = make_shape()
    me = Identity(role="attention", index=0, incarnation=1, shape=shape)
    forming = IpcForming(me, Waits(timeout_s=1.0), HostRuntime())
    hello = me.hello(3, 2)
    offered, _ = forming.offer(3, hello)
    assert offered.region is not None
    assert offered.region.size_bytes == inbox_bytes(shape, "attention")
    size = inbox_bytes(shape, "expert")
    for region, text in (
        (None, "expert 3 offers no memory"),
        (PairRegion(kind="cuda", handle=b"", size_bytes=size), "memory is cuda, expected memfd"),
        (PairRegion(kind="memfd", handle=b"", size_bytes=64), f"of 64 bytes, expected {size}"),
    ):
        sock: Any = None  # is not reached
        with pytest.raises(FrameError, match=text):
            forming.take(3, Meeting(sock, msgspec.structs.replace(hello, region=region), ()))
    forming.close()
