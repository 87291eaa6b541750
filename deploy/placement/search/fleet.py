"""The fleet that serves a load: engines packed into hosts, hosts chosen for the fleet.

Owns two exact steps over engines whose loads are known: what a host can hold at best for every
choice of its devices (dynamic programming), and how many hosts of each filling, and how many
engines over hosts, the fleet takes (an integer program, scipy's HiGHS). Pure: knows rates and
prices only. Called by deploy.placement.search.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
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


class Rated(NamedTuple):
    """An engine: its key, the devices that it takes of a host, and the load that it carries."""

    key: int
    used: Devices
    rate: float


class FleetHost(NamedTuple):
    """`num_hosts` like hosts, and what they can hold.

    `prices` of a host itself, and of a device of each group.
    """

    num_hosts: int
    devices: Devices
    host_price: float
    prices: tuple[float, ...]
    engines: tuple[Rated, ...]


class Spanning(NamedTuple):
    """An engine over hosts: its key, the hosts of each kind that it takes, its load and price."""

    key: int
    hosts: tuple[int, ...]
    rate: float
    price: float


class _FleetColumn(NamedTuple):
    """What a fleet may have several of: hosts of each kind, and the engines on them."""

    hosts: tuple[int, ...]
    engines: tuple[int, ...]
    rate: float
    price: float


class Fleet(NamedTuple):
    """Copies of each engine by key; `is_exact`: no better fleet of these engines exists."""

    copies: dict[int, int]
    rate: float
    price: float
    is_exact: bool


@lru_cache(maxsize=64)
def fillings(host: FleetHost) -> tuple[list[Filling], bool]:
    """Return the fillings of a host that no other beats in rate and price, and if they are all."""
    best: dict[Devices, Rated] = {}
    for engine in host.engines:
        if engine.rate > 0 and (engine.used not in best or engine.rate > best[engine.used].rate):
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


def best_fleet(
    hosts: Sequence[FleetHost],
    spanning: Sequence[Spanning] = (),
    *,
    least_rate: float | None = None,
    max_price: float | None = None,
) -> Fleet | None:
    """Return the cheapest fleet that carries `least_rate`; None: the one that carries most.

    Within `max_price`. None if there is none, or nothing carries anything.
    """
    columns = [
        _FleetColumn(each.hosts, (each.key,), each.rate, each.price)
        for each in spanning
        if each.rate > 0
    ]
    is_exact = True
    for idx, host in enumerate(hosts):
        found, is_whole = fillings(host)
        one = tuple(int(idx == each) for each in range(len(hosts)))
        columns += [_FleetColumn(one, *filling) for filling in found]
        is_exact = is_exact and is_whole
    numbers = _solve(hosts, columns, least_rate, max_price) if columns else None
    if numbers is None or not any(numbers):
        return None
    copies: Counter[int] = Counter()
    rate = price = 0.0
    for column, number in zip(columns, numbers, strict=True):
        rate += number * column.rate
        price += number * column.price
        for key in column.engines if number else ():
            copies[key] += number
    return Fleet(dict(copies), rate, price, is_exact)


def _solve(
    hosts: Sequence[FleetHost],
    columns: Sequence[_FleetColumn],
    least_rate: float | None,
    max_price: float | None,
) -> list[int] | None:
    """Return how many the fleet has of each column."""
    rows = [[float(column.hosts[idx]) for column in columns] for idx in range(len(hosts))]
    low = [0.0] * len(hosts)
    high = [float(host.num_hosts) for host in hosts]
    rates = [column.rate for column in columns]
    prices = [column.price for column in columns]
    most = [
        min(host.num_hosts // need for host, need in zip(hosts, column.hosts, strict=True) if need)
        for column in columns
    ]
    for values, least, limit in ((rates, least_rate, None), (prices, None, max_price)):
        if least is not None or limit is not None:
            scale = max(values) or 1.0
            rows.append([value / scale for value in values])
            low.append(-np.inf if least is None else least / scale * (1 - 1e-9))
            high.append(np.inf if limit is None else limit / scale * (1 + 1e-9))
    costs = -np.array(rates) if least_rate is None else np.array(prices)
    scale = float(np.max(np.abs(costs))) or 1.0
    # Of fleets at the same cost the one with fewer hosts.
    result = milp(
        costs / scale + 1e-9 * np.array([sum(column.hosts) for column in columns]),
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, most),
        options={"mip_rel_gap": GAP, "time_limit": 5.0},
    )
    return None if result.x is None else [round(value) for value in result.x]
