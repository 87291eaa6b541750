"""What a search says beside its plan: the front, why others lost, what binds, what would flip it.

Owns the words. Every number comes from rated engines; a flip is found by searching again with one
thing changed. Called by deploy.placement.report.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from deploy.placement.cluster import HostLink
from deploy.placement.search.fleet import largest
from deploy.placement.search.layouts import (
    Device,
    EngineLayout,
    Host,
    layouts_of,
    most_copies,
    price_of,
)
from deploy.placement.search.rating import Rater, Rating, milliseconds
from deploy.placement.search.search import (
    Inputs,
    Result,
    fleet_inputs,
    search,
)
from deploy.placement.workload import answer_s, asked_load

FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""By which a thing is changed to see what would flip a decision."""
FLIP_LAYOUTS = 12
"""Engines that are searched again for a flip, beside the best of every class."""
MAX_MERGED_LAYOUTS = 400
"""Engines over two hosts that are rated."""
BEST_SHOWN = 40
"""Engines that are asked for their figures at the workload's load."""


class Offer(NamedTuple):
    """As many copies of one engine as carry the load, at that load."""

    rating: Rating
    copies: int
    price: float
    ttft_s: float
    tpot_s: float
    tokens_per_s: float

    @property
    def kl(self) -> float:
        """Return the divergence of its formats."""
        return self.rating.formats.kl


def offers_of(inputs: Inputs, rater: Rater, ratings: Sequence[Rating]) -> list[Offer]:
    """Return the engines that can carry the load in copies, the cheapest first."""
    workload = inputs.workload
    asked = asked_load(workload)
    sized: list[tuple[float, Rating, int]] = []
    for rating in ratings:
        load = rating.load(workload)
        copies = max(1, math.ceil(asked / load - 1e-9)) if load else 0
        if copies and copies <= most_copies(rating.layout, workload.max_price_per_hour):
            sized.append((price_of(rating.layout, copies), rating, copies))
    sized.sort(key=lambda each: (each[0], -each[1].load(workload) * each[2]))
    found = []
    for price, rating, copies in _best_of_each(sized):
        at = rater.at_load(rating, asked / copies).point
        assert at is not None
        assert rating.point is not None
        tokens_per_s = copies * rating.point.rate * workload.output.average
        found.append(Offer(rating, copies, price, at.ttft_s, at.tpot_s, tokens_per_s))
    return found


def _best_of_each(
    sized: Sequence[tuple[float, Rating, int]],
) -> Iterator[tuple[float, Rating, int]]:
    """Yield the best of every class, and of the rest the first ones."""
    seen: set[str] = set()
    num_others = 0
    for each in sized:
        name = class_of(each[1].layout)
        if name not in seen or num_others < BEST_SHOWN:
            num_others += name in seen
            seen.add(name)
            yield each


def front_of(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers that no other equals or beats in all of price, times, tokens and kl."""

    def costs(offer: Offer) -> tuple[float, ...]:
        return (offer.price, offer.ttft_s, offer.tpot_s, -offer.tokens_per_s, offer.kl)

    front: list[Offer] = []
    for offer in offers:
        own = costs(offer)
        beaten = any(
            other is not offer
            and all(a <= b for a, b in zip(costs(other), own, strict=True))
            and costs(other) != own
            for other in offers
        )
        if not beaten and all(costs(other) != own for other in front):
            front.append(offer)
    return front


def class_of(layout: EngineLayout) -> str:
    """Return what kind of engine a layout is: its host, and which device types serve which role."""
    attention = " + ".join(sorted({slot.device.name for slot, _ in layout.holders}))
    if layout.stages:
        attention = f"{attention} by layer ranges"
    experts = " + ".join(sorted({slot.device.name for slot, _ in layout.experts}))
    host = layout.host.spec.name
    if layout.kind == "one_process":
        return f"{host}: both roles on {attention}, one process"
    if not layout.experts:
        return f"{host}: {attention}"
    if layout.kind == "turns":
        return f"{host}: both roles on {attention}, in turns"
    return f"{host}: attention on {attention}, experts on {experts}"


class Loser(NamedTuple):
    """The best engine of a class, and why it was not taken."""

    name: str
    engine: str
    reason: str


def losers_of(inputs: Inputs, result: Result, offers: Sequence[Offer]) -> list[Loser]:
    """Return for every class that the fleet does not have why its best engine lost."""
    workload = inputs.workload
    taken = {class_of(member.rating.layout) for member in result.members}
    best: dict[str, Rating] = {}
    for rating in result.ratings:
        name = class_of(rating.layout)
        if name not in best or _merit(rating, inputs) > _merit(best[name], inputs):
            best[name] = rating
    by_class: dict[str, Offer] = {}
    for offer in offers:
        by_class.setdefault(class_of(offer.rating.layout), offer)
    losers = []
    for name, rating in best.items():
        if name in taken:
            continue
        if rating.point is None:
            losers.append(Loser(name, str(rating.layout), rating.binding.text))
        elif name not in by_class:
            carried = most_copies(rating.layout, workload.max_price_per_hour) * rating.load(
                workload
            )
            reason = (
                f"carries {carried:.3g} {load_unit(inputs)} of {asked_load(workload):.3g}: "
                f"{rating.binding.text}"
            )
            losers.append(Loser(name, str(rating.layout), reason))
        else:
            offer = by_class[name]
            losers.append(Loser(name, str(offer.rating.layout), _worse(inputs, result, offer)))
    return losers


def _merit(rating: Rating, inputs: Inputs) -> tuple[float, float]:
    """Return load per price, or by how little it fails."""
    if rating.point is None:
        return 0.0, -rating.binding.needs / max(rating.binding.has, 1e-9)
    price = rating.layout.price_per_hour or 1e-6 * sum(rating.layout.used)
    return rating.load(inputs.workload) / price, 0.0


def load_unit(inputs: Inputs) -> str:
    """Return what a load counts."""
    return "requests/s" if inputs.workload.users is None else "users"


def _worse(inputs: Inputs, result: Result, offer: Offer) -> str:
    """Return in what an offer is worse than the fleet."""
    workload = inputs.workload
    if workload.objective == "min_latency":
        best = result.members[0].rating.point if result.members else None
        if best is None:
            return offer.rating.binding.text
        own_s = answer_s(workload, offer.ttft_s, offer.tpot_s)
        best_s = answer_s(workload, best.ttft_s, best.tpot_s)
        return (
            f"an answer takes {milliseconds(own_s)} against {milliseconds(best_s)} (TPOT "
            f"{milliseconds(offer.tpot_s)} against {milliseconds(best.tpot_s)})"
        )
    each = offer.rating.load(workload)
    carries = f"an engine carries {each:.3g} {load_unit(inputs)} ({offer.rating.binding.text})"
    if workload.objective == "max_throughput":
        per_price = each / (offer.rating.layout.price_per_hour or 1.0)
        return f"{carries}, {per_price:.3g} per price"
    return f"{offer.price:.4g} per hour against {result.price:.4g}: {carries}"


def answers_of(inputs: Inputs, result: Result, offers: Sequence[Offer]) -> list[str]:
    """Return whether to disaggregate and to quantise, and what this engine does not serve yet."""
    if not result.members:
        return []
    found = []
    if inputs.model.num_experts:
        found.append(_disaggregation(inputs, result, offers))
    found.append(_quantisation(inputs, result))
    return found


def _disaggregation(inputs: Inputs, result: Result, offers: Sequence[Offer]) -> str:
    chosen = result.members[0].rating.layout
    is_apart = chosen.kind == "apart"
    others = [each for each in offers if (each.rating.layout.kind == "apart") != is_apart]
    if not others:
        why = _why_none(inputs, result, apart=not is_apart)
        if is_apart:
            return f"Disaggregate: nothing else meets the targets ({why})."
        return f"Do not disaggregate: no engine with both roles apart meets the targets ({why})."
    other = min(others, key=lambda each: _order(inputs, each))
    told = f"the best other way, {other.rating.layout}: {_worse(inputs, result, other)}"
    return f"{'Disaggregate' if is_apart else 'Do not disaggregate'}: {told}."


def _order(inputs: Inputs, offer: Offer) -> tuple[float, ...]:
    if inputs.workload.objective == "min_latency":
        return (answer_s(inputs.workload, offer.ttft_s, offer.tpot_s),)
    if inputs.workload.objective == "max_throughput":
        return (-offer.tokens_per_s / (offer.price or 1.0),)
    return (offer.price, -offer.tokens_per_s)


def _why_none(inputs: Inputs, result: Result, *, apart: bool) -> str:
    tried = [each for each in result.ratings if (each.layout.kind == "apart") == apart]
    if not tried:
        return "there is none on these hosts"
    best = max(tried, key=lambda each: _merit(each, inputs))
    return f"{best.layout}: {best.binding.text}"


def _quantisation(inputs: Inputs, result: Result) -> str:
    chosen = result.members[0].rating
    workload = inputs.workload
    if workload.max_kl is None or not workload.max_kl:
        return "Weights stay as stored: the workload allows no divergence (max_kl)."
    if inputs.sensitivity is None:
        return "Weights stay as stored: without --sensitivity nothing says what quantisation costs."
    idx = next(i for i, each in enumerate(result.ratings) if each.layout is chosen.layout)
    plain, quantised = result.plain[idx], result.quantised[idx]
    layout = load_unit(inputs)
    if chosen.formats.is_stored:
        if quantised is None:
            return "Do not quantise: no format is within max_kl on these devices."
        return (
            f"Do not quantise: {quantised.formats} carries {quantised.load(workload):.3g} {layout} "
            f"where stored weights carry {plain.load(workload):.3g}."
        )
    told = f"carry {plain.load(workload):.3g}" if plain.point else f"fail ({plain.binding.text})"
    return (
        f"Quantise ({chosen.formats}; divergence {chosen.formats.kl:.3g} of at most "
        f"{workload.max_kl:.3g}): it carries {result.ratings[idx].load(workload):.3g} {layout} per "
        f"engine, stored weights {told}."
    )


def refusal_of(inputs: Inputs, result: Result) -> str:
    """Return why no fleet was found: the best there is, and what binds."""
    workload = inputs.workload
    working = [each for each in result.ratings if each.point is not None]
    if not working:
        best = max(result.ratings, key=lambda each: _merit(each, inputs), default=None)
        if best is None:
            return "no engine can be made of these hosts: no link joins their devices"
        return f"no engine meets the targets; the nearest, {best.layout}: {best.binding.text}"
    best = max(working, key=lambda each: _merit(each, inputs))
    unlimited = dataclasses.replace(
        inputs, workload=msgspec.structs.replace(workload, max_price_per_hour=None)
    )
    asked, layout = asked_load(workload), load_unit(inputs)
    if workload.max_price_per_hour is not None:
        dearer = search(unlimited)
        if dearer.members:
            return (
                f"{asked:.4g} {layout} cost {dearer.price:.4g} per hour at least, of which "
                f"max_price_per_hour allows {workload.max_price_per_hour:.4g}"
            )
    hosts, engines = fleet_inputs(inputs.hosts, result.ratings, workload)
    most = largest(hosts, engines, max_price=workload.max_price_per_hour)
    carried = 0.0 if most is None else most.rate
    return (
        f"all hosts together carry {carried:.4g} {layout} within the targets, of {asked:.4g}; "
        f"what binds in the best engine, {best.layout}: {best.binding.text}"
    )


class Flip(NamedTuple):
    """The smallest change tried that changes the outcome."""

    change: str
    outcome: str


def flips_of(inputs: Inputs, result: Result) -> list[Flip]:
    """Return what would change the outcome, by searching again with one thing changed."""
    best = sorted(result.ratings, key=lambda each: _merit(each, inputs), reverse=True)
    by_class: dict[str, Rating] = {}
    for rating in best:
        by_class.setdefault(class_of(rating.layout), rating)
    kept = [*best[:FLIP_LAYOUTS], *by_class.values(), *(each.rating for each in result.members)]
    limited = dataclasses.replace(inputs, only=frozenset(str(each.layout) for each in kept))
    found = []
    for name, changed in _knobs(limited, result):
        flip = _smallest(name, changed, limited, result)
        if flip is not None:
            found.append(flip)
    return found


def _knobs(inputs: Inputs, result: Result) -> Iterator[tuple[str, Callable[[float], Inputs]]]:
    """Yield what may be changed by a factor: what binds first, and the link."""
    targets = inputs.workload.targets
    working = [each for each in result.ratings if each.point is not None]
    source = result.members[0].rating if result.members else None
    if source is None:
        pool = working or list(result.ratings)
        source = max(pool, key=lambda each: _merit(each, inputs), default=None)
    limit = None if source is None else source.binding.limit
    if limit == "memory":
        yield "memory of every device", lambda factor: _with_memory(inputs, factor)
    if targets.tpot_s is not None and limit in ("tpot", "prefill", "sequences"):
        yield "tpot_s", lambda factor: _with_target(inputs, "tpot_s", factor)
    if targets.ttft_s is not None and limit in ("ttft", "prefill"):
        yield "ttft_s", lambda factor: _with_target(inputs, "ttft_s", factor)
    if inputs.model.num_experts and result.members:
        yield "speed of the links within hosts", lambda factor: _with_links(inputs, factor)


def _smallest(
    name: str, changed: Callable[[float], Inputs], inputs: Inputs, result: Result
) -> Flip | None:
    """Return the first of FACTORS that changes the outcome, by bisection."""
    low, high = -1, len(FACTORS)
    outcome = ""
    while high - low > 1:
        middle = (low + high) // 2
        told = _difference(inputs, result, search(changed(FACTORS[middle])))
        if told:
            high, outcome = middle, told
        else:
            low = middle
    if high == len(FACTORS):
        return None
    return Flip(f"{name} times {FACTORS[high]:g}", outcome)


def _difference(inputs: Inputs, before: Result, after: Result) -> str:
    """Return what is better or other after a change; empty: nothing."""
    if not after.members:
        return ""
    layout = after.members[0].rating.layout
    if not before.members:
        return f"{after.members[0].copies} x {layout} would do, at {after.price:.4g} per hour"
    if (before.members[0].rating.layout.kind == "apart") != (layout.kind == "apart"):
        return f"the answer would be {layout}"
    objective = inputs.workload.objective
    if objective == "min_price" and after.price < 0.99 * before.price:
        return f"the price would be {after.price:.4g} instead of {before.price:.4g}, with {layout}"
    if objective == "max_throughput" and after.load > 1.05 * before.load:
        return f"{after.load:.4g} {load_unit(inputs)} instead of {before.load:.4g}, with {layout}"
    old, new = before.members[0].rating.point, after.members[0].rating.point
    assert old is not None
    assert new is not None
    if objective == "min_latency" and new.tpot_s < 0.95 * old.tpot_s:
        return f"TPOT {milliseconds(new.tpot_s)} instead of {milliseconds(old.tpot_s)}"
    return ""


def _with_target(inputs: Inputs, name: str, factor: float) -> Inputs:
    targets = inputs.workload.targets
    new = msgspec.structs.replace(targets, **{name: getattr(targets, name) * factor})
    return dataclasses.replace(
        inputs, workload=msgspec.structs.replace(inputs.workload, targets=new)
    )


def _with_memory(inputs: Inputs, factor: float) -> Inputs:
    hosts = tuple(
        dataclasses.replace(
            host,
            devices=tuple(
                dataclasses.replace(each, memory_bytes=int(each.memory_bytes * factor))
                for each in host.devices
            ),
        )
        for host in inputs.hosts
    )
    return dataclasses.replace(inputs, hosts=hosts)


def _with_links(inputs: Inputs, factor: float) -> Inputs:
    def faster(link: HostLink) -> HostLink:
        return msgspec.structs.replace(
            link, alpha_us=link.alpha_us / factor, gbps=link.gbps * factor
        )

    hosts = tuple(
        dataclasses.replace(
            host,
            spec=msgspec.structs.replace(
                host.spec, links=tuple(faster(link) for link in host.spec.links)
            ),
        )
        for host in inputs.hosts
    )
    return dataclasses.replace(inputs, hosts=hosts)


def over_two_hosts(inputs: Inputs, rater: Rater, result: Result) -> list[str]:
    """Return what engines over two hosts would give: the search keeps each engine on one."""
    if inputs.between_hosts is None or not result.members:
        return []
    if len(result.ratings) > MAX_MERGED_LAYOUTS:
        return []
    workload = inputs.workload
    chosen = result.members[0].rating

    def per_price(rating: Rating) -> float:
        return rating.load(workload) / (rating.layout.price_per_hour or 1.0)

    found = []
    for pair in _pairs(inputs.hosts):
        merged = _merged(pair, inputs.between_hosts)
        layouts = layouts_of(merged, num_experts=inputs.model.num_experts).layouts[
            :MAX_MERGED_LAYOUTS
        ]
        formats = chosen.formats
        rated = [rater.rate(layout, formats) for layout in layouts if layout.kind == "apart"]
        best = max(rated, key=per_price, default=None)
        if best is not None and best.point is not None:
            verdict = "more" if per_price(best) > per_price(chosen) * 1.01 else "no more"
            found.append(
                f"An engine over the hosts {merged.spec.name} ({best.layout}) would carry "
                f"{best.load(workload):.3g} {load_unit(inputs)}, {per_price(best):.3g} per price, "
                f"{verdict} than the plan's {per_price(chosen):.3g}. Such a plan is made by "
                "hand (docs/hosts.md)."
            )
    return found


def _pairs(hosts: Sequence[Host]) -> Iterator[tuple[Host, Host]]:
    for idx, host in enumerate(hosts):
        if host.spec.count > 1:
            yield host, host
        for other in hosts[idx + 1 :]:
            yield host, other


def _merged(pair: tuple[Host, Host], link: HostLink) -> Host:
    """Return two hosts as one, joined by the link between hosts."""
    first, second = pair
    devices: list[Device] = []
    for device in (*first.devices, *second.devices):
        devices.append(dataclasses.replace(device, group=len(devices)))
    spec = msgspec.structs.replace(
        first.spec, name=f"{first.spec.name} + {second.spec.name}", count=1, links=(link,)
    )
    return Host(spec, tuple(devices))
