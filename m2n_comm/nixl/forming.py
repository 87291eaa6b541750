"""Forms the pairs of one NIXL node, one after the other, while their handshake runs.

Owns the keys to the memory of each end, which travel in the two hellos of a pair, and the
proof of every line by a first write. Both roles do the same, at the same time. Knows no
frames; open.py calls it, and lines.py uses the pairs afterwards.
"""

from __future__ import annotations

import socket
import time

import msgspec

from m2n_comm.host.frames.windows import PairLayout
from m2n_comm.nixl.agent import NixlPeer, NodeAgent, PairKeys
from m2n_comm.nixl.lines import NOTE, NixlLines, NixlPair, notes_of
from m2n_comm.pairing.handshake import Meeting
from m2n_comm.pairing.hello import Identity, PairHello, PairMemory
from m2n_comm.waits import CHECK_INTERVAL_S, Waits
from topspin.errors import DeadlineExceeded, FrameError, PeerLost, TopspinError

_READY = b"r"
_FIRST = NOTE.pack(0, 0)
_LOOK_S = 50e-6


class NixlForming:
    """The pairs of one node while they are formed; then finish() or close().

    Invariant: `_ends` holds the memory of all pairs, `_pairs` those with a known peer, `_heard`
    the notifications meanwhile: first writes of peers whose turn comes later, and frames of
    peers that are ahead.
    """

    def __init__(self, me: Identity, waits: Waits, *, deadline_s: float, one_host: bool) -> None:
        self._layout = PairLayout(me.shape)
        self._role = me.role
        self._peer_role = me.peer_role
        self._waits = waits
        self._deadline_s = deadline_s
        self._node = NodeAgent(f"topspin-{me.role}-{me.index}", one_host=one_host)
        self._ends: dict[int, NixlPeer] = {}
        self._pairs: dict[int, NixlPair] = {}
        self._keys: dict[int, PairKeys] = {}
        self._heard: dict[str, list[bytes]] = {}

    def offer(self, peer: int, hello: PairHello) -> tuple[PairHello, tuple[int, ...]]:
        """Register memory for the pair with `peer`; return `hello` with the keys to it."""
        end = self._node.add_peer(self._layout, attention=self._role == "attention")
        self._ends[peer] = end
        keys = end.keys(self._node.agent, self._node.name)
        memory = PairMemory(
            agent=keys.agent,
            metadata=keys.metadata,
            base=keys.base,
            size_bytes=self._layout.total_bytes,
            bell=self._waits.policy == "block",
        )
        return msgspec.structs.replace(hello, memory=memory), ()

    def take(self, peer: int, met: Meeting) -> None:
        """Keep the keys of `peer`. Raises FrameError for memory that does not fit."""
        origin = f"{self._peer_role} {peer}"
        memory = met.hello.memory
        if memory is None:
            raise FrameError(f"nixl: {origin} offers no memory")
        if memory.size_bytes != self._layout.total_bytes:
            raise FrameError(
                f"nixl: windows of {origin}: {memory.size_bytes} bytes, "
                f"expected {self._layout.total_bytes}"
            )
        self._pairs[peer] = NixlPair(self._ends[peer], met.sock, memory.bell)
        self._keys[peer] = PairKeys(memory.agent, memory.metadata, memory.base)

    def prove(self, peer: int) -> None:
        """Prepare all writes to `peer` and prove the line by a first write each way.

        Raises FrameError for invalid keys, PeerLost, DeadlineExceeded.
        """
        pair = self._pairs[peer]
        pair.peer.connect(self._node.agent, self._keys[peer])
        pair.sock.setblocking(False)
        try:
            self._prove(peer, pair.peer, pair.sock)
        except TopspinError:
            raise
        except Exception as error:  # of the socket, or the bindings', which have no base
            text = f"nixl: {self._peer_role} {peer}: {error!r} while its line was proved"
            raise PeerLost(text) from error

    def drop(self, peer: int) -> None:
        """Drop a lost peer; its memory is freed with that of all others."""
        self._pairs.pop(peer, None)

    def finish(self) -> NixlLines:
        """Return the lines of all formed pairs, which own everything from now on."""
        lines = NixlLines(
            self._layout, self._role, node=self._node, pairs=self._pairs, waits=self._waits
        )
        named = {pair.peer.name: peer for peer, pair in self._pairs.items()}
        lines.file(notes_of(self._heard, named))
        return lines

    def close(self) -> None:
        """Free all memory and keys, after an error."""
        self._pairs, self._ends = {}, {}
        self._node.close()

    def _prove(self, peer: int, end: NixlPeer, sock: socket.socket) -> None:
        """Write to the peer; wait until both ends have seen the other's write.

        UCX sets up a connection while both ends poll, so neither may stop before the other.
        """
        done = self._node.agent.transfer(end.writes[0][0], _FIRST) == "DONE"
        assert end.name is not None, "connect() first"
        seen = ready = False
        next_check_s = 0.0
        while not (seen and ready and done):
            if not done:
                state = self._node.agent.check_xfer_state(end.writes[0][0])
                if state == "ERR":
                    raise PeerLost(f"nixl: the first write to {self._peer_role} {peer} failed")
                done = state == "DONE"
            for name, messages in self._node.agent.get_new_notifs().items():
                self._heard.setdefault(name, []).extend(messages)
            if not seen and _FIRST in self._heard.get(end.name, ()):
                seen = True
                self._heard[end.name].remove(_FIRST)
                sock.sendall(_READY)
            ready = ready or self._is_ready(sock, peer)
            now_s = time.monotonic()
            if now_s >= self._deadline_s:
                raise DeadlineExceeded(f"nixl: no line to {self._peer_role} {peer}")
            if now_s >= next_check_s:
                next_check_s = now_s + CHECK_INTERVAL_S
                self._waits.check()
            time.sleep(_LOOK_S)

    def _is_ready(self, sock: socket.socket, peer: int) -> bool:
        """Return whether the peer has confirmed this node's write."""
        try:
            said = sock.recv(1)
        except BlockingIOError:
            return False
        if not said:
            raise PeerLost(f"nixl: {self._peer_role} {peer} left while its line was proved")
        return True
