"""The cluster file: hosts, their devices, and the links between them.

Owns the file's fields and their checks. What a device can do is its profile's business
(deploy.placement.devices); nothing is looked up on this machine. Called by
deploy.placement.command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from deploy.placement.devices import LITERATURE, DeviceProfile, LinkProfile, load_profile
from deploy.placement.documents import DocumentFields, read_document
from topspin.errors import ConfigError
from topspin.units import parse_size

Name = Annotated[str, Meta(min_length=1, max_length=100)]
Amount = Annotated[float, Meta(ge=0, le=1e9)]
LinkTransport = Literal["shm", "cuda_ipc", "tcp", "nixl"]
SPAN_TRANSPORTS: tuple[LinkTransport, ...] = ("tcp", "nixl")
"""What joins nodes of several hosts."""


class DeviceGroup(DocumentFields, frozen=True, kw_only=True):
    """Like devices of a host.

    `device` names a profile: a DEVICE.json, from the cluster file's directory, or a device of the
    literature. A CPU is one device with all its `cores`, which nodes share or divide. `cores`,
    `memory` (for example 24GiB) and `price_per_hour` replace the profile's. `slow` k: nodes there
    are made to take k times as long as the profile says (`slow` of the plan's nodes).
    """

    device: Name
    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    cores: Annotated[int, Meta(ge=1, le=4096)] | None = None
    memory: str | None = None
    price_per_hour: Amount | None = None
    slow: Annotated[float, Meta(ge=1, le=1000)] = 1.0

    def __post_init__(self) -> None:
        if self.memory is not None:
            try:
                parse_size(self.memory)
            except ConfigError as error:
                raise ConfigError(f"memory: {error}") from error


class HostLink(DocumentFields, frozen=True, kw_only=True):
    """What carries rows between two nodes: one way, `alpha_us` plus the bytes at `gbps` (bits)."""

    transport: LinkTransport
    alpha_us: Annotated[float, Meta(ge=0, le=1e6)]
    gbps: Annotated[float, Meta(gt=0, le=1e6)]

    @property
    def link(self) -> LinkProfile:
        """Return it for the cost model."""
        return LinkProfile(
            name=self.transport, alpha_s=self.alpha_us * 1e-6, bytes_per_s=self.gbps * 1e9 / 8
        )


class HostGroup(DocumentFields, frozen=True, kw_only=True):
    """`count` like hosts. `price_per_hour` is that of a host, on top of its devices'.

    `links` join the nodes of one host: the first that can join two devices is used
    (topspin.devices.check_transport: cuda_ipc joins GPUs, shm anything). `addresses`: by which each
    host is reached; None: NAME-0, NAME-1, ...
    """

    name: Name
    count: Annotated[int, Meta(ge=1, le=100_000)] = 1
    devices: Annotated[tuple[DeviceGroup, ...], Meta(min_length=1, max_length=16)]
    links: Annotated[tuple[HostLink, ...], Meta(min_length=1)]
    price_per_hour: Amount = 0.0
    addresses: tuple[Name, ...] | None = None

    def __post_init__(self) -> None:
        if self.addresses is not None and len(self.addresses) != self.count:
            raise ConfigError(
                f"{self.name}: {len(self.addresses)} addresses for {self.count} hosts"
            )

    def address(self, number: int) -> str:
        """Return by what name or address a host of the group is reached."""
        return f"{self.name}-{number}" if self.addresses is None else self.addresses[number]


class Cluster(DocumentFields, frozen=True, kw_only=True):
    """All hosts, and the link between hosts (None: they are not joined).

    `between_hosts.gbps`: of a host's card each way, which all its nodes share.
    """

    hosts: Annotated[tuple[HostGroup, ...], Meta(min_length=1, max_length=64)]
    between_hosts: HostLink | None = None

    def __post_init__(self) -> None:
        if self.between_hosts is not None and self.between_hosts.transport not in SPAN_TRANSPORTS:
            raise ConfigError(
                f"between_hosts: transport {self.between_hosts.transport} joins nodes of one host; "
                f"give one of {', '.join(SPAN_TRANSPORTS)}"
            )
        names = [host.name for host in self.hosts]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"hosts: the name {name} is there twice")


def read_cluster(path: Path) -> Cluster:
    """Return the cluster file at `path`; raises ConfigError naming the field."""
    return read_document("--cluster", path, Cluster)


def profile_of(group: DeviceGroup, directory: Path) -> DeviceProfile:
    """Return the profile that a group names: of a file in `directory`, or of the literature.

    Raises ConfigError naming the file.
    """
    is_known = (LITERATURE / f"{group.device}.json").exists()
    return load_profile(group.device if is_known else directory / group.device)
