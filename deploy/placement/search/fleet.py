"""How many copies of which engines serve a load: packing engines into hosts, hosts into a fleet.

Owns two exact steps over engines that were rated before: what a host can hold at best for every
choice of its devices (dynamic programming), and how many hosts of each filling the fleet takes (an
integer program, scipy's HiGHS). Pure: knows rates and prices only. Called by
deploy.placement.search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

MAX_STATES = 20_000
"""Choices of a host's devices for which the best filling is found exactly."""
GAP = 1e-6

Devices = tuple[int, ...]
"""The number of devices of each group of a host."""


class Filling(NamedTuple):
    """Engines on one host: their keys, the rate and the price of all together."""

    engines: tuple[int, ...]
    rate: float
    price: float


class FleetHost(NamedTuple):
    """`num_hosts` like hosts; `prices` of a host itself, and of a device of each group."""

    num_hosts: int
    devices: Devices
    host_price: float
    prices: tuple[float, ...]


class Rated(NamedTuple):
    """An engine: its key, the devices that it takes of a host, and the load that it carries."""

    key: int
    used: Devices
    rate: float


class Fleet(NamedTuple):
    """Copies of each engine by key; `is_exact`: no better fleet of these engines exists."""

    copies: dict[int, int]
    rate: float
    price: float
    is_exact: bool


def fillings(host: FleetHost, engines: Sequence[Rated]) -> tuple[list[Filling], bool]:
    """Return the fillings of a host that no other beats in rate and price, and if they are all."""
    best: dict[Devices, Rated] = {}
    for engine in engines:
        if engine.used not in best or engine.rate > best[engine.used].rate:
            best[engine.used] = engine
    # Idle devices cost nothing: an engine with fewer may carry as much.
    choices = sorted(best.values(), key=lambda engine: engine.used)
    if math.prod(count + 1 for count in host.devices) > MAX_STATES:
        return _front([_copies(host, engine) for engine in choices]), False
    table: dict[Devices, tuple[float, tuple[int, ...]]] = {(0,) * len(host.devices): (0.0, ())}
    for state in itertools.product(*(range(count + 1) for count in host.devices)):
        for engine in choices:
            before = tuple(have - take for have, take in zip(state, engine.used, strict=True))
            if min(before) < 0 or before not in table:
                continue
            rate, keys = table[before]
            if rate + engine.rate > table.get(state, (0.0, ()))[0]:
                table[state] = (rate + engine.rate, (*keys, engine.key))
    found = [
        Filling(keys, rate, _price(host, state)) for state, (rate, keys) in table.items() if keys
    ]
    return _front(found), True


def _copies(host: FleetHost, engine: Rated) -> Filling:
    """Return a host full of one engine."""
    most = min(have // take for have, take in zip(host.devices, engine.used, strict=True) if take)
    used = tuple(most * take for take in engine.used)
    return Filling((engine.key,) * most, most * engine.rate, _price(host, used))


def _price(host: FleetHost, used: Devices) -> float:
    return host.host_price + sum(
        count * price for count, price in zip(used, host.prices, strict=True)
    )


def _front(found: Sequence[Filling]) -> list[Filling]:
    """Return those that no other equals or beats in both rate and price."""
    front: list[Filling] = []
    for each in sorted(found, key=lambda filling: (filling.price, -filling.rate)):
        if not front or each.rate > front[-1].rate * (1 + 1e-12):
            front.append(each)
    return front


def cheapest(
    hosts: Mapping[str, FleetHost], engines: Mapping[str, Sequence[Rated]], *, rate: float
) -> Fleet | None:
    """Return the cheapest fleet that carries `rate`; None if all hosts together do not."""
    columns, is_exact = _columns(hosts, engines)
    if not columns:
        return None
    costs = np.array([filling.price for _, filling in columns])
    found = _solve(hosts, columns, costs=costs, least_rate=rate)
    return None if found is None else _fleet(columns, found, is_exact=is_exact)


def largest(
    hosts: Mapping[str, FleetHost],
    engines: Mapping[str, Sequence[Rated]],
    *,
    max_price: float | None,
) -> Fleet | None:
    """Return the fleet that carries most within the price; None: nothing carries anything."""
    columns, is_exact = _columns(hosts, engines)
    if not columns:
        return None
    costs = np.array([-filling.rate for _, filling in columns])
    found = _solve(hosts, columns, costs=costs, max_price=max_price)
    if found is None or not any(found):
        return None
    return _fleet(columns, found, is_exact=is_exact)


Columns = list[tuple[str, Filling]]


def _columns(
    hosts: Mapping[str, FleetHost], engines: Mapping[str, Sequence[Rated]]
) -> tuple[Columns, bool]:
    columns: Columns = []
    is_exact = True
    for name, host in hosts.items():
        found, is_whole = fillings(host, [each for each in engines[name] if each.rate > 0])
        columns += [(name, filling) for filling in found]
        is_exact = is_exact and is_whole
    return columns, is_exact


def _solve(
    hosts: Mapping[str, FleetHost],
    columns: Columns,
    *,
    costs: np.ndarray,
    least_rate: float | None = None,
    max_price: float | None = None,
) -> list[int] | None:
    """Return the number of hosts with each filling."""
    names = list(hosts)
    rows = [[float(name == each) for each, _ in columns] for name in names]
    low = [0.0] * len(names)
    high = [float(hosts[name].num_hosts) for name in names]
    rates = [filling.rate for _, filling in columns]
    prices = [filling.price for _, filling in columns]
    for values, least, most in ((rates, least_rate, None), (prices, None, max_price)):
        if least is not None or most is not None:
            scale = max(values) or 1.0
            rows.append([value / scale for value in values])
            low.append(-np.inf if least is None else least / scale * (1 - 1e-9))
            high.append(np.inf if most is None else most / scale * (1 + 1e-9))
    bounds = [hosts[name].num_hosts for name, _ in columns]
    scale = float(np.max(np.abs(costs))) or 1.0
    # Of fleets at the same cost the one with fewer hosts.
    result = milp(
        costs / scale + 1e-9,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, bounds),
        options={"mip_rel_gap": GAP, "time_limit": 5.0},
    )
    return None if result.x is None else [round(value) for value in result.x]


def _fleet(columns: Columns, numbers: Sequence[int], *, is_exact: bool) -> Fleet:
    copies: dict[int, int] = {}
    rate = price = 0.0
    for (_, filling), number in zip(columns, numbers, strict=True):
        rate += number * filling.rate
        price += number * filling.price
        for key in filling.engines if number else ():
            copies[key] = copies.get(key, 0) + number
    return Fleet(copies, rate, price, is_exact)
