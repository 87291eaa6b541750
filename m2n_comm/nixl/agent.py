"""One NIXL agent per node: loading the package, registered memory, prepared writes.

Owns the peculiarities of NIXL and its UCX backend, so that lines.py only handles windows. All
descriptors are made here, once, when a pair is formed; a step only posts them. Knows no frames, no
sequences and no sockets.

No progress thread: on few cores it starves the node's own thread (a round trip of 40 us became 48
ms), so transfers advance whenever the node polls for notifications. The package's pickling helpers
are never used.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import secrets
from typing import Any, NamedTuple, Protocol

import torch

from m2n_comm.host.frames.windows import FrameWindow, PairLayout, PairWindows, private_memory
from topspin.errors import ConfigError, FrameError, PeerLost

_MEMORY = "DRAM"
_BACKEND = "UCX"


class Handle(Protocol):
    """A prepared descriptor list or transfer."""

    def release(self) -> None:
        """Free it; raises while a transfer is active."""


class Agent(Protocol):
    """The calls of nixl_agent that Topspin uses; statuses are "DONE", "PROC" and "ERR"."""

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None:
        """Start one transport engine."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        """Register (address, bytes, device, name) regions."""

    def deregister_memory(self, dereg_list: Any) -> None:
        """Undo register_memory, given its result."""

    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool) -> bytes:
        """Return how to reach this agent and the keys of `descs`."""

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Add a peer by its metadata; returns its name."""

    def remove_remote_agent(self, agent: str) -> None:
        """Remove a peer and its keys."""

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: list[tuple[int, int, int]], mem_type: str
    ) -> Handle:
        """Prepare (address, bytes, device) pieces of one side."""

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Handle,
        local_indices: list[int],
        remote_xfer_side: Handle,
        remote_indices: list[int],
        notif_msg: bytes,
    ) -> Handle:
        """Prepare a transfer between pieces of two prepared lists."""

    def transfer(self, handle: Handle, notif_msg: bytes) -> str:
        """Post a prepared transfer; its notification follows the data."""

    def check_xfer_state(self, handle: Handle) -> str:
        """Advance and return the state of a posted transfer."""

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Advance everything; return new notifications by the sender's name."""


def load_nixl() -> Any:
    """Return the nixl package. Raises ConfigError that says how to install it."""
    try:
        package = importlib.import_module("nixl")
    except ImportError as error:
        raise ConfigError(
            f"--transport nixl: the nixl package can not be used ({error}); install it with "
            "pip install -e '.[rdma]', or use --transport shm or tcp"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        # The package logs to stdout by default, where Topspin's output goes.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return package


class PairKeys(NamedTuple):
    """The keys with which a peer writes into this node's memory of one pair."""

    agent: str
    metadata: bytes
    base: int


class NixlPeer:
    """One pair at this end: its memory, and prepared writes to the peer's.

    `writes[mb][bucket]` sends the outbox of micro-batch mb, the first `buckets[bucket]` rows.
    """

    def __init__(self, agent: Agent, layout: PairLayout, *, attention: bool) -> None:
        self._memory = private_memory(layout)
        self.windows = layout.map(self._memory)
        self._attends = attention
        shape = layout.shape
        self.buckets = row_buckets(shape.window_rows if attention else shape.answer_rows)
        self.writes: list[list[Handle]] = []
        self.name: str | None = None
        self._sides: list[Handle] = []
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._region: Any = None
        self._region = agent.register_memory([(self._base, layout.total_bytes, 0, "")], _MEMORY)

    def keys(self, agent: Agent, own_name: str) -> PairKeys:
        """Return the keys for the peer."""
        metadata = agent.get_partial_agent_metadata(self._region, inc_conn_info=True)
        return PairKeys(own_name, metadata, self._base)

    def connect(self, agent: Agent, keys: PairKeys) -> None:
        """Prepare every write to the peer of `keys`. Raises FrameError, PeerLost."""
        try:
            self.name = agent.add_remote_agent(keys.metadata).decode()
        except Exception as error:  # the bindings' exceptions have no other common base
            raise FrameError(f"nixl: the peer's metadata is refused: {error!r}") from error
        if self.name != keys.agent:
            raise FrameError(f"nixl: the peer's metadata is of {self.name}, not of {keys.agent}")
        try:
            for window in self.windows.requests if self._attends else self.windows.answers:
                self.writes.append(self._prepare(agent, window, keys))
        except Exception as error:
            raise PeerLost(f"nixl: cannot prepare writes to {self.name}: {error!r}") from error

    def close(self, agent: Agent) -> bool:
        """Free handles and keys; return whether nothing is left in use.

        The address range stays reserved, without pages, for the life of the process: a peer that
        was stopped in the middle of a write may still complete it by address alone (UCX copies
        between processes of one host without asking for keys), and must not hit memory with another
        use by then.
        """
        clean = True
        for handle in [handle for writes in self.writes for handle in writes] + self._sides:
            clean = _succeeds(handle.release) and clean
        self.writes, self._sides = [], []
        self.windows = PairWindows((), ())
        if self.name is not None:
            name, self.name = self.name, None
            clean = _succeeds(agent.remove_remote_agent, name) and clean
        if self._region is not None:
            region, self._region = self._region, None
            clean = _succeeds(agent.deregister_memory, region) and clean
            self._memory.madvise(mmap.MADV_DONTNEED)
            _keep_forever(self._memory)
        return clean

    def _prepare(self, agent: Agent, window: FrameWindow, keys: PairKeys) -> list[Handle]:
        writes = []
        for rows in self.buckets:
            pieces = _pieces(window, rows)
            local = [(address, size, 0) for address, size in pieces]
            remote = [(address - self._base + keys.base, size, 0) for address, size in pieces]
            near = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, _MEMORY)
            self._sides.append(near)
            far = agent.prep_xfer_dlist(keys.agent, remote, _MEMORY)
            self._sides.append(far)
            every = list(range(len(pieces)))
            writes.append(agent.make_prepped_xfer("WRITE", near, every, far, every, b""))
        return writes


class NodeAgent:
    """The agent of one node and all its pairs.

    `one_host`: all peers run on this host. UCX then uses shared memory, which it offers only
    without its own detection of dead peers; the handshake socket detects them.
    """

    def __init__(self, name: str, *, one_host: bool) -> None:
        package = load_nixl()
        config = package.nixl_agent_config(enable_prog_thread=False, backends=[])
        self.name = f"{name}-{secrets.token_hex(8)}"
        self.peers: list[NixlPeer] = []
        self._agent: Agent | None = None
        try:
            self._agent = package.nixl_agent(self.name, config)
            mode = "none" if one_host else "peer"
            self.agent.create_backend(_BACKEND, {"ucx_error_handling_mode": mode})
        except Exception as error:
            raise ConfigError(f"--transport nixl: no UCX agent can be made: {error!r}") from error

    @property
    def agent(self) -> Agent:
        """Return the agent; callers must not keep it, or close() would not free it."""
        assert self._agent is not None, "it is closed"
        return self._agent

    def add_peer(self, layout: PairLayout, *, attention: bool) -> NixlPeer:
        """Register new memory for one pair; `attention`: this end is the attention node."""
        peer = NixlPeer(self.agent, layout, attention=attention)
        self.peers.append(peer)
        return peer

    def close(self) -> None:
        """Free everything; safe to call twice.

        An agent with a transfer that never ended is kept: UCX aborts the process when an
        endpoint that holds requests of a dead peer is destroyed.
        """
        agent, self._agent = self._agent, None
        peers, self.peers = self.peers, []
        if agent is not None:
            clean = [peer.close(agent) for peer in peers]
            if not all(clean):
                _keep_forever(agent)


def row_buckets(window_rows: int) -> tuple[int, ...]:
    """Return the row counts that get a prepared write: 0, powers of 2, 3/2 of them, all rows.

    A frame travels in the next larger bucket, so at most a third of it is padding.
    """
    buckets = {0, window_rows}
    size = 1
    while size < window_rows:
        buckets |= {size, min(size * 3 // 2, window_rows)}
        size *= 2
    return tuple(sorted(buckets))


def _pieces(window: FrameWindow, rows: int) -> list[tuple[int, int]]:
    """Return (address, bytes) of header and `rows` rows, joined where at most a line apart."""
    pieces: list[tuple[int, int]] = []
    for view in [window.header, *window.payload(rows)]:
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        if pieces and 0 <= address - sum(pieces[-1]) < 64:
            start, _ = pieces.pop()
            pieces.append((start, address + len(view) - start))
        else:
            pieces.append((address, len(view)))
    return pieces


def _succeeds(call: Any, *args: Any) -> bool:
    try:
        call(*args)
    except Exception:  # a dead peer's handle; the caller keeps the agent alive then
        return False
    return True


def _keep_forever(thing: object) -> None:
    """Keep `thing` from being freed, even at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
