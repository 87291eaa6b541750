"""The choice of a format for every layer and part, under a bound on quality and on memory.

Owns the problem and three ways to solve it: every assignment (small ones), a mixed-integer program
(scipy's HiGHS), and an allocator after QSync (arXiv 2407.02327): everything in its fastest format
first, then the most sensitive restored while that costs nothing. Quality is a bound here, where
LLM-PQ (arXiv 2403.01136) has it as a penalty with a weight. Pure: knows no device and no model.
Called by deploy.placement.search.precision and deploy.quantisation.mixing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from topspin.plan.precision import Format, Part

GAP = 1e-4
"""The relative distance from the best objective at which a solution is taken for the best."""
TIME_LIMIT_S = 1.0


class Option(NamedTuple):
    """An item in one format: bytes, divergence, and seconds of one micro-batch in each phase."""

    format: Format
    num_bytes: float
    kl: float
    decode_s: float
    prefill_s: float


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

    weight: float
    micro_batches: int
    link_s: float
    takes_turns: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Items, what bounds them, and how their times become an objective (seconds, less is better).

    A layer's pace is the longer of m times its slower side and one round trip: the terms of
    (L - 1) in MegaScale-Infer's T_total (topspin's pipeline).
    """

    items: tuple[Item, ...]
    budgets: tuple[Budget, ...]
    max_kl: float
    decode: Phase
    prefill: Phase


Choice = tuple[int, ...]
"""The index of each item's option."""


class Value(NamedTuple):
    """What a choice gives; `fits`: it keeps all bounds."""

    objective_s: float
    kl: float
    fits: bool


def evaluate(problem: Problem, choice: Sequence[int]) -> Value:
    """Return the value of a choice."""
    chosen = [item.options[idx] for item, idx in zip(problem.items, choice, strict=True)]
    kl = math.fsum(option.kl for option in chosen)
    fits = kl <= problem.max_kl * (1 + 1e-9)
    for budget in problem.budgets:
        used = math.fsum(
            option.num_bytes * budget.shares.get(item.part, 0.0)
            for item, option in zip(problem.items, chosen, strict=True)
        )
        fits = fits and used <= budget.num_bytes * (1 + 1e-9)
    layers: dict[int | None, list[int]] = {}
    for idx, item in enumerate(problem.items):
        layers.setdefault(item.layer, []).append(idx)
    objective_s = math.fsum(_layer_s(problem, items, choice) for items in layers.values())
    return Value(objective_s, kl, fits)


def _layer_s(
    problem: Problem, items: Sequence[int], choice: Sequence[int] | Mapping[int, int]
) -> float:
    """Return what one layer (or the head), whose items these are, adds to the objective."""
    total = 0.0
    for phase, field in ((problem.decode, 3), (problem.prefill, 4)):
        attention = experts = 0.0
        for idx in items:
            seconds = float(problem.items[idx].options[choice[idx]][field])
            if problem.items[idx].part == "experts":
                experts += seconds
            else:
                attention += seconds
        is_head = problem.items[items[0]].layer is None
        total += phase.weight * (attention if is_head else pace_s(phase, attention, experts))
    return total


def pace_s(phase: Phase, attention_s: float, experts_s: float) -> float:
    """Return the seconds from one layer's start to the next's; without experts, no link."""
    m = phase.micro_batches
    if not experts_s:
        return m * attention_s
    both = attention_s + experts_s
    busy = both if phase.takes_turns else max(attention_s, experts_s)
    return max(m * busy, both + 2 * phase.link_s)


def num_choices(problem: Problem) -> int:
    """Return how many assignments there are."""
    return math.prod(len(item.options) for item in problem.items)


def all_choices(problem: Problem) -> Iterator[Choice]:
    """Yield every assignment."""
    return itertools.product(*(range(len(item.options)) for item in problem.items))


def solve(problem: Problem, *, gap: float = GAP) -> Choice | None:
    """Return the best choice within the bounds, up to `gap`; None if there is none."""
    program = _Program(problem)
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
    return restored(problem, found) if evaluate(problem, found).fits else allocate(problem)


def least_divergence(items: Sequence[Item], num_bytes: float) -> Choice | None:
    """Return the choice of the least divergence in `num_bytes` together, whatever its times.

    None: the smallest options need more.
    """
    # Solvers have absolute tolerances, so numbers near 1 it is.
    unit = max((option.kl for item in items for option in item.options), default=0.0) or 1.0
    by_kl = tuple(
        item._replace(
            options=tuple(
                option._replace(decode_s=option.kl / unit, prefill_s=0.0) for option in item.options
            )
        )
        for item in items
    )
    everywhere = dict.fromkeys((item.part for item in items), 1.0)
    phase = Phase(1.0, 1, 0.0, True)
    budget = Budget(num_bytes, everywhere)
    return solve(Problem(by_kl, (budget,), math.inf, phase, phase))


class _Program:
    """The problem as a mixed-integer program: z per option, a pace per layer and phase."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.first = list(itertools.accumulate((len(i.options) for i in problem.items), initial=0))
        num_options = self.first[-1]
        self.layers = sorted({item.layer for item in problem.items if item.layer is not None})
        num_paces = 2 * len(self.layers)
        self.costs: Any = np.zeros(num_options + num_paces)
        self.is_integer: Any = np.r_[np.ones(num_options), np.zeros(num_paces)]
        self.upper: Any = np.r_[np.ones(num_options), np.full(num_paces, np.inf)]
        self._rows: list[tuple[dict[int, float], float, float]] = []
        for idx, item in enumerate(problem.items):
            self._add(dict.fromkeys(self._columns(idx), 1.0), 1.0, 1.0)
            if item.layer is None:
                for column, option in zip(self._columns(idx), item.options, strict=True):
                    self.costs[column] = (
                        problem.decode.weight * option.decode_s
                        + problem.prefill.weight * option.prefill_s
                    )
        self._add_bound(problem.max_kl, lambda item, option: option.kl)
        for budget in problem.budgets:
            self._add_bound(
                budget.num_bytes,
                lambda item, option, shares=budget.shares: (
                    option.num_bytes * shares.get(item.part, 0.0)
                ),
            )
        column = num_options
        for phase, field in ((problem.decode, 3), (problem.prefill, 4)):
            for layer in self.layers:
                self.costs[column] = phase.weight
                self._add_pace(column, layer, phase, field)
                column += 1

    def _columns(self, idx: int) -> range:
        return range(self.first[idx], self.first[idx + 1])

    def _add(self, terms: dict[int, float], low: float, high: float) -> None:
        """Add a row, scaled to its largest coefficient: bytes and seconds differ by 10^15."""
        scale = max((abs(value) for value in terms.values()), default=0.0) or 1.0
        scaled = {column: value / scale for column, value in terms.items() if value}
        self._rows.append((scaled, low / scale, high / scale))

    def _add_bound(self, limit: float, size: Any) -> None:
        terms = {
            column: float(size(item, option))
            for idx, item in enumerate(self.problem.items)
            for column, option in zip(self._columns(idx), item.options, strict=True)
        }
        self._add(terms, -np.inf, limit)

    def _add_pace(self, column: int, layer: int, phase: Phase, field: int) -> None:
        """Add: the pace is at least every term of pace_s."""
        sides: tuple[dict[int, float], dict[int, float]] = ({}, {})
        for idx, item in enumerate(self.problem.items):
            if item.layer == layer:
                for each, option in zip(self._columns(idx), item.options, strict=True):
                    sides[item.part == "experts"][each] = float(option[field])
        attention, experts = sides
        both = attention | experts
        m = phase.micro_batches
        has_link = bool(experts)
        busy = [both] if phase.takes_turns or not has_link else [attention, experts]
        for terms in busy:
            self._add_at_least(column, {each: m * value for each, value in terms.items()}, 0.0)
        if has_link:
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


def allocate(problem: Problem) -> Choice | None:
    """Return a good choice without a solver; None if it finds none within the bounds.

    QSync's order: everything as fast as it goes; while the divergence is too large, restore what
    gains the most of it per second lost; then restore, most sensitive first, all that costs
    nothing. Memory is kept by taking smaller formats where a restored one does not fit.
    """
    start = [
        min(range(len(item.options)), key=partial(_speed, problem, item)) for item in problem.items
    ]
    state = _State(problem, start)
    if not state.shrink():
        return None
    while state.kl > problem.max_kl:
        step = state.best_restoration()
        if step is None:
            return None
        state.take(*step)
    return restored(problem, state.choice)


def restored(problem: Problem, choice: Sequence[int]) -> Choice:
    """Return a choice within the bounds after giving items back all that costs no time."""
    state = _State(problem, choice)
    by_kl = sorted(range(len(choice)), key=lambda idx: -problem.items[idx].options[choice[idx]].kl)
    for idx in by_kl:
        options = problem.items[idx].options
        for other in sorted(range(len(options)), key=lambda each: options[each].kl):
            if options[other].kl >= options[state.choice[idx]].kl:
                break
            if state.has_room(idx, other) and state.lost_s(idx, other) <= 0.0:
                state.take(idx, other)
                break
    return tuple(state.choice)


def _speed(problem: Problem, item: Item, idx: int) -> tuple[float, float]:
    option = item.options[idx]
    seconds = problem.decode.weight * option.decode_s + problem.prefill.weight * option.prefill_s
    return seconds, option.kl


class _State:
    """A choice under change: what it uses, and what a step from it would gain and lose."""

    def __init__(self, problem: Problem, choice: Sequence[int]) -> None:
        self.problem = problem
        self.choice = list(choice)
        self._mates: dict[int | None, list[int]] = {}
        for idx, item in enumerate(problem.items):
            self._mates.setdefault(item.layer, []).append(idx)

    @property
    def kl(self) -> float:
        """Return the divergence of all items together."""
        return math.fsum(
            item.options[idx].kl for item, idx in zip(self.problem.items, self.choice, strict=True)
        )

    def take(self, idx: int, other: int) -> None:
        """Give item `idx` another option."""
        self.choice[idx] = other

    def used(self, budget: Budget) -> float:
        """Return the bytes that the choice takes of a budget."""
        return math.fsum(
            item.options[idx].num_bytes * budget.shares.get(item.part, 0.0)
            for item, idx in zip(self.problem.items, self.choice, strict=True)
        )

    def has_room(self, idx: int, other: int) -> bool:
        """Say whether no budget would be exceeded, or further exceeded, by a step."""
        item = self.problem.items[idx]
        grown = item.options[other].num_bytes - item.options[self.choice[idx]].num_bytes
        return grown <= 0 or all(
            self.used(budget) + grown * budget.shares.get(item.part, 0.0) <= budget.num_bytes
            for budget in self.problem.budgets
        )

    def lost_s(self, idx: int, other: int) -> float:
        """Return by how much a step makes the objective worse."""
        mates = self._mates[self.problem.items[idx].layer]
        changed = {mate: self.choice[mate] for mate in mates} | {idx: other}
        return _layer_s(self.problem, mates, changed) - _layer_s(self.problem, mates, self.choice)

    def shrink(self) -> bool:
        """Take smaller formats, the least divergence per byte first, until all budgets hold."""
        items = self.problem.items
        for budget in self.problem.budgets:
            over = self.used(budget) - budget.num_bytes
            while over > 0:
                steps = [
                    ((new.kl - old.kl) / (old.num_bytes - new.num_bytes), idx, other)
                    for idx, item in enumerate(items)
                    if budget.shares.get(item.part, 0.0)
                    for old in [item.options[self.choice[idx]]]
                    for other, new in enumerate(item.options)
                    if new.num_bytes < old.num_bytes
                ]
                if not steps:
                    return False
                _, idx, other = min(steps)
                self.take(idx, other)
                over = self.used(budget) - budget.num_bytes
        return True

    def best_restoration(self) -> tuple[int, int] | None:
        """Return the item and option that gain the most divergence per second lost, and fit."""
        steps = (
            (self.lost_s(idx, other) / (item.options[self.choice[idx]].kl - new.kl), idx, other)
            for idx, item in enumerate(self.problem.items)
            for other, new in enumerate(item.options)
            if new.kl < item.options[self.choice[idx]].kl and self.has_room(idx, other)
        )
        best = min(steps, default=None)
        return None if best is None else best[1:]
