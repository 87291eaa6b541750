"""Forms the pairs of cuda_ipc: each end makes the memory that the other may write.

The memory's name travels in the hello, over the Unix sockets of the handshake, which stay open as a
sign of life. Knows no frames; open.py calls it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kernels.runtime import Runtime
from m2n_comm.gpu.ipc_pairs import IpcPair, IpcPairs, inbox_bytes
from m2n_comm.gpu.memory import Allocation, open_memory
from m2n_comm.pairing.handshake import Meeting
from m2n_comm.pairing.hello import Identity, PairHello, PairRegion
from m2n_comm.waits import Waits
from topspin.errors import FrameError


class _Theirs(NamedTuple):
    """A peer's memory, mapped here, and the peer's handshake."""

    address: int
    met: Meeting


class IpcForming:
    """The pairs of one node while they are formed; then finish() or close()."""

    def __init__(self, me: Identity, waits: Waits, runtime: Runtime) -> None:
        self._me = me
        self._waits = waits
        self._runtime = runtime
        self._memory = open_memory(runtime.device)
        self._mine_bytes = inbox_bytes(me.shape, me.role)
        self._theirs_bytes = inbox_bytes(me.shape, me.peer_role)
        self._mine: dict[int, Allocation] = {}
        self._theirs: dict[int, _Theirs] = {}

    def offer(self, peer: int, hello: PairHello) -> tuple[PairHello, tuple[int, ...]]:
        """Return `hello` with memory that the peer will write."""
        mine = self._mine[peer] = self._memory.allocate(self._mine_bytes)
        region = PairRegion(
            kind=self._memory.kind, handle=mine.handle, size_bytes=mine.tensor.nbytes
        )
        return msgspec.structs.replace(hello, region=region), ()

    def take(self, peer: int, met: Meeting) -> None:
        """Map the memory that the peer offers. Raises FrameError if it does not fit, PeerLost."""
        origin = f"cuda_ipc: {self._me.peer_role} {peer}"
        region = met.hello.region
        if region is None:
            raise FrameError(f"{origin} offers no memory")
        if region.kind != self._memory.kind:
            raise FrameError(f"{origin}: memory is {region.kind}, expected {self._memory.kind}")
        if region.size_bytes != self._theirs_bytes:
            raise FrameError(
                f"{origin}: windows of {region.size_bytes} bytes, expected {self._theirs_bytes}"
            )
        address = self._memory.open(region.handle, region.size_bytes)
        self._theirs[peer] = _Theirs(address, met)

    def prove(self, peer: int) -> None:
        """Do nothing: mapping the memory has proved the line."""

    def drop(self, peer: int) -> None:
        """Free the memory for a peer that has not yet written, and unmap the peer's."""
        if peer in self._theirs:
            self._memory.close(self._theirs.pop(peer).address)
        if peer in self._mine:
            self._memory.free(self._mine.pop(peer))

    def finish(self) -> IpcPairs:
        """Return the pairs, which own the memory from now on."""
        of_experts = self._me.role == "attention"
        pairs = IpcPairs(
            self._me.shape,
            role=self._me.role,
            runtime=self._runtime,
            memory=self._memory,
            pairs={
                peer: IpcPair(
                    self._mine[peer],
                    address,
                    met.sock,
                    met.hello.expert_incarnation if of_experts else met.hello.attention_incarnation,
                )
                for peer, (address, met) in self._theirs.items()
            },
            check=self._waits.check,
        )
        self._mine, self._theirs = {}, {}
        return pairs

    def close(self) -> None:
        """Free all memory; no peer has written yet."""
        for peer in list(self._mine):
            self.drop(peer)
