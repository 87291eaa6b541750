"""Addresses of both IP families: where a process listens, and which family reaches another.

Owns the meaning of `::`: all addresses of this host, of both families, and of IPv4 alone where
there is no IPv6. Knows no message; called by whatever listens or connects beyond this process.
"""

from __future__ import annotations

import socket

from topspin.errors import ConfigError
from topspin.plan.settings import GatewaySection

ALL_ADDRESSES = "::"


def has_ipv6() -> bool:
    """Return whether this host can listen on IPv6 addresses."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((ALL_ADDRESSES, 0))
    except OSError:
        return False
    return True


def bound_socket(host: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """Return a TCP socket that is bound, not yet listening. Raises OSError.

    With `shares_port`, other sockets of this user that share it may have the same address.
    """
    if host == ALL_ADDRESSES and not has_ipv6():
        host = "0.0.0.0"
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if host == ALL_ADDRESSES:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def bind(section: GatewaySection) -> socket.socket:
    """Return a socket bound to the gateway's address, not yet listening.

    Raises ConfigError if the name does not resolve or the port is taken.
    """
    where = f"--host {section.host}" + (f" --port {section.port}" if section.port else "")
    try:
        return bound_socket(section.host, section.port)
    except socket.gaierror as error:
        raise ConfigError(f"{where}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error


def family_of(host: str) -> socket.AddressFamily:
    """Return the family by which `host`, a name or an address, is reached: IPv4 if it has that.

    Of a name that is not known yet it is the one that this host can send to. Raises nothing.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
        except OSError:
            continue
        return family
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
    except OSError:
        return socket.AF_INET6
    return socket.AF_INET


def address_of(host: str) -> str:
    """Return the address of `host`. Raises OSError if it has none."""
    found = socket.getaddrinfo(host, None, family_of(host), socket.SOCK_STREAM)
    return str(found[0][4][0])


def in_url(host: str) -> str:
    """Return `host` as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host else host
