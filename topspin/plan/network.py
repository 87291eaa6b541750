"""Several hosts: the part of an engine plan that says how its processes find each other.

Owns that part's structure and the form of addresses. Part of topspin.plan.spec; called by all who
open a control channel.
"""

from __future__ import annotations

import ipaddress

from topspin.errors import ConfigError
from topspin.plan.settings import Section

LOCALHOST = "localhost"


class NetworkSpec(Section, frozen=True, kw_only=True):
    """The engine's processes are started one by one (`topspin scheduler`, `gateway`, `node`).

    `control` is tcp://HOST:PORT, where the scheduler listens. Each node's `host` is where the
    others reach it. `trusted`: nobody else can send to the network, so rows may travel by nixl,
    which cannot authenticate them.
    """

    control: str
    trusted: bool = False


def place_of(address: str, *, name: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT; an IPv6 address stands in brackets.

    Raises ConfigError with `name` for another form.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 2**16
    if not (address.startswith("tcp://") and host and is_port):
        raise ConfigError(f"{name} {address!r} is not tcp://HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address, is this host only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
