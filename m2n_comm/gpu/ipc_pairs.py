"""The pairs of one cuda_ipc node: memory that peers write, the peers' memory, and liveness.

Owns the windows of all pairs of one node, the words of the step that is enqueued, the watch over
the connections, and the typed errors for faults found by kernels. Does not know the order of calls,
which the nets keep.

A thread sleeps on the connections. When one ends it sets the peer's word, in host memory that
kernels read; that ends their wait for the peer without the busy thread.

Memory may still be written until its peer's connection has ended; GPU memory of an open connection
is not freed but lost to this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from kernels.frame_header import FrameHeader
from kernels.m2n_windows import (
    FOUND,
    HEADER_WORDS,
    INCARNATION,
    MICRO_BATCH,
    PEER,
    PLACE,
    STEP,
    VERSION,
    WANTED,
    WHERE,
    AnswerWindow,
    Control,
    Fault,
    RequestWindow,
    WindowShape,
    host_words,
)
from kernels.runtime import Event, Runtime
from m2n_comm.gpu.memory import Allocation, PeerMemory
from m2n_comm.net import NetShape
from m2n_comm.pairing.hello import NodeRole, other_role
from m2n_comm.waits import CHECK_INTERVAL_S, Check, Hop, late, lost
from topspin.errors import ConfigError, FrameError, StaleFrame, TransportError

_HANGUP: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_NUM_SLOTS: Final = 8
"""The number of steps whose words may be in transit to the device; at most two are launched."""
_FAREWELL_S: Final = 1.0
"""How long a closing node waits for its peers to close, too."""

_log = logging.getLogger("m2n")


def window_shape(shape: NetShape) -> WindowShape:
    """Return the windows of `shape`. Raises ConfigError naming an unsupported flag."""
    if shape.per_expert_answers:
        raise ConfigError("--deterministic: not with --transport cuda_ipc; use shm")
    if shape.compressed not in (None, torch.float8_e4m3fn):
        raise ConfigError("--m2n-payload int8: not with --transport cuda_ipc; use fp8, or shm")
    return WindowShape(
        rows=shape.window_rows,
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        wire=shape.request_dtype,
        answer=shape.payload,
    )


def inbox_bytes(shape: NetShape, role: NodeRole) -> int:
    """Return the size of the windows that a node of that role reads from one peer."""
    windows = window_shape(shape)
    one = windows.answer_bytes if role == "attention" else windows.request_bytes
    return shape.num_micro_batches * one


class IpcPair(NamedTuple):
    """One pair as one end holds it: its inbox, the address of the peer's, and the connection."""

    mine: Allocation
    theirs: int
    sock: socket.socket
    incarnation: int


class IpcPairs:
    """All pairs of one node, in ascending order of the peers' indices."""

    def __init__(
        self,
        shape: NetShape,
        *,
        role: NodeRole,
        runtime: Runtime,
        memory: PeerMemory,
        pairs: Mapping[int, IpcPair],
        check: Check,
    ) -> None:
        self.windows = window_shape(shape)
        self.runtime = runtime
        self.peers = tuple(sorted(pairs))
        self._role = role
        self.peer_role = other_role(role)
        self._num_micro_batches = shape.num_micro_batches
        self._memory = memory
        self._pairs = [pairs[peer] for peer in self.peers]
        device, count = runtime.device, len(self.peers)
        words = runtime.host_buffer(host_words(count) * 8).view(torch.int64)
        self.control = Control(words, device)
        self.step = torch.zeros(HEADER_WORDS + count, dtype=torch.int64, device=device)
        slots = runtime.host_buffer(_NUM_SLOTS * self.step.nbytes).view(torch.int64)
        self._slots = slots.view(_NUM_SLOTS, -1)
        self._copied: list[Event | None] = [None] * _NUM_SLOTS
        self._num_begun = 0
        self._check = check
        self._next_check_s = 0.0
        self._watch: PeerWatch | None = PeerWatch(
            {place: pair.sock for place, pair in enumerate(self._pairs)}, self.control.lose
        )

    @property
    def registered_bytes(self) -> int:
        """Return the bytes of all windows that peers write."""
        return sum(pair.mine.tensor.nbytes for pair in self._pairs)

    @property
    def incarnations(self) -> list[int]:
        """Return the incarnations of the peers."""
        return [pair.incarnation for pair in self._pairs]

    def request(self, place: int, micro_batch: int) -> RequestWindow:
        """Return the request window of a pair, in own or peer memory."""
        base = self._base(place, "expert")
        return self.windows.request_at(base + micro_batch * self.windows.request_bytes)

    def answer(self, place: int, micro_batch: int) -> AnswerWindow:
        """Return the answer window of a pair, in own or peer memory."""
        base = self._base(place, "attention")
        return self.windows.answer_at(base + micro_batch * self.windows.answer_bytes)

    def _base(self, place: int, reader: NodeRole) -> int:
        """Return the address of the inbox of the end with role `reader`."""
        pair = self._pairs[place]
        return pair.mine.address if reader == self._role else pair.theirs

    def begin(self, words: list[int]) -> None:
        """Enqueue an update of the step's words to `words`, after all work enqueued so far."""
        slot = self._num_begun % _NUM_SLOTS
        self._num_begun += 1
        copied = self._copied[slot]
        if copied is not None:
            copied.wait()
        source = self._slots[slot, : len(words)]
        source.copy_(torch.tensor(words))
        self.step[: len(words)].copy_(source, non_blocking=True)
        self._copied[slot] = self.runtime.current_stream().record()

    def look(self) -> None:
        """Raise the first fault of kernels so far, or the error that ends waits; never waits."""
        fault = self.control.fault
        if fault is not None:
            raise self._error(fault)
        now_s = time.monotonic()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            try:
                self._check()
            except BaseException:
                self.control.abort()
                raise

    def _error(self, fault: Fault) -> TransportError:
        """Return the error that names the peer, the layer and the micro-batch."""
        word = self.control.word
        peer = self.peers[word(PEER)]
        hop = Hop(peer, word(MICRO_BATCH), word(WHERE), 0.0)
        place, found, wanted = word(PLACE), word(FOUND), word(WANTED)
        where = f"layer {hop.layer}, micro-batch {hop.micro_batch}"
        origin = f"frame of {self.peer_role} {peer}, {where}"
        if fault is Fault.LATE:
            return late(self.peer_role, hop)
        if fault is Fault.GONE:
            return lost(self.peer_role, peer, hop)
        if fault is Fault.STALE:
            return StaleFrame(f"{origin}: sequence is {found}, expected {wanted}")
        if fault is Fault.HEADER:
            if place == INCARNATION:
                found, wanted = found % 2**64, wanted % 2**64
            text = f"{origin}: {FrameHeader._fields[place]} is {found}, expected {wanted}"
            is_stale = place in (STEP, VERSION, INCARNATION)
            return StaleFrame(text) if is_stale else FrameError(text)
        if fault is Fault.TOO_MANY_ROWS:
            return FrameError(f"{origin}: {found} rows, its windows of this step hold {wanted}")
        if fault is Fault.SLOT:
            return FrameError(f"{origin}: slot {found}, this expert node has 0..{wanted - 1}")
        if fault is Fault.EXPERT:
            return FrameError(f"{where}: routed to expert {found}, there are 0..{wanted - 1}")
        return TransportError(f"{origin}: the wait for it was given up")

    def close(self) -> None:
        """Let kernels end, unmap and tell the peers, and free memory that no peer has mapped."""
        if self._watch is None:
            return
        watch, self._watch = self._watch, None
        self.control.abort()
        try:
            self.runtime.synchronize()
        finally:
            watch.close()
            for pair in self._pairs:
                self._memory.close(pair.theirs)
                with contextlib.suppress(OSError):  # the peer may have ended it
                    pair.sock.shutdown(socket.SHUT_WR)
            self._free()
            self._pairs = []

    def _free(self) -> None:
        end_s = time.monotonic() + _FAREWELL_S
        for peer, pair in zip(self.peers, self._pairs, strict=True):
            if self._memory.outlives_peers or _has_ended(pair.sock, end_s - time.monotonic()):
                self._memory.free(pair.mine)
            else:
                _log.warning(
                    "%s %d has not closed its side: %d bytes that it could still write are lost",
                    self.peer_role, peer, pair.mine.tensor.nbytes,
                )  # fmt: skip
            pair.sock.close()


def _has_ended(sock: socket.socket, timeout_s: float) -> bool:
    """Wait for the other end to close a connection, and say whether it did."""
    poller = select.poll()
    poller.register(sock, _HANGUP)
    return bool(poller.poll(max(timeout_s, 0) * 1000))


class PeerWatch:
    """Calls `lose`, in a thread, with the key of each connection that its other end has closed."""

    def __init__(self, socks: Mapping[int, socket.socket], lose: Callable[[int], None]) -> None:
        self._lose = lose
        self._keys = {sock.fileno(): key for key, sock in socks.items()}
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="m2n-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; connections stay open."""
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        os.close(self._bell)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        for fd in self._keys:
            poller.register(fd, _HANGUP)
        while True:
            for fd, _ in poller.poll():
                if fd == self._bell:
                    return
                poller.unregister(fd)
                self._lose(self._keys[fd])
