"""The end of a connection of libzmq: its peer closed it, or was silent.

Owns a second handle of the connection. Knows no message. Called by topspin.processes.channel.
"""

from __future__ import annotations

import contextlib
import os
import socket


class Line:
    """A second handle of a peer's connection, which outlives libzmq's and tells how that ended.

    libzmq reports the same for a connection that its peer has closed and for one that it has given
    up. Without the number of a descriptor the peer counts as the one that closed it.
    """

    def __init__(self, fd: int | None, limit_s: float) -> None:
        """`fd` is libzmq's descriptor; `limit_s` the silence after which libzmq gives up."""
        self._silence = f"was silent for {limit_s:g} s"
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):  # it has closed already
            if fd is not None:
                self._socket = socket.socket(fileno=os.dup(fd))

    def end(self) -> str | None:
        """Let go of the connection; returns how its peer was silent, None: it closed it."""
        line, self._socket = self._socket, None
        if line is None:
            return None
        # OSError: the connection had closed before, and its number was another socket's.
        with line, contextlib.suppress(OSError):
            try:
                is_open = line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
            except BlockingIOError:
                is_open = True
            return self._silence if is_open else None
        return None
