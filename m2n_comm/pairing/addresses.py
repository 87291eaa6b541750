"""Data addresses of expert nodes: their forms, their sockets, and the peers allowed to connect.

"unix:@NAME" is shm and "tcp:HOST:PORT" tcp (an IPv6 address in brackets); "nixl:" before either and
"cuda_ipc:" before the first name the address of the handshake. Owns the rule which hosts are
allowed: loopback ones, and others where peers prove keys. Knows no handshake; open.py calls it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import struct
import time
from typing import Literal

from topspin.errors import ConfigError, DeadlineExceeded, PeerLost
from topspin.processes.listening import in_url
from topspin.processes.node_network import NodeNetwork

UNIX = "unix:"
TCP = "tcp:"
NIXL = "nixl:"
CUDA_IPC = "cuda_ipc:"


Between = Literal["shm", "tcp", "nixl", "cuda_ipc"]
"""The transports between processes."""

_BACKLOG = 512
_BUFFER_BYTES = 4 * 2**20


def transport_of(address: str) -> Between:
    """Return the transport of an expert node's address; connect() refuses other forms."""
    prefixes: tuple[tuple[str, Between], ...] = ((NIXL, "nixl"), (CUDA_IPC, "cuda_ipc"))
    for prefix, transport in prefixes:
        if address.startswith(prefix):
            return transport
    return "shm" if address.startswith(UNIX) else "tcp"


def listen(transport: Between, network: NodeNetwork) -> tuple[socket.socket, str]:
    """Return a non-blocking listening socket and its address.

    Raises ConfigError for a host that is not allowed (check_host) or not available.
    """
    prefix = {"nixl": NIXL, "cuda_ipc": CUDA_IPC}.get(transport, "")
    if transport in ("shm", "cuda_ipc") or (transport == "nixl" and network.host is None):
        name = f"topspin-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where: str | tuple[str, int] = f"\0{name}"
    else:
        host = network.host or "127.0.0.1"
        check_host(transport, host, network)
        sock = socket.socket(_family_of(host), socket.SOCK_STREAM)
        where, place = (host, 0), in_url(host)
    try:
        tune_socket(sock)
        sock.bind(where)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--transport {transport}: cannot listen: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    if sock.family == socket.AF_UNIX:
        return sock, f"{prefix}{UNIX}@{name}"
    return sock, f"{prefix}{TCP}{place}:{sock.getsockname()[1]}"


def tune_socket(sock: socket.socket, buffer_bytes: int = _BUFFER_BYTES) -> None:
    """Ask for large buffers (the kernel may give less), and for no delay of frames.

    BBR, where it is the system's congestion control, paces what is sent; a frame of many rows then
    takes two to three times as long, even on loopback.
    """
    if sock.family == socket.AF_UNIX:
        return
    congestion = socket.TCP_CONGESTION
    if sock.getsockopt(socket.IPPROTO_TCP, congestion, 16).startswith(b"bbr"):
        for unpaced in (b"cubic", b"reno"):
            with contextlib.suppress(OSError):  # not loaded, or not allowed
                sock.setsockopt(socket.IPPROTO_TCP, congestion, unpaced)
                break
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def connect(address: str, network: NodeNetwork, *, expert: int, deadline_s: float) -> socket.socket:
    """Return a connected socket.

    Raises ConfigError (see check_host too), PeerLost or DeadlineExceeded.
    """
    handshake = address.removeprefix(NIXL).removeprefix(CUDA_IPC)
    if handshake.startswith(f"{UNIX}@"):
        where: str | tuple[str, int] = "\0" + handshake.removeprefix(f"{UNIX}@")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    elif handshake.startswith(TCP):
        host, _, port = handshake.removeprefix(TCP).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"expert {expert}: {address!r} is not tcp:HOST:PORT")
        check_host(transport_of(address), host, network)
        where = (host, int(port))
        sock = socket.socket(_family_of(host), socket.SOCK_STREAM)
    else:
        raise ConfigError(f"expert {expert}: {address!r} is neither unix:@NAME nor tcp:HOST:PORT")
    try:
        tune_socket(sock)
        sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
        sock.connect(where)
    except TimeoutError as error:
        sock.close()
        raise DeadlineExceeded(f"expert {expert}: no connection to {address}") from error
    except OSError as error:
        sock.close()
        raise PeerLost(f"expert {expert}: {address}: {error.strerror}") from error
    if sock.family == socket.AF_UNIX and not same_user(sock):
        sock.close()
        raise PeerLost(f"expert {expert}: {address} belongs to another user")
    return sock


def is_on_this_host(address: str) -> bool:
    """Return whether the node at `address` is known to run on this host."""
    kind, _, rest = address.removeprefix(NIXL).removeprefix(CUDA_IPC).partition(":")
    return kind == "unix" or is_loopback(rest.rpartition(":")[0])


def check_host(transport: str, host: str, network: NodeNetwork) -> None:
    """Raise ConfigError unless `host` may be used by `transport`: not every network is trusted."""
    if is_loopback(host):
        return
    if network.keys is None:
        raise ConfigError(
            f"--transport {transport}: host {host!r} is not an IPv4 loopback address (127.0.0.1) "
            "or ::1, and beyond this host nodes need keys, without which anybody could send them "
            "frames"
        )
    if transport == "nixl" and not network.trusted_network:
        raise ConfigError(
            f"--transport nixl: host {host!r} is not an IPv4 loopback address (127.0.0.1) or ::1, "
            "and one-sided writes carry no authentication code; set trusted_network if nobody else "
            "can send to this network, or use tcp"
        )


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket runs as our user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())
