"""Opens cuda_ipc: each end makes the memory that the other may write, and names it in its hello.

The handshake is that of shm, over the same Unix sockets (same user, incarnations, sizes); the
connections stay open as the sign of life. An expert node's address comes from
open.listen_expert("cuda_ipc"). On an error everything that was opened is closed.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

from kernels.runtime import Runtime
from m2n_comm.addresses import CUDA_IPC, connect, same_user
from m2n_comm.gpu.ipc_attention import IpcAttentionNet
from m2n_comm.gpu.ipc_expert import IpcExpertNet
from m2n_comm.gpu.ipc_pairs import IpcPair, IpcPairs, inbox_bytes
from m2n_comm.gpu.memory import Allocation, PeerMemory, open_memory
from m2n_comm.handshake import Reception, ask, send_message
from m2n_comm.hello import PairHello, PairRegion, expected_hellos, make_hello
from m2n_comm.host.lines import Check, wait_on
from m2n_comm.net import NetShape
from topspin import __version__
from topspin.errors import ConfigError, FrameError, PeerLost
from topspin.expert_table import ExpertTable
from topspin.messages import ExpertPeer


class _Forming:
    """Pairs that are being formed, of the node with this role; closed unless taken."""

    def __init__(self, shape: NetShape, role: str, memory: PeerMemory) -> None:
        self._shape = shape
        self._role = role
        self._memory = memory
        self._mine_bytes = inbox_bytes(shape, role)
        other = "expert" if role == "attention" else "attention"
        self._other = other
        self._theirs_bytes = inbox_bytes(shape, other)
        self._mine: dict[int, Allocation] = {}
        self._theirs: dict[int, int] = {}
        self._is_taken = False

    def offer(self, peer: int, hello: PairHello) -> PairHello:
        """Return `hello` with memory for what the peer will write."""
        mine = self._mine[peer] = self._memory.allocate(self._mine_bytes)
        region = PairRegion(
            kind=self._memory.kind, handle=mine.handle, size_bytes=mine.tensor.nbytes
        )
        return msgspec.structs.replace(hello, region=region)

    def map(self, peer: int, region: PairRegion | None) -> None:
        """Map what the peer has offered. Raises FrameError if it does not fit."""
        origin = f"cuda_ipc: {self._other} {peer}"
        if region is None:
            raise FrameError(f"{origin} offers no memory")
        if region.kind != self._memory.kind:
            raise FrameError(f"{origin}: memory is {region.kind}, expected {self._memory.kind}")
        if region.size_bytes != self._theirs_bytes:
            raise FrameError(
                f"{origin}: windows of {region.size_bytes} bytes, expected {self._theirs_bytes}"
            )
        self._theirs[peer] = self._memory.open(region.handle, region.size_bytes)

    def drop(self, peer: int) -> None:
        """Undo offer() and map() for a peer that did not hear of it."""
        if peer in self._theirs:
            self._memory.close(self._theirs.pop(peer))
        self._memory.free(self._mine.pop(peer))

    def finish(
        self, peers: Mapping[int, tuple[socket.socket, int]], runtime: Runtime, check: Check
    ) -> IpcPairs:
        """Return the pairs, which own the memory from now on; by peer: socket and incarnation."""
        pairs = IpcPairs(
            self._shape,
            role=self._role,
            runtime=runtime,
            memory=self._memory,
            pairs={
                peer: IpcPair(self._mine[peer], self._theirs[peer], sock, incarnation)
                for peer, (sock, incarnation) in peers.items()
            },
            check=check,
        )
        self._is_taken = True
        return pairs

    def close(self) -> None:
        """Free all memory, unless it was taken; peers have not begun to write."""
        if not self._is_taken:
            for peer in list(self._mine):
                self.drop(peer)


def accept_ipc(
    listener: socket.socket,
    shape: NetShape,
    *,
    index: int,
    incarnation: int,
    attention_incarnations: tuple[int | None, ...],
    timeout_s: float,
    table: ExpertTable,
    runtime: Runtime,
    memory: PeerMemory | None = None,
    revision: str = __version__,
    generation: int = 1,
    check: Check = wait_on,
) -> IpcExpertNet:
    """Wait for all attention nodes (None: an absent one); see open.ExpertListener.accept_device."""
    memory = memory or open_memory(runtime.device)
    expected = expected_hellos(
        shape,
        expert=index,
        incarnation=incarnation,
        attention_incarnations=attention_incarnations,
        revision=revision,
        generation=generation,
    )
    forming = _Forming(shape, "expert", memory)

    def welcome(sock: socket.socket, hello: PairHello) -> None:
        """Map the peer's memory, then offer ours; both, or nothing."""
        answer = forming.offer(hello.attention, msgspec.structs.replace(hello, region=None))
        try:
            forming.map(hello.attention, hello.region)
            send_message(sock, answer)
        except PeerLost as error:
            forming.drop(hello.attention)
            raise ConnectionError(0, str(error)) from error
        except BaseException:
            forming.drop(hello.attention)
            sock.close()
            raise

    with contextlib.ExitStack() as undo:
        undo.callback(forming.close)
        met = Reception(
            listener,
            expected=expected,
            trusted=same_user,
            deadline_s=time.monotonic() + timeout_s,
            check=check,
        ).run(welcome)
        for meeting in met.values():
            undo.callback(meeting.sock.close)
        peers = {peer: (each.sock, each.hello.attention_incarnation) for peer, each in met.items()}
        pairs = forming.finish(peers, runtime, check)
        undo.callback(pairs.close)
        net = IpcExpertNet(
            shape=shape, index=index, incarnation=incarnation, table=table, pairs=pairs
        )
        undo.pop_all()
    return net


def connect_ipc(
    shape: NetShape,
    *,
    index: int,
    incarnation: int,
    experts: Sequence[ExpertPeer | None],
    table: ExpertTable,
    timeout_s: float,
    runtime: Runtime,
    memory: PeerMemory | None = None,
    revision: str = __version__,
    generation: int = 1,
    check: Check = wait_on,
) -> IpcAttentionNet:
    """Connect to every expert node (None: an absent one) and return the side of all pairs.

    Windows are made on the runtime's device, by `memory` (None: what the device has). Raises
    what open.connect_attention does, and ConfigError for memory that cannot be had or mapped.
    """
    memory = memory or open_memory(runtime.device)
    deadline_s = time.monotonic() + timeout_s
    present = {expert: peer for expert, peer in enumerate(experts) if peer is not None}
    for expert, peer in present.items():
        if not peer.address.startswith(CUDA_IPC):
            raise ConfigError(f"expert {expert}: {peer.address!r} is not cuda_ipc:unix:@NAME")
    forming = _Forming(shape, "attention", memory)
    with contextlib.ExitStack() as undo:
        undo.callback(forming.close)
        hellos, socks = {}, {}
        for expert, peer in present.items():
            hello = make_hello(
                shape,
                attention=index,
                expert=expert,
                attention_incarnation=incarnation,
                expert_incarnation=peer.incarnation,
                revision=revision,
                generation=generation,
            )
            sock = connect(peer.address, expert=expert, deadline_s=deadline_s)
            undo.callback(sock.close)
            hellos[expert], socks[expert] = forming.offer(expert, hello), sock
            try:
                send_message(sock, hellos[expert])
            except OSError as error:
                raise PeerLost(f"expert {expert}: {error.strerror}") from error
        for expert, hello in hellos.items():
            met = ask(socks[expert], hello, deadline_s=deadline_s, check=check)
            forming.map(expert, met.hello.region)
        peers = {expert: (socks[expert], peer.incarnation) for expert, peer in present.items()}
        pairs = forming.finish(peers, runtime, check)
        undo.callback(pairs.close)
        net = IpcAttentionNet(
            shape=shape,
            index=index,
            incarnation=incarnation,
            num_experts=len(experts),
            table=table,
            pairs=pairs,
        )
        undo.pop_all()
    return net
