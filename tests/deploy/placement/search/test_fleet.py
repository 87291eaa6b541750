"""Fleets against every way to fill every host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.placement.search.fleet import FleetHost, Rated, best_fleet


def ways_to_fill(host: FleetHost) -> Iterator[tuple[float, float]]:
    """Yield the rate and the price of everything that one host can hold, nothing too."""
    most, engines = max(host.devices), host.engines
    for copies in itertools.product(range(most + 1), repeat=len(engines)):
        used = [
            sum(number * engine.used[group] for number, engine in zip(copies, engines, strict=True))
            for group in range(len(host.devices))
        ]
        if all(need <= have for need, have in zip(used, host.devices, strict=True)):
            rate = sum(n * engine.rate for n, engine in zip(copies, engines, strict=True))
            price = sum(n * each for n, each in zip(used, host.prices, strict=True))
            yield rate, price + (host.host_price if any(copies) else 0.0)


def all_fleets(hosts: Sequence[FleetHost]) -> Iterator[tuple[float, float]]:
    """Yield the rate and the price of every fleet."""
    single = [ways for host in hosts for ways in [set(ways_to_fill(host))] * host.num_hosts]
    for chosen in itertools.product(*single):
        yield sum(rate for rate, _ in chosen), sum(price for _, price in chosen)


@st.composite
def clusters(draw: st.DrawFn) -> list[FleetHost]:
    """Return up to two kinds of hosts with up to three engines each."""
    found: list[FleetHost] = []
    for _ in range(draw(st.integers(1, 2))):
        devices = tuple(draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 2))))
        prices = tuple(float(draw(st.integers(0, 5))) for _ in devices)
        num_hosts, host_price = draw(st.integers(1, 2)), float(draw(st.integers(0, 3)))
        engines = []
        for key in range(draw(st.integers(1, 3))):
            used = tuple(draw(st.integers(0, have)) for have in devices)
            if any(used):
                rate = float(draw(st.integers(0, 9)))
                engines.append(Rated(len(found) * 10 + key, used, rate))
        found.append(FleetHost(num_hosts, devices, host_price, prices, tuple(engines)))
    return found


@settings(max_examples=30)
@given(clusters(), st.integers(1, 30), st.integers(1, 20))
def test_fleets_are_the_best_of_all(hosts: list[FleetHost], rate: int, price: int) -> None:
    fleets = list(all_fleets(hosts))
    for limit in (None, float(price)):
        within = [(r, p) for r, p in fleets if limit is None or p <= limit]
        cheap = best_fleet(hosts, least_rate=float(rate), max_price=limit)
        least = min((p for r, p in within if r >= rate), default=None)
        assert (cheap is None) == (least is None)
        if cheap is not None and least is not None:
            assert cheap.is_exact
            assert cheap.rate >= rate * (1 - 1e-6)
            assert abs(cheap.price - least) < 1e-6
        big = best_fleet(hosts, max_price=limit)
        most = max(r for r, _ in within)
        assert abs((0.0 if big is None else big.rate) - most) < 1e-6
        if big is not None and limit is not None:
            assert big.price <= limit * (1 + 1e-6)
