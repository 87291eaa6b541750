"""The search: rates every engine that the hosts could hold, and chooses how many of which.

Owns the order: layouts of each host, their precision and settings, the best few refined, the fleet.
Pure. Called by deploy.placement.command and, with changed inputs, by deploy.placement.explain.

It is exact over the grids of deploy.placement.search.rating (settings and loads) where
`Result.is_exact`: every layout was rated with all formats that it may have, and no other fleet of
these engines is better.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy.placement.cluster import HostLink
from deploy.placement.search.fleet import Fleet, FleetHost, Rated, best_fleet
from deploy.placement.search.layouts import Host, layouts_of, most_copies, price_of
from deploy.placement.search.nodes import tries_all_cuts
from deploy.placement.search.precision import Precisions
from deploy.placement.search.rating import Rater, Rating
from deploy.placement.sensitivity import Sensitivity
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Workload, answer_s, asked_load
from topspin.errors import TopspinError
from topspin.plan.precision import Rules

REFINED = 6
"""Layouts whose formats are chosen again for their own memory and load."""
CLOSE = 1.01
"""Two latencies within 1 % are the same: the smaller fleet is taken."""


class ImpossibleError(TopspinError):
    """No fleet meets the targets; says the best there is and what binds."""


class FleetMember(NamedTuple):
    """An engine of the fleet at its share of the load, and how many copies of it there are."""

    rating: Rating
    copies: int


@dataclass(frozen=True)
class Result:
    """What was found. `ratings`: the best of every layout, at its own largest load.

    `members`: the fleet, the engine that carries most first; empty: none meets the targets.
    `price` per hour of the whole fleet, and the `load` (requests per second, or users) that it
    carries at most.
    """

    ratings: tuple[Rating, ...]
    plain: tuple[Rating, ...]
    """The same with weights as stored."""
    quantised: tuple[Rating | None, ...]
    """The same with some weights quantised; None: no format is within the bound."""
    members: tuple[FleetMember, ...]
    price: float
    load: float
    is_exact: bool


@dataclass(frozen=True)
class Inputs:
    """What a search is about. `context_length`: the model's longest sequence.

    `precision`: the rules of a quantised checkpoint, by kernels.
    `only`: the names of the layouts to which a repeated search is limited; None: all. `draft`: the
    model of the workload's `speculation`, which the search itself knows nothing of.
    """

    hosts: tuple[Host, ...]
    model: ModelShape
    context_length: int
    workload: Workload
    sensitivity: Sensitivity | None = None
    precision: Mapping[str, Rules] = field(default_factory=dict)
    between_hosts: HostLink | None = None
    only: frozenset[str] | None = None
    draft: ModelShape | None = None

    def rater(self) -> Rater:
        """Return what prices engines of this model under this workload."""
        return Rater(self.model, self.workload, context_length=self.context_length)


def search(inputs: Inputs) -> Result:
    """Return the best fleet for the workload's objective."""
    rater = inputs.rater()
    precisions = Precisions(rater, inputs.sensitivity, inputs.precision)
    ratings: list[Rating] = []
    plain: list[Rating] = []
    quantised: list[Rating | None] = []
    # Formats are chosen by a program whose objective stands for the times.
    is_exact = not precisions.may_quantise
    for host in inputs.hosts:
        found = layouts_of(host, num_experts=inputs.model.num_experts)
        is_exact = is_exact and found.is_complete
        for layout in found.layouts:
            if inputs.only is not None and str(layout) not in inputs.only:
                continue
            formats = precisions.of(layout)
            is_exact = is_exact and tries_all_cuts(inputs.model, layout)
            tried = [rater.rate(layout, each) for each in formats]
            plain.append(tried[0])
            quantised.append(max(tried[1:], key=rater.rank, default=None))
            ratings.append(max(tried, key=rater.rank))
    _refine(rater, precisions, ratings)
    fleet = _fleet(inputs, rater, ratings)
    rated = tuple(ratings), tuple(plain), tuple(quantised)
    if fleet is None:
        return Result(*rated, (), 0.0, 0.0, is_exact)
    members = sorted(
        _members(rater, ratings, fleet),
        key=lambda each: -each.copies * each.rating.load(inputs.workload),
    )
    is_exact = is_exact and fleet.is_exact
    return Result(*rated, tuple(members), fleet.price, fleet.rate, is_exact)


def worth(rating: Rating, workload: Workload) -> float:
    """Return what an engine carries for its price, or, if all is free, for its devices."""
    price = rating.layout.price_per_hour or 1e-6 * sum(rating.layout.used)
    return rating.load(workload) / price


def _refine(rater: Rater, precisions: Precisions, ratings: list[Rating]) -> None:
    """Choose formats again for the layouts that carry most for their price."""
    order = sorted(range(len(ratings)), key=lambda idx: -worth(ratings[idx], rater.workload))
    for idx in order[:REFINED]:
        rating = ratings[idx]
        tried = [rating]
        tried += [rater.rate(rating.layout, formats) for formats in precisions.refined(rating)]
        ratings[idx] = max(tried, key=rater.rank)


def _fleet(inputs: Inputs, rater: Rater, ratings: Sequence[Rating]) -> Fleet | None:
    """Return the fleet for the objective; its engines carry the load at most."""
    workload = inputs.workload
    asked, max_price = asked_load(workload), workload.max_price_per_hour
    if workload.objective == "min_latency":
        return _fastest(rater, ratings)
    hosts = fleet_hosts(inputs.hosts, ratings, workload)
    if workload.objective == "max_throughput":
        fleet = best_fleet(hosts, max_price=max_price)
        return None if fleet is None or fleet.rate < asked * (1 - 1e-9) else fleet
    fleet = best_fleet(hosts, least_rate=asked, max_price=max_price)
    return None if fleet is None else _quickest(rater, ratings, fleet)


def _members(rater: Rater, ratings: Sequence[Rating], fleet: Fleet) -> list[FleetMember]:
    """Return the engines of a fleet at their share of the load: all of it for most throughput."""
    workload = rater.workload
    is_full = workload.objective == "max_throughput"
    share = 1.0 if is_full else min(1.0, asked_load(workload) / fleet.rate)
    return [
        FleetMember(rater.at_load(ratings[key], share * ratings[key].load(workload)), copies)
        for key, copies in fleet.copies.items()
    ]


def _answer_s(rater: Rater, ratings: Sequence[Rating], fleet: Fleet) -> float:
    """Return the time of an answer of the slowest engine of a fleet."""
    slowest_s = 0.0
    for member in _members(rater, ratings, fleet):
        _, found = member.rating.settled
        slowest_s = max(slowest_s, answer_s(rater.workload, found.ttft_s, found.tpot_s))
    return slowest_s


def copies_needed(rating: Rating, workload: Workload, max_price: float | None) -> int:
    """Return the fewest copies that carry the load; 0: there are too few within the price."""
    load = rating.load(workload)
    copies = max(1, math.ceil(asked_load(workload) / load - 1e-9)) if load else 0
    return copies if copies <= most_copies(rating.layout, max_price) else 0


def _copies_of(ratings: Sequence[Rating], key: int, copies: int, workload: Workload) -> Fleet:
    """Return the fleet of so many copies of one engine."""
    price = price_of(ratings[key].layout, copies)
    return Fleet({key: copies}, copies * ratings[key].load(workload), price, True)


def _quickest(rater: Rater, ratings: Sequence[Rating], fleet: Fleet) -> Fleet:
    """Return the fleet, or copies of one engine at the same price that answer sooner."""
    found, best_s = fleet, _answer_s(rater, ratings, fleet)
    for key, rating in enumerate(ratings):
        copies = copies_needed(rating, rater.workload, None)
        other = _copies_of(ratings, key, copies, rater.workload)
        if not copies or other.price > fleet.price * (1 + 1e-9):
            continue
        other_s = _answer_s(rater, ratings, other)
        if other_s < best_s * (1 - 1e-6):
            found, best_s = other._replace(is_exact=fleet.is_exact), other_s
    return found


def fleet_hosts(
    hosts: Sequence[Host], ratings: Sequence[Rating], workload: Workload
) -> list[FleetHost]:
    """Return hosts and rated engines, by their index, in the terms of the fleet."""
    return [
        FleetHost(
            host.spec.count,
            tuple(device.count for device in host.devices),
            host.spec.price_per_hour,
            tuple(device.price_per_hour for device in host.devices),
            tuple(
                Rated(key, rating.layout.used, rating.load(workload))
                for key, rating in enumerate(ratings)
                if rating.layout.host is host
            ),
        )
        for host in hosts
    ]


def _fastest(rater: Rater, ratings: Sequence[Rating]) -> Fleet | None:
    """Return copies of the one engine that answers soonest at the load."""
    workload = rater.workload
    found: list[tuple[float, float, int, Fleet]] = []

    def fleet_of(key: int, copies: int) -> tuple[float, float, int, Fleet]:
        fleet = _copies_of(ratings, key, copies, workload)
        return _answer_s(rater, ratings, fleet), fleet.price, key, fleet

    for key, rating in enumerate(ratings):
        least = copies_needed(rating, workload, workload.max_price_per_hour)
        if least:
            # The fewest copies that answer within CLOSE of what the most do, by bisection.
            most = most_copies(rating.layout, workload.max_price_per_hour)
            good_s = fleet_of(key, most)[0] * CLOSE
            ways = range(least, most + 1)
            idx = bisect_left(ways, True, key=lambda n: fleet_of(key, n)[0] <= good_s)
            found.append(fleet_of(key, ways[idx]))
    return min(found)[3] if found else None
