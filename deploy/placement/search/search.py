"""The search: rates every engine that the hosts could hold, and chooses how many of which.

Owns the order: layouts of each host, their precision and settings, the best few refined, the fleet.
Pure. Called by deploy.placement.command and, with changed inputs, by deploy.placement.explain.

It is exact over the grids of deploy.placement.search.rating (settings and loads) where
`Result.is_exact`: every layout was rated with all formats that it may have, and no other fleet of
these engines is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

REFINED = 6
"""Layouts whose formats are chosen again for their own memory and load."""
CLOSE = 1.01
"""Two latencies within 1 % are the same: the smaller fleet is taken."""


class ImpossibleError(TopspinError):
    """No fleet meets the targets; says the best there is and what binds."""


class Member(NamedTuple):
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
    members: tuple[Member, ...]
    price: float
    load: float
    is_exact: bool


@dataclass(frozen=True)
class Inputs:
    """What a search is about. `context_length`: the model's longest sequence.

    `only`: the names of the layouts to which a repeated search is limited; None: all. `draft`: the
    model of the workload's `speculation`, which the search itself knows nothing of.
    """

    hosts: tuple[Host, ...]
    model: ModelShape
    context_length: int
    workload: Workload
    sensitivity: Sensitivity | None = None
    between_hosts: HostLink | None = None
    only: frozenset[str] | None = None
    draft: ModelShape | None = None

    def rater(self) -> Rater:
        """Return what prices engines of this model under this workload."""
        return Rater(self.model, self.workload, context_length=self.context_length)


def search(inputs: Inputs) -> Result:
    """Return the best fleet for the workload's objective."""
    rater = inputs.rater()
    precisions = Precisions(rater, inputs.sensitivity)
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
    members, fleet = _fleet(inputs, rater, ratings)
    price = 0.0 if fleet is None else fleet.price
    load = 0.0 if fleet is None else fleet.rate
    is_exact = is_exact and (fleet is None or fleet.is_exact)
    return Result(
        tuple(ratings),
        tuple(plain),
        tuple(quantised),
        tuple(members),
        price,
        load,
        is_exact,
    )


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


def _fleet(
    inputs: Inputs, rater: Rater, ratings: Sequence[Rating]
) -> tuple[list[Member], Fleet | None]:
    """Return the fleet for the objective, its engines at their share of the load."""
    workload = inputs.workload
    asked = asked_load(workload)
    if workload.objective == "min_latency":
        return _fastest(inputs, rater, ratings)
    hosts = fleet_hosts(inputs.hosts, ratings, workload)
    if workload.objective == "min_price":
        fleet = best_fleet(hosts, least_rate=asked, max_price=workload.max_price_per_hour)
        share = None if fleet is None else min(1.0, asked / fleet.rate)
    else:
        fleet = best_fleet(hosts, max_price=workload.max_price_per_hour)
        share = 1.0
        if fleet is not None and fleet.rate < asked * (1 - 1e-9):
            fleet = None
    if fleet is None or share is None:
        return [], None
    members = [
        Member(rater.at_load(ratings[key], share * ratings[key].load(workload)), copies)
        for key, copies in fleet.copies.items()
    ]
    members.sort(key=lambda each: -each.copies * each.rating.load(workload))
    if workload.objective == "min_price":
        return _quickest_of_cheapest(rater, ratings, members, fleet)
    return members, fleet


def _quickest_of_cheapest(
    rater: Rater, ratings: Sequence[Rating], members: list[Member], fleet: Fleet
) -> tuple[list[Member], Fleet]:
    """Return the fleet, or copies of one engine at the same price that answer sooner."""
    asked = asked_load(rater.workload)
    best = max(_answer_s(rater, each.rating) for each in members)
    found = members, fleet
    for key, rating in enumerate(ratings):
        load = rating.load(rater.workload)
        if not load:
            continue
        copies = max(1, math.ceil(asked / load - 1e-9))
        price = price_of(rating.layout, copies)
        if price > fleet.price * (1 + 1e-9) or copies > most_copies(rating.layout, None):
            continue
        at = rater.at_load(rating, asked / copies)
        if _answer_s(rater, at) < best * (1 - 1e-6):
            best = _answer_s(rater, at)
            same = fleet._replace(copies={key: copies}, rate=copies * load, price=price)
            found = [Member(at, copies)], same
    return found


def _answer_s(rater: Rater, rating: Rating) -> float:
    found = rating.point
    assert found is not None
    return answer_s(rater.workload, found.ttft_s, found.tpot_s)


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


def _fastest(
    inputs: Inputs, rater: Rater, ratings: Sequence[Rating]
) -> tuple[list[Member], Fleet | None]:
    """Return copies of the one engine that answers soonest at the load."""
    workload = inputs.workload
    asked = asked_load(workload)
    best: tuple[tuple[float, float], Member] | None = None
    for rating in ratings:
        if rating.point is None:
            continue
        most = most_copies(rating.layout, workload.max_price_per_hour)
        least = math.ceil(asked / rating.load(workload) - 1e-9)
        if most < least or not most:
            continue
        found = _fewest_copies(rater, rating, asked, least=max(1, least), most=most)
        rank = (_answer_s(rater, found.rating), price_of(rating.layout, found.copies))
        if best is None or rank < best[0]:
            best = rank, found
    if best is None:
        return [], None
    member = best[1]
    key = next(idx for idx, each in enumerate(ratings) if each.layout is member.rating.layout)
    price = price_of(member.rating.layout, member.copies)
    rate = member.copies * ratings[key].load(workload)
    return [member], Fleet({key: member.copies}, rate, price, True)


def _fewest_copies(rater: Rater, rating: Rating, asked: float, *, least: int, most: int) -> Member:
    """Return the fewest copies that answer within CLOSE of what the most do, by bisection."""

    def at(copies: int) -> Rating:
        return rater.at_load(rating, min(asked / copies, rating.load(rater.workload)))

    good_s = _answer_s(rater, at(most)) * CLOSE
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        if _answer_s(rater, at(middle)) <= good_s:
            high = middle
        else:
            low = middle + 1
    return Member(at(high), high)
