"""The search: rates every engine that the hosts could hold, and chooses how many of which.

Owns the order: layouts of each host, their precision and settings, the best few refined, the fleet,
with those engines over hosts that it asks for. Pure. Called by deploy.placement.command and, with
changed inputs, by deploy.placement.reasons.explain.

It is exact over the grids of deploy.placement.search.rating (settings and loads) where
`Result.is_exact`: every layout was rated with all formats that it may have, or cannot carry enough
to be worth it, and no other fleet of these engines is better.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy.placement.cluster import HostLink
from deploy.placement.search.bounds import LoadBounds
from deploy.placement.search.fleet import Fleet, FleetHost, Rated, Spanning, best_fleet
from deploy.placement.search.layouts import (
    EngineLayout,
    Host,
    layouts_of,
    most_copies,
    price_of,
)
from deploy.placement.search.nodes import tries_all_cuts
from deploy.placement.search.precision import Precisions
from deploy.placement.search.rating import Rater, Rating
from deploy.placement.search.spans import hosts_taken, spans_of
from deploy.placement.sensitivity import Sensitivity
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Workload, answer_s, asked_load
from topspin.errors import TopspinError
from topspin.plan.precision import Rules

REFINED = 6
"""Layouts whose formats are chosen again for their own memory and load."""
MAX_SPANS = 64
"""Engines over hosts that are rated: if a fleet would have more at their bounds, it is no longer
exact."""
SHOWN = 8
"""Kinds of engines over hosts of which one is rated in any case."""
CLOSE = 1.01
"""Two latencies within 1 % are the same: the smaller fleet is taken."""


class ImpossibleError(TopspinError):
    """No fleet meets the targets; the report says the best there is and what binds."""


class FleetMember(NamedTuple):
    """An engine of the fleet at its share of the load, and how many copies of it there are."""

    rating: Rating
    copies: int


@dataclass(frozen=True)
class Result:
    """What was found. `ratings`: the best of every layout, at its own largest load.

    `members`: the fleet, the engine that carries most first; empty: none meets the targets.
    `price` per hour of the whole fleet, and the `load` (requests per second, or users) that it
    carries at most; without one, what all hosts carry.
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


def search(inputs: Inputs, told: Callable[[int], None] | None = None) -> Result:
    """Return the best fleet for the workload's objective.

    `told` hears how many engines have been rated, after each.
    """
    table = _Table(inputs, told)
    # Formats are chosen by a program whose objective stands for the times.
    is_exact = not table.precisions.may_quantise
    for host in inputs.hosts:
        found = layouts_of(host, num_experts=inputs.model.num_experts)
        is_exact = is_exact and found.is_complete
        for layout in filter(table.is_asked, found.layouts):
            is_exact = is_exact and tries_all_cuts(inputs.model, layout)
            table.add(layout)
    table.refine()
    spans = _SpanSearch(table)
    fleet = spans.fleet()
    ratings = table.ratings
    rated = tuple(ratings), tuple(table.plain), tuple(table.quantised)
    is_exact = is_exact and spans.is_exact
    if fleet is None:
        return Result(*rated, (), 0.0, spans.widest_load(), is_exact)
    members = sorted(
        _members(table.rater, ratings, fleet),
        key=lambda each: -each.copies * each.rating.load(inputs.workload),
    )
    is_exact = is_exact and fleet.is_exact
    return Result(*rated, tuple(members), fleet.price, fleet.rate, is_exact)


class _Table:
    """The ratings of layouts: the best, and the best with stored and with quantised weights."""

    def __init__(self, inputs: Inputs, told: Callable[[int], None] | None) -> None:
        self.inputs, self.rater = inputs, inputs.rater()
        self.precisions = Precisions(self.rater, inputs.sensitivity, inputs.precision)
        self.ratings: list[Rating] = []
        self.plain: list[Rating] = []
        self.quantised: list[Rating | None] = []
        self._told = told

    def is_asked(self, layout: EngineLayout) -> bool:
        """Say whether a layout is one of those to which the search is limited."""
        only = self.inputs.only
        return only is None or str(layout) in only or (bool(layout.spans) and layout.family in only)

    def add(self, layout: EngineLayout) -> None:
        """Rate a layout with all formats that it may have."""
        tried = [self.rater.rate(layout, each) for each in self.precisions.of(layout)]
        self.plain.append(tried[0])
        self.quantised.append(max(tried[1:], key=self.rater.rank, default=None))
        self.ratings.append(max(tried, key=self.rater.rank))
        if self._told is not None:
            self._told(len(self.ratings))

    def refine(self, first: int = 0) -> None:
        """Choose formats again for the layouts from `first` on that carry most for their price."""
        ratings, rater = self.ratings, self.rater
        order = sorted(
            range(first, len(ratings)), key=lambda idx: -worth(ratings[idx], rater.workload)
        )
        for idx in order[:REFINED]:
            rating = ratings[idx]
            tried = [rating]
            tried += [rater.rate(rating.layout, each) for each in self.precisions.refined(rating)]
            ratings[idx] = max(tried, key=rater.rank)


class _Waiting(NamedTuple):
    """An engine over hosts that is not rated: its bounds in the workload's load, and seconds."""

    layout: EngineLayout
    most: float
    least_s: float

    @property
    def worth(self) -> float:
        """Return what it carries at most for its price."""
        return self.most / (price_of(self.layout, 1) or 1e-6 * sum(self.layout.used))


class _SpanSearch:
    """The fleet with engines over hosts, most of which need no rating.

    A fleet is chosen as if they carried what their bounds allow; those that it has are rated; until
    it has none that is not. No other fleet is better then, even with all others at their bounds.
    """

    def __init__(self, table: _Table) -> None:
        self._table, self._inputs = table, table.inputs
        self._workload = table.inputs.workload
        self.is_exact = True
        self._num_rated = 0
        bounds = LoadBounds(table.rater)
        is_for_latency = self._workload.objective == "min_latency"
        self._waiting: dict[int, _Waiting] = {}
        unfit: dict[str, EngineLayout] = {}
        num_experts = table.inputs.model.num_experts
        layouts = spans_of(table.inputs.hosts, table.inputs.between_hosts, num_experts=num_experts)
        for number, layout in enumerate(filter(table.is_asked, layouts)):
            formats = table.precisions.of(layout)
            most = max(bounds.most_load(layout, each) for each in formats)
            if most > 0:
                least_s = 0.0
                if is_for_latency:
                    least_s = min(bounds.least_answer_s(layout, each) for each in formats)
                self._waiting[-1 - number] = _Waiting(layout, most, least_s)
            else:
                unfit[layout.family] = layout
        # The report tells of each kind by its best, or by the largest that does not do.
        best: dict[str, int] = {}
        for key, each in sorted(self._waiting.items(), key=lambda item: -item[1].worth):
            best.setdefault(each.layout.family, key)
        for key in [*best.values()][:SHOWN]:
            self._rate(key)
        for family in [each for each in unfit if each not in best][:SHOWN]:
            table.add(unfit[family])
        for key in [key for key, each in self._waiting.items() if math.isinf(each.most)]:
            self._rate(key)

    def _rate(self, key: int) -> Rating:
        self._num_rated += 1
        self._table.add(self._waiting.pop(key).layout)
        self._table.refine(len(self._table.ratings) - 1)
        return self._table.ratings[-1]

    def fleet(self) -> Fleet | None:
        """Return the best fleet; its engines carry the load at most."""
        if self._workload.objective == "min_latency":
            return self._fastest()
        found = self._settled(self._best)
        if found is None or self._workload.objective == "max_throughput":
            return found
        return _quickest(self._table.rater, self._table.ratings, found)

    def widest_load(self) -> float:
        """Return what all hosts carry within the targets, and the price if it is limited."""
        found = self._settled(self._widest)
        return 0.0 if found is None else found.rate

    def _settled(self, choose: Callable[[], Fleet | None]) -> Fleet | None:
        """Return what is chosen when all that it has is rated."""
        while True:
            found = choose()
            asked = [key for key in found.copies if key < 0] if found is not None else []
            if not asked:
                return found
            if self._num_rated + len(asked) > MAX_SPANS:
                self._waiting.clear()
                self.is_exact = False
            for key in filter(self._waiting.__contains__, asked):
                self._rate(key)

    def _best(self) -> Fleet | None:
        """Return the best fleet with the bounds of those that are not rated."""
        asked = asked_load(self._workload)
        if self._workload.objective != "max_throughput":
            return self._widest(least_rate=asked)
        fleet = self._widest()
        return None if fleet is None or fleet.rate < asked * (1 - 1e-9) else fleet

    def _widest(self, least_rate: float | None = None) -> Fleet | None:
        hosts = fleet_hosts(self._inputs.hosts, self._table.ratings, self._workload)
        max_price = self._workload.max_price_per_hour
        return best_fleet(hosts, list(self._columns()), least_rate=least_rate, max_price=max_price)

    def _columns(self) -> Iterator[Spanning]:
        """Yield engines over hosts, but those whose bound one with fewer expert hosts reaches."""
        ratings = self._table.ratings
        known = [(key, each.layout, each.load(self._workload)) for key, each in enumerate(ratings)]
        known += [(key, each.layout, each.most) for key, each in self._waiting.items()]
        spanning = [each for each in known if each[1].spans]
        most: dict[tuple[object, ...], float] = {}
        for key, layout, load in sorted(spanning, key=lambda each: each[1].spans[1].num_hosts):
            kind = (layout.attention, layout.experts[0][0])
            if load > most.get(kind, 0.0) * (1 + 1e-9):
                most[kind] = load
                hosts = hosts_taken(layout, self._inputs.hosts)
                yield Spanning(key, hosts, load, price_of(layout, 1))

    def _fastest(self) -> Fleet | None:
        """Return copies of the one engine that answers soonest; by bounds, as above."""
        rater, ratings = self._table.rater, self._table.ratings
        found = _fastest(rater, ratings)
        best_s = math.inf if found is None else _answer_s(rater, ratings, found)
        for key in sorted(self._waiting, key=lambda each: self._waiting[each].least_s):
            if self._waiting[key].least_s > best_s:
                break
            if self._num_rated == MAX_SPANS:
                self.is_exact = False
                break
            rating = self._rate(key)
            one = _fastest(rater, [rating])
            if one is not None:
                best_s = min(best_s, _answer_s(rater, [rating], one))
        return _fastest(rater, ratings)


def worth(rating: Rating, workload: Workload) -> float:
    """Return what an engine carries for its price, or, if all is free, for its devices."""
    price = rating.layout.price_per_hour or 1e-6 * sum(rating.layout.used)
    return rating.load(workload) / price


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
