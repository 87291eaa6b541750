"""Engines over several hosts: attention nodes on some whole hosts, expert nodes on others.

Owns which there are: a kind of device of a kind of host for each role, and how many hosts. Hosts of
one kind are alike, so that only their numbers count. Knows no times: deploy.placement.search.rating
prices a layout, .bounds says what it carries at most. Called by deploy.placement.search.search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from deploy.placement.cluster import HostLink
from deploy.placement.search.layouts import (
    MOST_NODES,
    Device,
    DeviceSlot,
    EngineLayout,
    Host,
    HostSpan,
)


def spans_of(
    hosts: Sequence[Host], link: HostLink | None, *, num_experts: int
) -> Iterator[EngineLayout]:
    """Yield the engines over hosts that are joined by `link`; None: they are not joined.

    A role has at most MOST_NODES nodes, and expert nodes are no more than experts: a host on which
    there would be none is not taken.
    """
    if link is None or not num_experts:
        return
    for near, far in itertools.product(hosts, repeat=2):
        for own, other in itertools.product(near.devices, far.devices):
            enough = -(-num_experts // other.count)
            for first in range(1, min(near.spec.count, MOST_NODES // own.count) + 1):
                left = far.spec.count - (first if near is far else 0)
                for second in range(1, min(left, enough, MOST_NODES // other.count) + 1):
                    attention = HostSpan(near, first, own.count)
                    experts = HostSpan(far, second, min(other.count, num_experts))
                    num_nodes = min(second * other.count, num_experts)
                    yield _layout(attention, own, experts, other, link=link, num_nodes=num_nodes)


def _layout(
    near: HostSpan, own: Device, far: HostSpan, other: Device, *, link: HostLink, num_nodes: int
) -> EngineLayout:
    """Return the engine with `num_nodes` expert nodes; its host stands for all hosts together."""
    used = (near.num_hosts * near.num_nodes, num_nodes)
    first, second = near.host.spec, far.host.spec
    copies = min(first.count // near.num_hosts, second.count // far.num_hosts)
    if near.host is far.host:
        copies = first.count // (near.num_hosts + far.num_hosts)
    spec = msgspec.structs.replace(
        first,
        name=" + ".join(dict.fromkeys((first.name, second.name))) + ", several hosts",
        count=copies,
        devices=(first.devices[own.group], second.devices[other.group]),
        links=(link,),
        price_per_hour=near.num_hosts * first.price_per_hour
        + far.num_hosts * second.price_per_hour,
        addresses=None,
    )
    devices = tuple(
        replace(device, group=group, count=count)
        for group, (device, count) in enumerate(zip((own, other), used, strict=True))
    )
    attention, experts = (
        ((DeviceSlot(device, device.cores), count),)
        for device, count in zip((own, other), used, strict=True)
    )
    return EngineLayout(
        Host(spec, devices),
        "apart",
        attention,
        experts,
        link.transport,
        link,
        used,
        spans=(near, far),
    )


def hosts_taken(layout: EngineLayout, hosts: Sequence[Host]) -> tuple[int, ...]:
    """Return how many hosts of each kind an engine over hosts takes."""
    return tuple(
        sum(span.num_hosts for span in layout.spans if span.host is host) for host in hosts
    )
