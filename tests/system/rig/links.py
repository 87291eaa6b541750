"""A network link that can be cut without closing anything, and how late this machine is.

Owns a forwarder between real sockets: while a direction is cut, its bytes wait, as when a cable is
pulled; the ends see no error. Knows no protocol.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

_CHUNK_BYTES = 2**16


class Link:
    """Listens on a loopback port and forwards every connection to a socket that `connect` opens.

    Use as a context manager. `outbound` bytes go from the side that connects to the port to the
    other one, which listens.
    """

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._outbound, self._inbound = threading.Event(), threading.Event()
        self.heal()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._start(self._accept)

    @property
    def port(self) -> int:
        """The port to connect to."""
        port: int = self._listener.getsockname()[1]
        return port

    def cut(self, *, outbound: bool = True, inbound: bool = True) -> None:
        """Stop forwarding, one way or both."""
        if outbound:
            self._outbound.clear()
        if inbound:
            self._inbound.clear()

    def heal(self) -> None:
        """Forward again, beginning with the waiting bytes."""
        self._outbound.set()
        self._inbound.set()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
                there = self._connect()
            except OSError:
                if self._is_closed:
                    return
                here.close()  # the target no longer listens
                continue
            self._sockets += [here, there]
            self._start(lambda a=here, b=there: self._pump(a, b, self._outbound))
            self._start(lambda a=there, b=here: self._pump(a, b, self._inbound))

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while True:
                data = source.recv(_CHUNK_BYTES)
                gate.wait()
                if not data:
                    break
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True
        self.heal()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


class Lateness:
    """How late threads of this process wake up: the machine's share of a measured time."""

    INTERVAL_S = 0.01

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._end = threading.Event()

    def _measure(self) -> None:
        before = time.monotonic()
        while not self._end.wait(self.INTERVAL_S):
            now = time.monotonic()
            self.worst_s = max(self.worst_s, now - before - self.INTERVAL_S)
            before = now


@contextlib.contextmanager
def measured_lateness() -> Iterator[Lateness]:
    """Measure until the context ends."""
    lateness = Lateness()
    thread = threading.Thread(target=lateness._measure, daemon=True)
    thread.start()
    try:
        yield lateness
    finally:
        lateness._end.set()
        thread.join()
