"""`::` is every address of this host, of both families, and of IPv4 where there is no IPv6."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from app.launch.engine import gateway_url
from topspin.plan.settings import GatewaySection
from topspin.processes import listening
from topspin.processes.listening import (
    address_of,
    bind,
    bound_socket,
    family_of,
    has_ipv6,
    in_url,
)

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


def reaches(listener: socket.socket, host: str) -> bool:
    """Return whether `listener`, which listens, is reached at `host`."""
    try:
        with socket.create_connection((host, listener.getsockname()[1])):
            return True
    except OSError:
        return False


def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have IPv6 addresses refused, as with the kernel's disable_ipv6."""
    whole = socket.socket

    class Refusing(whole):
        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Refusing)


@needs_ipv6
def test_all_addresses_are_of_both_families() -> None:
    with bound_socket("::", 0) as listener:
        listener.listen()
        assert listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 0
        assert reaches(listener, "127.0.0.1")
        assert reaches(listener, "::1")
    assert gateway_url("::", 1) == "http://[::1]:1"


def test_without_ipv6_they_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ipv6(monkeypatch)
    assert not has_ipv6()
    with bind(GatewaySection(host="::", port=0)) as listener:
        listener.listen()
        assert listener.family == socket.AF_INET
        assert reaches(listener, "127.0.0.1")
    assert gateway_url("::", 1) == "http://127.0.0.1:1"


@needs_ipv6
def test_one_address_is_that_one_only() -> None:
    for host, other in (("127.0.0.1", "::1"), ("::1", "127.0.0.1")):
        with bound_socket(host, 0) as listener:
            listener.listen()
            assert reaches(listener, host)
            assert not reaches(listener, other)


def test_a_name_is_reached_by_ipv4_if_it_has_that(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "both": {socket.AF_INET: "10.0.0.1", socket.AF_INET6: "fd00::1"},
        "six": {socket.AF_INET6: "fd00::1"},
    }

    def resolve(host: str, port: None, family: socket.AddressFamily, kind: int) -> list[Any]:
        try:
            return [(family, kind, 6, "", (known[host][family], 0))]
        except KeyError:
            raise socket.gaierror(socket.EAI_NONAME, "unknown") from None

    monkeypatch.setattr(listening.socket, "getaddrinfo", resolve)
    assert address_of("both") == "10.0.0.1"
    assert address_of("six") == "fd00::1"
    with pytest.raises(OSError, match="unknown"):
        address_of("none")

    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Probe)
    assert family_of("none") == socket.AF_INET6  # it may be known later


def test_an_address_stands_in_brackets_before_a_port() -> None:
    assert [in_url(host) for host in ("::", "10.0.0.1", "name")] == ["[::]", "10.0.0.1", "name"]
