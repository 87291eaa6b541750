"""The engines that a host could hold: which of its devices serve attention, experts, or both.

Owns the enumeration and what a slot is. Knows no times: deploy.placement.search.rating prices a
layout. Called by deploy.placement.search.search.

A GPU is a slot. A CPU is one slot with all its cores, or several that divide them. Engines over
several hosts are deploy.placement.search.spans'.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deploy.placement.cluster import HostGroup, HostLink, LinkTransport
from deploy.placement.devices import DeviceProfile
from deploy.placement.shapes import Kernels
from topspin.devices import CPU, CUDA, Place, check_transport
from topspin.errors import ConfigError
from topspin.plan.settings import Transport

LayoutKind = Literal["one_process", "turns", "apart"]
MAX_LAYOUTS = 3000
"""Of a host; a larger number of ways leaves out engines with several device types per role."""
MOST_NODES = 64
"""Of a role, of one engine: beyond them copies of the engine are planned."""
MOST_RANGES = 4
"""The most devices over which the layers of an attention node are cut."""
MAX_CHAINS = 48
"""Of a host; more ways to cut the attention over its devices are left out, the longest first."""
STAGE_TRANSPORTS: tuple[LinkTransport, ...] = ("shm", "tcp")
"""What passes rows on from one layer range to the next."""
CPU_PARTS = 4
"""The most nodes that divide a CPU's cores."""


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """A device group of a host with its profile; compared by identity.

    `memory_bytes`, `price_per_hour`: of one device. `cores`: of a CPU (0: a GPU).
    """

    group: int
    profile: DeviceProfile
    count: int
    memory_bytes: int
    price_per_hour: float
    cores: int
    slow: float

    @property
    def is_gpu(self) -> bool:
        """Say whether it is a GPU."""
        return self.profile.kind == "cuda"

    @property
    def kernels(self) -> Kernels:
        """Return the kernels that compute there and pack its weights."""
        return "triton" if self.is_gpu else "cpu"

    @property
    def name(self) -> str:
        """Return the device's name, for people."""
        return self.profile.name


@dataclass(frozen=True, slots=True)
class Host:
    """A host group whose devices' profiles have been read."""

    spec: HostGroup
    devices: tuple[Device, ...]


class HostSpan(NamedTuple):
    """The whole hosts of one role: `num_hosts` like ones, at most `num_nodes` nodes on each."""

    host: Host
    num_hosts: int
    num_nodes: int

    def __str__(self) -> str:
        return f"{self.num_hosts} x {self.host.spec.name}"


class DeviceSlot(NamedTuple):
    """Room for one node: a device, or `threads` cores of one (0: a GPU)."""

    device: Device
    threads: int


Counts = tuple[int, ...]
"""A number for each device group of a host."""
DeviceSlots = tuple[tuple[DeviceSlot, int], ...]
"""Like slots, and how many of them."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The slots of one engine.

    `one_process`: a device that serves both roles without a link. `turns`: two processes that
    share a CPU's cores. `apart`: every node has a slot of its own. `used[g]` devices of group g.
    `shares_memory`: all slots are parts of one device's memory. `stages`: the slots of the later
    layers of the one attention node there is then, in their order (topspin.plan.stages).
    `spans`: the hosts of the attention nodes, then those of the expert nodes, of an engine over
    several; `host` stands for all of them together.
    """

    host: Host
    kind: LayoutKind
    attention: DeviceSlots
    experts: DeviceSlots
    transport: Transport
    link: HostLink | None
    used: tuple[int, ...]
    shares_memory: bool = False
    stages: tuple[DeviceSlot, ...] = ()
    spans: tuple[HostSpan, ...] = ()

    @property
    def chain(self) -> tuple[DeviceSlot, ...]:
        """Return the slots of the first attention node's layers; one, if they are not cut."""
        return (self.attention[0][0], *self.stages)

    @property
    def holders(self) -> DeviceSlots:
        """Return all slots that hold layers of an attention node."""
        return (*self.attention, *((slot, 1) for slot in self.stages))

    @property
    def num_attention(self) -> int:
        """Return M."""
        return sum(count for _, count in self.attention)

    @property
    def num_experts(self) -> int:
        """Return N."""
        return sum(count for _, count in self.experts)

    @property
    def is_colocated(self) -> bool:
        """Say whether a CPU's attention node computes all experts itself, in one recorded step."""
        return self.kind == "one_process" and not self.attention[0][0].device.is_gpu

    @property
    def takes_turns(self) -> bool:
        """Say whether attention and experts compute in turns on the same cores or device."""
        return self.kind != "apart"

    @property
    def price_per_hour(self) -> float:
        """Return the price of its devices."""
        return sum(
            device.price_per_hour * used
            for device, used in zip(self.host.devices, self.used, strict=True)
        )

    @property
    def per_host(self) -> int:
        """Return how many copies a host holds."""
        devices = zip(self.host.devices, self.used, strict=True)
        return min(device.count // used for device, used in devices if used)

    @property
    def family(self) -> str:
        """Return its host, and which types of devices serve which role, for people."""
        attention = " + ".join(sorted({slot.device.name for slot, _ in self.holders}))
        if self.stages:
            attention = f"{attention} by layer ranges"
        experts = " + ".join(sorted({slot.device.name for slot, _ in self.experts}))
        host = self.host.spec.name
        if self.kind == "one_process":
            return f"{host}: both roles on {attention}, one process"
        if not self.experts:
            return f"{host}: {attention}"
        if self.kind == "turns":
            return f"{host}: both roles on {attention}, in turns"
        return f"{host}: attention on {attention}, experts on {experts}"

    def __str__(self) -> str:
        if self.kind == "one_process":
            return f"{_names(self.attention)} in one process"
        attention = _names(self.attention)
        if self.stages:
            names = ", ".join(slot.device.name for slot in self.chain)
            attention = f"{names} by layer ranges"
        if not self.experts:
            return attention
        if self.kind == "turns":
            return f"attention and experts in turns on {attention}"
        experts = _names(self.experts)
        if self.spans:
            attention, experts = (
                f"{names} ({span})"
                for names, span in zip((attention, experts), self.spans, strict=True)
            )
        return f"attention on {attention}, experts on {experts}"


class Layouts(NamedTuple):
    """The layouts of a host, and whether they are all there could be."""

    layouts: tuple[EngineLayout, ...]
    is_complete: bool


def layouts_of(host: Host, *, num_experts: int) -> Layouts:
    """Return the layouts of a host for a model with `num_experts` per MoE layer (0: dense)."""
    found = list(_on_one_device(host, num_experts))
    apart, is_complete = _apart(host, num_experts)
    cut = list(itertools.islice(_cut(host, num_experts), MAX_CHAINS + 1))
    if cut:
        # Expert nodes beside a cut are counted in the wider steps of _steps().
        in_ones = not num_experts or all(len(_steps(d.count)) == d.count for d in host.devices)
        is_complete = is_complete and in_ones and len(cut) <= MAX_CHAINS
    return Layouts((*found, *apart, *cut[:MAX_CHAINS]), is_complete)


def _on_one_device(host: Host, num_experts: int) -> Iterator[EngineLayout]:
    """Yield what one device can serve alone: both roles on a GPU, or on a CPU's cores."""
    for device in host.devices:
        whole = ((DeviceSlot(device, device.cores), 1),)
        if not num_experts:
            yield from _joined(host, whole, ())
            continue
        yield from _joined(host, whole, whole, kind="one_process", shares_memory=True)
        if not device.is_gpu:
            yield from _joined(host, whole, whole, kind="turns", shares_memory=True)
            for attention, experts in _parts(device, num_experts):
                yield from _joined(host, (attention,), (experts,), shares_memory=True)


def _parts(
    device: Device, num_experts: int
) -> Iterator[tuple[tuple[DeviceSlot, int], tuple[DeviceSlot, int]]]:
    """Yield the ways to divide a CPU's cores between nodes: two unequal ones, or some equal."""
    cores = device.cores
    cuts = sorted({cut for cut in (cores // 4, cores // 2, cores - cores // 4) if 0 < cut < cores})
    for cut in cuts:
        yield (DeviceSlot(device, cut), 1), (DeviceSlot(device, cores - cut), 1)
    for parts in range(3, CPU_PARTS + 1):
        if cores % parts:
            continue
        slot = DeviceSlot(device, cores // parts)
        for num_attention in range(1, parts):
            if parts - num_attention <= num_experts:
                yield (slot, num_attention), (slot, parts - num_attention)


def _apart(host: Host, num_experts: int) -> tuple[list[EngineLayout], bool]:
    """Return the layouts whose nodes have a device each, and whether they are all."""
    counts = [min(device.count, MOST_NODES) for device in host.devices]
    is_complete = all(device.count <= MOST_NODES for device in host.devices)
    pairs: Iterator[tuple[Counts, Counts]]
    if not num_experts:
        vectors = itertools.product(*(range(count + 1) for count in counts))
        several = ((each, (0,) * len(counts)) for each in vectors if sum(each) > 1)
        pairs = itertools.islice(several, MAX_LAYOUTS)
    elif math.prod((count + 1) * (count + 2) // 2 for count in counts) <= MAX_LAYOUTS:
        pairs = _all_pairs(counts)
    else:
        pairs, is_complete = _single_pairs(counts), False
    return [
        layout
        for attention, experts in pairs
        if any(attention) and sum(experts) <= num_experts and any(experts) == bool(num_experts)
        for layout in _joined(host, _slots(host, attention), _slots(host, experts))
    ], is_complete


def _cut(host: Host, num_experts: int) -> Iterator[EngineLayout]:
    """Yield the layouts whose one attention node is cut by layers over CPUs, short chains first.

    topspin.plan.stages says what the engine runs: CPUs, which pass rows on over shm or tcp.
    """
    cpus = [device for device in host.devices if not device.is_gpu]
    for length in range(2, MOST_RANGES + 1):
        for chain in itertools.product(cpus, repeat=length):
            left = [min(each.count - chain.count(each), MOST_NODES) for each in host.devices]
            if min(left) < 0:
                continue
            ways: Iterator[Counts] = iter([(0,) * len(left)])
            if num_experts:
                ways = itertools.product(*([0, *_steps(count)] for count in left))
            head, *others = (DeviceSlot(device, device.cores) for device in chain)
            for experts in ways:
                if any(experts) == bool(num_experts) and sum(experts) <= num_experts:
                    yield from _joined(
                        host, ((head, 1),), _slots(host, experts), stages=tuple(others)
                    )


def _joined(
    host: Host,
    attention: DeviceSlots,
    experts: DeviceSlots,
    *,
    kind: LayoutKind = "apart",
    shares_memory: bool = False,
    stages: tuple[DeviceSlot, ...] = (),
) -> Iterator[EngineLayout]:
    """Yield the layout with the first of the host's links that can join its nodes, if one can."""
    used = [0] * len(host.devices)
    for slot, count in (*attention, *((slot, 1) for slot in stages), *experts):
        used[slot.device.group] += count
    if shares_memory:
        used = [min(1, count) for count in used]
    link: HostLink | None = None
    transport: Transport = "local" if kind == "one_process" else "shm"
    if kind != "one_process" and (experts or stages):
        nodes = [*(slot for slot, _ in attention), *stages]
        link = _link(host, nodes, experts, is_cut=bool(stages))
        if link is None:
            return
        transport = link.transport
    yield EngineLayout(
        host, kind, attention, experts, transport, link, tuple(used), shares_memory, stages
    )


def _all_pairs(counts: Sequence[int]) -> Iterator[tuple[Counts, Counts]]:
    """Yield every number of attention and of expert nodes per device group."""
    per_group = [
        [(a, e) for a in range(count + 1) for e in range(count + 1 - a)] for count in counts
    ]
    for way in itertools.product(*per_group):
        yield tuple(a for a, _ in way), tuple(e for _, e in way)


def _single_pairs(counts: Sequence[int]) -> Iterator[tuple[Counts, Counts]]:
    """Yield those with one device group per role, the larger numbers in wider steps."""
    groups = range(len(counts))
    for a_group, e_group in itertools.product(groups, groups):
        for a in _steps(counts[a_group]):
            room = counts[e_group] - (a if a_group == e_group else 0)
            for e in _steps(room):
                yield (
                    tuple(a if idx == a_group else 0 for idx in groups),
                    tuple(e if idx == e_group else 0 for idx in groups),
                )


def _steps(limit: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to `limit`, and `limit`."""
    steps = {1 << power for power in range(20)} | {3 << power for power in range(20)}
    return sorted({step for step in steps if step <= limit} | ({limit} if limit else set()))


def _slots(host: Host, counts: Sequence[int]) -> DeviceSlots:
    return tuple(
        (DeviceSlot(device, device.cores), count)
        for device, count in zip(host.devices, counts, strict=True)
        if count
    )


def most_copies(layout: EngineLayout, max_price: float | None) -> int:
    """Return how many copies of a layout its hosts hold, within a price."""
    host = layout.host.spec
    most = layout.per_host * host.count
    while max_price is not None and most and price_of(layout, most) > max_price * (1 + 1e-9):
        # At least one copy less per host's worth of money that is missing.
        over = price_of(layout, most) - max_price
        most -= max(1, math.floor(over / (layout.price_per_hour + host.price_per_hour or 1.0)))
    return max(0, most)


def price_of(layout: EngineLayout, copies: int) -> float:
    """Return the price of so many copies, with the hosts that they need."""
    hosts = -(-copies // layout.per_host)
    return hosts * layout.host.spec.price_per_hour + copies * layout.price_per_hour


def place_of(device: Device, number: int = 0) -> Place:
    """Return the place of a node on the `number`-th of like devices."""
    return Place(f"{CUDA}:{number}" if device.is_gpu else CPU, device.kernels)


def _link(
    host: Host, attention: Sequence[DeviceSlot], experts: DeviceSlots, *, is_cut: bool
) -> HostLink | None:
    """Return the first of the host's links that can join such nodes."""
    count = len(attention)
    sides = [place_of(slot.device, idx) for idx, slot in enumerate(attention)]
    others = [place_of(slot.device, idx + count) for idx, (slot, _) in enumerate(experts)]
    for link in host.spec.links:
        if is_cut and link.transport not in STAGE_TRANSPORTS:
            continue
        try:
            check_transport(sides, others, link.transport)
        except ConfigError:
            continue
        return link
    return None


def _names(slots: DeviceSlots) -> str:
    """Return slots for people: `2 H200 + 1 L40S`."""
    return " + ".join(
        f"{count} {slot.device.name}"
        + (f" ({slot.threads} of {slot.device.cores} cores)" if _is_part(slot) else "")
        for slot, count in slots
    )


def _is_part(slot: DeviceSlot) -> bool:
    return 0 < slot.threads < slot.device.cores
