"""Every engine with every setting, in every fleet: what the search must find without trying all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import cache

import pytest

from deploy.placement.formats import Formats
from deploy.placement.search import rating as rating_module
from deploy.placement.search.bits import evaluate
from deploy.placement.search.layouts import EngineLayout, Host, layouts_of
from deploy.placement.search.nodes import Binding
from deploy.placement.search.precision import Precisions
from deploy.placement.search.rating import LoadTrial, Rater, Rating, running_grid
from deploy.placement.search.search import Inputs, search
from deploy.placement.search.spans import spans_of
from deploy.placement.search.steps import EngineSetup
from deploy.placement.workload import asked_load

Hosts = tuple[int, ...]
"""A number of hosts of each kind."""
Fleets = tuple[tuple[float, float], ...]
"""Loads and prices of fleets, of which none equals or beats another."""


def every_setting(rater: Rater, layout: EngineLayout, formats: Formats) -> Iterator[Rating]:
    """Yield a layout with all settings, at the largest load: the whole grid, then between."""
    is_gpu = layout.attention[0][0].device.is_gpu
    budgets = rating_module.GPU_BUDGETS if is_gpu else rating_module.CPU_BUDGETS
    held = rater.nodes.shares(layout, formats, budgets[-1])
    if held is None:
        return
    weights = rater.nodes.weights(layout, formats)
    alone = layout.kind == "one_process" or not layout.experts
    num_layers, num_ranges = rater.model.num_layers, 1 + len(layout.stages)
    cuts: list[tuple[int, ...]] = [()]
    if layout.stages:
        cuts = [
            (*sorted(inner), num_layers)
            for inner in itertools.combinations(range(1, num_layers), num_ranges - 1)
        ]
    ways = itertools.product(budgets, (1,) if alone else (1, 2, 3, 4), cuts)
    for tokens, m, ends in ways:
        engine = EngineSetup(layout, formats, held, weights, m, tokens, None, 0, ends)
        room = rater.nodes.room(engine)
        if isinstance(room, Binding):
            continue
        is_plain = alone or ends
        for local in (0,) if is_plain else (0, rater.nodes.most_local(layout, formats, room)):
            engine = dataclasses.replace(engine, num_local=local)
            left = rater.nodes.room(engine)
            if isinstance(left, Binding):
                continue
            trial = LoadTrial(rater, engine, left)
            good = [n for n in running_grid() if n < 5000 and trial.point(float(n)) is not None]
            if good:
                yield rater.sharpened(rater.at_most(engine, left, start=good[-1]))


def best_of_all(inputs: Inputs) -> Fleets:
    """Return the load and the price of every fleet worth having, by trying all of everything."""
    rater = inputs.rater()
    precisions = Precisions(rater, inputs.sensitivity)
    columns: list[tuple[Hosts, Fleets]] = []
    for idx, host in enumerate(inputs.hosts):
        loads: dict[tuple[int, ...], float] = {}
        for layout in layouts_of(host, num_experts=inputs.model.num_experts).layouts:
            load = _most_load(rater, precisions, layout)
            loads[layout.used] = max(loads.get(layout.used, 0.0), load)
        one = tuple(int(idx == each) for each in range(len(inputs.hosts)))
        columns.append((one, _front(_fillings(host, loads))))
    num_experts = inputs.model.num_experts
    for layout in spans_of(inputs.hosts, inputs.between_hosts, num_experts=num_experts):
        taken = tuple(
            sum(span.num_hosts for span in layout.spans if span.host is host)
            for host in inputs.hosts
        )
        devices = zip(layout.host.devices, layout.used, strict=True)
        price = sum(count * device.price_per_hour for device, count in devices)
        price += sum(span.num_hosts * span.host.spec.price_per_hour for span in layout.spans)
        columns.append((taken, ((_most_load(rater, precisions, layout), price),)))

    @cache
    def fleets(left: Hosts) -> Fleets:
        found = [(0.0, 0.0)]
        for taken, ways in columns:
            rest = tuple(have - need for have, need in zip(left, taken, strict=True))
            if min(rest) >= 0:
                found += [(a + c, b + d) for a, b in fleets(rest) for c, d in ways]
        return _front(found)

    return fleets(tuple(host.spec.count for host in inputs.hosts))


def _most_load(rater: Rater, precisions: Precisions, layout: EngineLayout) -> float:
    formats = [precisions.plain]
    if precisions.may_quantise:
        problem = precisions.problem(layout)
        formats += [
            precisions._formats(problem, choice)
            for choice in itertools.product(*(range(len(item.options)) for item in problem.items))
            if evaluate(problem, choice).fits
        ]
    rated = itertools.chain.from_iterable(every_setting(rater, layout, each) for each in formats)
    return max((each.load(rater.workload) for each in rated), default=0.0)


def _fillings(host: Host, loads: dict[tuple[int, ...], float]) -> Iterator[tuple[float, float]]:
    most = max(device.count for device in host.devices)
    for copies in itertools.product(range(most + 1), repeat=len(loads)):
        used = [
            sum(n * each[group] for n, each in zip(copies, loads, strict=True))
            for group in range(len(host.devices))
        ]
        if all(need <= each.count for need, each in zip(used, host.devices, strict=True)):
            load = sum(n * each for n, each in zip(copies, loads.values(), strict=True))
            price = sum(n * each.price_per_hour for n, each in zip(used, host.devices, strict=True))
            yield load, price + (host.spec.price_per_hour if any(copies) else 0.0)


def _front(fleets: Iterator[tuple[float, float]] | list[tuple[float, float]]) -> Fleets:
    """Drop fleets that another one equals or beats."""
    front: list[tuple[float, float]] = []
    for load, price in sorted(set(fleets), key=lambda each: (each[1], -each[0])):
        if not front or load > front[-1][0]:
            front.append((load, price))
    return tuple(front)


def check_against_everything(inputs: Inputs) -> None:
    """Compare the search's fleet with the best of all."""
    result = search(inputs)
    assert result.is_exact == (inputs.sensitivity is None)
    asked = asked_load(inputs.workload)
    good = [each for each in best_of_all(inputs) if each[0] >= asked * (1 - 1e-9)]
    assert bool(result.members) == bool(good)
    if not good:
        return
    if inputs.workload.objective == "min_price":
        assert result.price == pytest.approx(min(price for _, price in good))
    else:
        # Loads lie between points of the grid, at halvings that depend on what was tried first.
        assert result.load == pytest.approx(max(load for load, _ in good), rel=0.02)
