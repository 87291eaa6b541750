"""The choice of a format for every layer and part, under a bound on quality and on memory.

Owns the problem and its solution as a mixed-integer program (scipy's HiGHS). Quality is a bound
here, where LLM-PQ (arXiv 2403.01136) has it as a penalty with a weight; what costs no time is given
back its precision afterwards, as QSync does (arXiv 2407.02327). Pure: knows no device and no model.
Called by deploy.placement.search.precision and deploy.quantisation.mixing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from topspin.plan.precision import Format, Part

GAP = 1e-4
"""The relative distance from the best objective at which a solution is taken for the best."""
TIME_LIMIT_S = 5.0
"""After which the best that was found is taken; some fifty layers take less than a second."""
MARGIN = 1e-5
"""By how much bounds are tightened, of their largest term, if the solver's tolerance passed one."""


class Option(NamedTuple):
    """An item in one format: bytes, divergence, and seconds of one micro-batch in each phase."""

    format: Format
    num_bytes: float
    kl: float
    seconds: tuple[float, ...] = ()


class Item(NamedTuple):
    """A part of a layer (the LM head: None) and the formats it may have."""

    layer: int | None
    part: Part
    options: tuple[Option, ...]


class Budget(NamedTuple):
    """A node's memory: bytes for weights, and the share of each part's bytes that it holds."""

    num_bytes: float
    shares: dict[Part, float]


class Phase(NamedTuple):
    """How layers follow each other in a step of one phase.

    `weight` is how much a second of it counts. `takes_turns`: attention and experts share cores or
    a device, so that their times add up; else they overlap over `micro_batches`. `link_s` one way.
    """

    weight: float = 1.0
    micro_batches: int = 1
    link_s: float = 0.0
    takes_turns: bool = True


@dataclass(frozen=True)
class Problem:
    """Items, what bounds them, and how their times become an objective (seconds, less is better).

    A layer's pace is the longer of m times its slower side and one round trip: the terms of
    (L - 1) in MegaScale-Infer's T_total (topspin's pipeline). Options have seconds of each phase.
    """

    items: tuple[Item, ...]
    budgets: tuple[Budget, ...]
    max_kl: float
    phases: tuple[Phase, ...]

    @cached_property
    def bounds(self) -> list[tuple[float, list[list[float]]]]:
        """Return every bound: its limit, and what each item's options take of it."""
        by_kl = [[option.kl for option in item.options] for item in self.items]
        by_budget = [
            [
                [option.num_bytes * budget.shares.get(item.part, 0.0) for option in item.options]
                for item in self.items
            ]
            for budget in self.budgets
        ]
        limits = (self.max_kl, *(budget.num_bytes for budget in self.budgets))
        return list(zip(limits, (by_kl, *by_budget), strict=True))


Choice = tuple[int, ...]
"""The index of each item's option."""


class Value(NamedTuple):
    """What a choice gives; `fits`: it keeps all bounds."""

    objective_s: float
    kl: float
    fits: bool


def evaluate(problem: Problem, choice: Sequence[int]) -> Value:
    """Return the value of a choice."""
    used = [
        math.fsum(sizes[idx] for sizes, idx in zip(table, choice, strict=True))
        for _, table in problem.bounds
    ]
    fits = all(
        each <= limit * (1 + 1e-9) for each, (limit, _) in zip(used, problem.bounds, strict=True)
    )
    # Of each layer and phase: the seconds of attention, and those of the experts.
    layers: dict[int | None, list[list[float]]] = {}
    for item, idx in zip(problem.items, choice, strict=True):
        phases = layers.setdefault(item.layer, [[0.0, 0.0] for _ in problem.phases])
        for sides, seconds in zip(phases, item.options[idx].seconds, strict=True):
            sides[item.part == "experts"] += seconds
    objective_s = math.fsum(
        phase.weight * (sides[0] if layer is None else pace_s(phase, *sides))
        for layer, phases in layers.items()
        for phase, sides in zip(problem.phases, phases, strict=True)
    )
    return Value(objective_s, used[0], fits)


def pace_s(phase: Phase, attention_s: float, experts_s: float) -> float:
    """Return the seconds from one layer's start to the next's; without experts, no link."""
    m = phase.micro_batches
    if not experts_s:
        return m * attention_s
    both = attention_s + experts_s
    busy = both if phase.takes_turns else max(attention_s, experts_s)
    return max(m * busy, both + 2 * phase.link_s)


def solve(problem: Problem, *, gap: float = GAP) -> Choice | None:
    """Return the best choice within the bounds, up to `gap`; None if there is none."""
    for margin in (0.0, MARGIN):
        program = _Program(problem, margin)
        result = milp(
            program.costs,
            constraints=program.constraints(),
            integrality=program.is_integer,
            bounds=Bounds(0, program.upper),
            options={"mip_rel_gap": gap, "time_limit": TIME_LIMIT_S},
        )
        if result.x is None:
            return None
        found = program.choice(result.x)
        # A solver's tolerances are not the bound's.
        if evaluate(problem, found).fits:
            return restored(problem, found)
    return None


def least(
    items: Sequence[Item],
    cost: Callable[[Option], float],
    *,
    num_bytes: float = math.inf,
    max_kl: float = math.inf,
) -> Choice | None:
    """Return the choice with the least sum of `cost` within the bounds, whatever its times.

    `num_bytes` of all items together. None: there is no choice within the bounds.
    """
    # Solvers have absolute tolerances, so numbers near 1 it is.
    unit = max((cost(option) for item in items for option in item.options), default=0.0) or 1.0
    costly = tuple(
        item._replace(
            options=tuple(each._replace(seconds=(cost(each) / unit,)) for each in item.options)
        )
        for item in items
    )
    budget = Budget(num_bytes, dict.fromkeys((item.part for item in items), 1.0))
    return solve(Problem(costly, (budget,), max_kl, (Phase(),)))


def restored(problem: Problem, choice: Sequence[int]) -> Choice:
    """Return a choice within the bounds after giving items back all that costs no time."""
    found, value = tuple(choice), evaluate(problem, choice)
    by_kl = [[option.kl for option in item.options] for item in problem.items]
    for idx in sorted(range(len(found)), key=lambda each: -by_kl[each][found[each]]):
        for other in sorted(range(len(by_kl[idx])), key=by_kl[idx].__getitem__):
            if by_kl[idx][other] >= by_kl[idx][found[idx]]:
                break
            tried = (*found[:idx], other, *found[idx + 1 :])
            new = evaluate(problem, tried)
            if new.fits and new.objective_s <= value.objective_s:
                found, value = tried, new
                break
    return found


class _Program:
    """The problem as a mixed-integer program: z per option, a pace per layer and phase."""

    def __init__(self, problem: Problem, margin: float) -> None:
        self.problem = problem
        self.first = list(itertools.accumulate((len(i.options) for i in problem.items), initial=0))
        num_options = self.first[-1]
        self.layers = sorted({item.layer for item in problem.items if item.layer is not None})
        num_paces = len(problem.phases) * len(self.layers)
        self.costs: Any = np.zeros(num_options + num_paces)
        self.is_integer: Any = np.r_[np.ones(num_options), np.zeros(num_paces)]
        self.upper: Any = np.r_[np.ones(num_options), np.full(num_paces, np.inf)]
        self._rows: list[tuple[dict[int, float], float, float]] = []
        for idx in range(len(problem.items)):
            self._add(dict.fromkeys(self._columns(idx), 1.0), 1.0, 1.0)
        for limit, table in problem.bounds:
            self._add(dict(enumerate(itertools.chain(*table))), -np.inf, limit, margin=margin)
        paces = itertools.count(num_options)
        for number, phase in enumerate(problem.phases):
            for column, option_s in self._seconds(number, None, is_experts=False).items():
                self.costs[column] += phase.weight * option_s
            for layer in self.layers:
                self._add_pace(next(paces), layer, number)

    def _columns(self, idx: int) -> range:
        return range(self.first[idx], self.first[idx + 1])

    def _add(
        self, terms: dict[int, float], low: float, high: float, *, margin: float = 0.0
    ) -> None:
        """Add a row, scaled to its largest coefficient: bytes and seconds differ by 10^15."""
        scale = max((abs(value) for value in terms.values()), default=0.0) or 1.0
        scaled = {column: value / scale for column, value in terms.items() if value}
        self._rows.append((scaled, low / scale, high / scale - margin))

    def _seconds(self, number: int, layer: int | None, *, is_experts: bool) -> dict[int, float]:
        """Return the options of a layer's items on one side, with their seconds of a phase."""
        return {
            column: option.seconds[number]
            for idx, item in enumerate(self.problem.items)
            if item.layer == layer and (item.part == "experts") == is_experts
            for column, option in zip(self._columns(idx), item.options, strict=True)
        }

    def _add_pace(self, column: int, layer: int, number: int) -> None:
        """Add: the pace is at least every term of pace_s."""
        phase = self.problem.phases[number]
        self.costs[column] = phase.weight
        attention = self._seconds(number, layer, is_experts=False)
        experts = self._seconds(number, layer, is_experts=True)
        both = attention | experts
        m = phase.micro_batches
        for terms in [both] if phase.takes_turns or not experts else [attention, experts]:
            self._add_at_least(column, {each: m * value for each, value in terms.items()}, 0.0)
        if experts:
            self._add_at_least(column, both, 2 * phase.link_s)

    def _add_at_least(self, column: int, terms: dict[int, float], constant: float) -> None:
        self._add({column: 1.0} | {each: -value for each, value in terms.items()}, constant, np.inf)

    def constraints(self) -> LinearConstraint:
        """Return all rows."""
        entries = [
            (row, column, value)
            for row, (terms, _, _) in enumerate(self._rows)
            for column, value in terms.items()
        ]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self._rows), len(self.costs))
        matrix = coo_array((values, (rows, columns)), shape=shape).tocsr()
        return LinearConstraint(
            matrix, [low for _, low, _ in self._rows], [high for _, _, high in self._rows]
        )

    def choice(self, solution: Any) -> Choice:
        """Return the options that a solution takes."""
        return tuple(
            int(np.argmax(solution[self.first[idx] : self.first[idx + 1]]))
            for idx in range(len(self.problem.items))
        )
