"""Changes of one thing that could change a search's outcome, and the smallest of each that does.

Owns what is changed, by which steps, and its words; deploy.placement.reasons.explain says which
changes are worth a search, and what an outcome is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from deploy.placement.report import PlanChange
from deploy.placement.search.layouts import Device, Host
from deploy.placement.search.search import Inputs
from topspin.plan.precision import PrecisionRule, format_of

FACTORS = (1.1, 1.25, 1.5, 2, 3, 4, 8, 16)
MORE_HOSTS = (1, 2, 3, 4, 6, 8, 12, 16)
FOUR_BITS = ("int4", "mxfp4")


class Knob(NamedTuple):
    """A thing that may be changed by ascending `steps`, and what a step is called."""

    steps: Sequence[float]
    changed: Callable[[float], Inputs]
    said: Callable[[float], str]


def smallest(knob: Knob, outcome: Callable[[Inputs], str]) -> PlanChange | None:
    """Return the first step that has an outcome, by bisection; None: even the last has none."""
    told = outcome(knob.changed(knob.steps[-1]))
    if not told:
        return None
    low, high = -1, len(knob.steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if found := outcome(knob.changed(knob.steps[middle])):
            high, told = middle, found
        else:
            low = middle
    return PlanChange(change=knob.said(knob.steps[high]), outcome=told)


def target(inputs: Inputs, name: str) -> Knob:
    """Return a later target: `ttft_s` or `tpot_s`."""
    targets = inputs.workload.targets
    limit_s = getattr(targets, name)

    def changed(factor: float) -> Inputs:
        new = msgspec.structs.replace(targets, **{name: limit_s * factor})
        return dataclasses.replace(
            inputs, workload=msgspec.structs.replace(inputs.workload, targets=new)
        )

    def said(factor: float) -> str:
        return f"a {name[:4].upper()} of {limit_s * factor:.4g} s instead of {limit_s:.4g} s"

    return Knob(FACTORS, changed, said)


def memory(inputs: Inputs) -> Knob:
    """Return more memory on every device."""

    def changed(factor: float) -> Inputs:
        def larger(device: Device) -> Device:
            return dataclasses.replace(device, memory_bytes=int(device.memory_bytes * factor))

        hosts = [
            dataclasses.replace(host, devices=tuple(map(larger, host.devices)))
            for host in inputs.hosts
        ]
        return dataclasses.replace(inputs, hosts=tuple(hosts))

    return Knob(FACTORS, changed, lambda factor: f"{factor:g} times the memory on every device")


def links(inputs: Inputs) -> Knob:
    """Return faster links within hosts."""

    def changed(factor: float) -> Inputs:
        def faster(host: Host) -> Host:
            new = tuple(
                msgspec.structs.replace(
                    link, alpha_us=link.alpha_us / factor, gbps=link.gbps * factor
                )
                for link in host.spec.links
            )
            return dataclasses.replace(host, spec=msgspec.structs.replace(host.spec, links=new))

        return dataclasses.replace(inputs, hosts=tuple(map(faster, inputs.hosts)))

    return Knob(FACTORS, changed, lambda factor: f"links within hosts {factor:g} times as fast")


def between_hosts(inputs: Inputs) -> Knob:
    """Return a faster link between hosts."""
    link = inputs.between_hosts
    assert link is not None

    def changed(factor: float) -> Inputs:
        new = msgspec.structs.replace(
            link, alpha_us=link.alpha_us / factor, gbps=link.gbps * factor
        )
        return dataclasses.replace(inputs, between_hosts=new)

    return Knob(FACTORS, changed, lambda factor: f"a link between hosts {factor:g} times as fast")


def more_hosts(inputs: Inputs) -> Iterator[Knob]:
    """Yield more hosts of each kind."""
    for idx, host in enumerate(inputs.hosts):
        devices = " and ".join(f"{each.count} {each.name}" for each in host.devices)

        def changed(more: float, idx: int = idx, host: Host = host) -> Inputs:
            count = host.spec.count + int(more)
            spec = msgspec.structs.replace(host.spec, count=count, addresses=None)
            hosts = list(inputs.hosts)
            hosts[idx] = dataclasses.replace(host, spec=spec)
            return dataclasses.replace(inputs, hosts=tuple(hosts))

        def said(more: float, name: str = host.spec.name, devices: str = devices) -> str:
            return f"{more:g} more host{'s' * (more > 1)} {name} ({devices} each)"

        yield Knob(MORE_HOSTS, changed, said)


def four_bits(inputs: Inputs) -> Iterator[Knob]:
    """Yield experts in 4 bits, if they have more: what it costs in quality is not looked at."""
    if any(
        format_of(rules, "experts", layer, 0) in FOUR_BITS
        for rules in inputs.precision.values()
        for layer in inputs.model.moe_layers
    ):
        return

    def changed(_: float) -> Inputs:
        fewer = PrecisionRule(format="int4", part="experts")
        precision = {
            kernels: (*inputs.precision.get(kernels, ()), fewer) for kernels in ("triton", "cpu")
        }
        return dataclasses.replace(inputs, precision=precision, sensitivity=None)

    yield Knob((1,), changed, lambda _: "4 bits for the experts, if their quality does")
