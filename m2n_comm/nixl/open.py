"""Forms the pairs of one NIXL node, one after the other, while their handshake runs.

Owns what the two hellos of a pair carry besides (the keys to the memory of each end) and the
proof of every line by a first write. Both roles do the same, at the same time. Knows no
frames; open.py calls it, and nixl.py uses the pairs afterwards.
"""

from __future__ import annotations

import socket
import time

import msgspec

from m2n_comm.hello import PairHello, PairMemory
from m2n_comm.host.lines import CHECK_INTERVAL_S, Check
from m2n_comm.host.windows import PairLayout
from m2n_comm.net import WaitPolicy
from m2n_comm.nixl.agent import NixlPeer, NodeAgent, PairKeys
from m2n_comm.nixl.lines import NOTE, NixlLines, NixlPair, Role, notes_of
from topspin.errors import DeadlineExceeded, FrameError, PeerLost, TopspinError

_READY = b"r"
_FIRST = NOTE.pack(0, 0)
_LOOK_S = 50e-6


class NixlOpening:
    """A node whose pairs are being formed; then lines() or close().

    Invariant: `_ends` holds the memory of all pairs, `_pairs` those that were formed, `_heard`
    what was notified meanwhile: first writes of peers whose turn comes later, and frames of
    peers that are ahead.
    """

    def __init__(
        self,
        layout: PairLayout,
        *,
        role: Role,
        index: int,
        one_host: bool,
        wait: WaitPolicy,
        check: Check,
        deadline_s: float,
    ) -> None:
        self._layout = layout
        self._role: Role = role
        self._peer_role = "expert" if role == "attention" else "attention"
        self._wait: WaitPolicy = wait
        self._check = check
        self._deadline_s = deadline_s
        self._node = NodeAgent(f"topspin-{role}-{index}", one_host=one_host)
        self._ends: dict[int, NixlPeer] = {}
        self._pairs: dict[int, NixlPair] = {}
        self._heard: dict[str, list[bytes]] = {}

    def offer(self, peer: int, hello: PairHello) -> PairHello:
        """Register memory for the pair with `peer`; return `hello` with the keys to it."""
        end = self._node.add_peer(self._layout, attention=self._role == "attention")
        self._ends[peer] = end
        keys = end.keys(self._node.agent, self._node.name)
        memory = PairMemory(
            agent=keys.agent,
            metadata=keys.metadata,
            base=keys.base,
            size_bytes=self._layout.total_bytes,
            bell=self._wait == "block",
        )
        return msgspec.structs.replace(hello, memory=memory)

    def form(self, peer: int, sock: socket.socket, memory: PairMemory | None) -> None:
        """Prepare all writes to `peer`, which offered `memory`, and prove the line.

        Raises FrameError for a peer that does not fit, PeerLost, DeadlineExceeded.
        """
        origin = f"{self._peer_role} {peer}"
        if memory is None:
            raise FrameError(f"nixl: {origin} offers no memory")
        if memory.size_bytes != self._layout.total_bytes:
            raise FrameError(
                f"nixl: windows of {origin}: {memory.size_bytes} bytes, "
                f"expected {self._layout.total_bytes}"
            )
        end = self._ends[peer]
        end.connect(self._node.agent, PairKeys(memory.agent, memory.metadata, memory.base))
        self._pairs[peer] = NixlPair(end, sock, memory.bell)
        sock.setblocking(False)
        try:
            self._prove(peer, end, sock)
        except TopspinError:
            raise
        except Exception as error:  # of the socket, or the bindings', which have no base
            raise PeerLost(f"nixl: {origin}: {error!r} while its line was proved") from error

    def lines(self) -> NixlLines:
        """Return the lines of all pairs that were formed; they own everything from now on."""
        lines = NixlLines(
            layout=self._layout,
            role=self._role,
            node=self._node,
            pairs=self._pairs,
            wait=self._wait,
            check=self._check,
        )
        named = {pair.peer.name: peer for peer, pair in self._pairs.items()}
        lines.file(notes_of(self._heard, named))
        return lines

    def close(self) -> None:
        """Free all memory and keys, after an error."""
        self._pairs, self._ends = {}, {}
        self._node.close()

    def _prove(self, peer: int, end: NixlPeer, sock: socket.socket) -> None:
        """Write to the peer; stay until it has seen our write and we have seen its.

        UCX sets a connection up while both ends look, so neither may leave before the other.
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
                self._check()
            time.sleep(_LOOK_S)

    def _is_ready(self, sock: socket.socket, peer: int) -> bool:
        """Return whether the peer has said that it saw our write."""
        try:
            said = sock.recv(1)
        except BlockingIOError:
            return False
        if not said:
            raise PeerLost(f"nixl: {self._peer_role} {peer} left while its line was proved")
        return True
