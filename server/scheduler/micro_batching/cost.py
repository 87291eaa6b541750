"""A linear model of the time that one MoE layer takes on each side, and its fit to the steps run.

Owns the coefficients, the arithmetic, the running least squares and the reading of a step's
timings. Knows no plans and no requests. The defaults are those of a 215M-parameter model on two CPU
cores; splits and routing depend on their ratios only, so they are usable, not exact, elsewhere.
Called by split.py, plans.py, load_balancing.py and policy.py.

Each side's time is linear in a few counts, with coefficients that must not be negative. Old steps
fade (a window of about MEMORY steps), an outlier counts less (Huber's weights on relative
residuals), and where the steps cannot separate two coefficients (a constant load) the default
model's proportions decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from server.scheduler.nodes.formation import Formation
from topspin.messages import StepTimings

MEMORY = 100
# The default model counts as much as this many steps.
PRIOR_STEPS = 0.02
# Residuals beyond this many mean absolute residuals are outliers.
_OUTLIER = 3.0
_SPREAD_RATE = 0.05
_MIN_SPREAD = 1e-3
_LINK_RATE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds per layer: a fixed part (reading weights) and parts per token.

    `attention_pair_s` is per (query token, key position) pair, `link_s` one way.
    """

    attention_fixed_s: float = 4.3e-4
    attention_token_s: float = 4.5e-6
    attention_pair_s: float = 6.0e-9
    expert_fixed_s: float = 3.1e-4
    expert_token_s: float = 1.4e-5
    link_s: float = 2.1e-5
    link_token_s: float = 0.0

    def slice_s(self, num_tokens: int, start: int) -> float:
        """Return the time that `num_tokens` positions from `start` on add to a micro-batch."""
        pairs = num_tokens * (start + 0.5 * (num_tokens + 1))
        token_s = self.attention_token_s + self.expert_token_s
        return token_s * num_tokens + self.attention_pair_s * pairs


def linked_cost_model(*, latency_us: float, gbps: float | None, hidden_size: int) -> CostModel:
    """Return the default model with the link that the configuration describes (2-byte payload)."""
    default = CostModel()
    return CostModel(
        link_s=default.link_s + latency_us * 1e-6,
        link_token_s=0.0 if gbps is None else hidden_size * 2 * 8 / (gbps * 1e9),
    )


class StepLoad(NamedTuple):
    """The load of one attention node: micro-batches with rows, tokens, query-key pairs."""

    num_micro_batches: int
    num_tokens: int
    num_pairs: float


class LinearFit:
    """Non-negative least squares of y on x, recursive and robust."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        size = len(self._prior)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._prior_yy = 0.0
        self._prior_xy = 0.0
        self._spread: float | None = None
        self._num_samples = 0
        self._found = self._prior

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Return the coefficients in use."""
        return self._found

    def add(self, x: Sequence[float], y: float) -> None:
        """Add a sample; ignored unless `y` is positive and `x` is not all zeros."""
        if not y > 0.0 or not any(x):
            return
        weight = self._weight(x, y)
        keep = 1.0 - 1.0 / MEMORY
        size = len(self._prior)
        # Errors are relative: a long prefill step must not outweigh the decode steps.
        weight /= y * y
        for row in range(size):
            self._moment[row] = keep * self._moment[row] + weight * x[row] * y
            for column in range(size):
                self._gram[row][column] = (
                    keep * self._gram[row][column] + weight * x[row] * x[column]
                )
        predicted = _dot(self._prior, x)
        self._prior_xy = keep * self._prior_xy + weight * predicted * y
        self._prior_yy = keep * self._prior_yy + weight * predicted * predicted
        self._num_samples += 1
        self._found = self._solve()

    def _weight(self, x: Sequence[float], y: float) -> float:
        """Return the weight of a sample, and update the mean absolute residual."""
        if self._num_samples == 0:
            return 1.0
        residual = abs(y - _dot(self._found, x)) / y
        if self._spread is None:
            self._spread = max(residual, _MIN_SPREAD)
            return 1.0
        limit = _OUTLIER * self._spread
        weight = 1.0 if residual <= limit else limit / residual
        seen = min(residual, limit)
        self._spread = max(_MIN_SPREAD, self._spread + _SPREAD_RATE * (seen - self._spread))
        return weight

    def _solve(self) -> tuple[float, ...]:
        """Return the minimum of the squared errors over all non-negative coefficients.

        The prior, scaled to the measured times, weakly attracts every coefficient.
        """
        scale = self._prior_xy / self._prior_yy
        size = len(self._prior)
        share = PRIOR_STEPS / max(1.0, min(self._num_samples, MEMORY))
        gram = [list(row) for row in self._gram]
        moment = list(self._moment)
        for idx in range(size):
            pull = share * self._gram[idx][idx] + 1e-30
            gram[idx][idx] += pull
            moment[idx] += pull * scale * self._prior[idx]
        best, best_value = (0.0,) * size, 0.0
        for count in range(size, 0, -1):
            if best_value < 0.0 and count == size - 1:
                break  # without bounds it is the minimum, too
            for chosen in combinations(range(size), count):
                part = _solve_linear(
                    [[gram[row][column] for column in chosen] for row in chosen],
                    [moment[row] for row in chosen],
                )
                if part is None or min(part) < 0.0:
                    continue
                # At a stationary point the objective is -moment . part, up to a constant.
                value = -_dot([moment[row] for row in chosen], part)
                if value < best_value:
                    full = [0.0] * size
                    for position, row in enumerate(chosen):
                        full[row] = part[position]
                    best, best_value = tuple(full), value
        return best


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Return the solution of a symmetric positive system by elimination, None if singular."""
    size = len(right)
    # Columns are scaled to a unit diagonal: counts differ by many orders of magnitude.
    if any(not matrix[idx][idx] > 0.0 for idx in range(size)):
        return None
    unit = [matrix[idx][idx] ** -0.5 for idx in range(size)]
    rows = [
        [matrix[r][c] * unit[r] * unit[c] for c in range(size)] + [right[r] * unit[r]]
        for r in range(size)
    ]
    for pivot in range(size):
        if rows[pivot][pivot] < 1e-12:
            return None
        for other in range(pivot + 1, size):
            factor = rows[other][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[other][column] -= factor * rows[pivot][column]
    solution = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(rows[row][c] * solution[c] for c in range(row + 1, size))
        solution[row] = (rows[row][size] - rest) / rows[row][row]
    return [value * scale for value, scale in zip(solution, unit, strict=True)]


class CostFit:
    """The cost model of each attention node, per MoE layer whose rows travel.

    The time of dense layers, and of those that are local, is included. Nodes differ in their own
    times; experts and link are common to all.
    """

    def __init__(self, prior: CostModel, num_layers: int) -> None:
        self._num_layers = max(1, num_layers)
        self._prior = prior
        self._common = prior
        self._attention: dict[int, LinearFit] = {}
        self._expert = LinearFit((prior.expert_fixed_s, prior.expert_token_s))
        self._models: dict[int, CostModel] = {}

    def of(self, node: int) -> CostModel:
        """Return the model of attention node `node` that fits the steps seen so far."""
        model = self._models.get(node)
        if model is None:
            fit, common = self._attention.get(node), self._common
            fixed, token, pair = self._own_prior() if fit is None else fit.coefficients
            model = self._models[node] = replace(
                common, attention_fixed_s=fixed, attention_token_s=token, attention_pair_s=pair
            )
        return model

    def attention_times(self, load: StepLoad) -> dict[int, float]:
        """Return how long a load takes on each attention node that has been measured, per layer."""
        return {node: _dot(fit.coefficients, load) for node, fit in self._attention.items()}

    def _own_prior(self) -> tuple[float, float, float]:
        prior = self._prior
        return prior.attention_fixed_s, prior.attention_token_s, prior.attention_pair_s

    def prompt_s(self, node: int, num_tokens: int, start: int) -> float:
        """Return the time that positions of a prompt, from `start` on, add to steps."""
        return self._num_layers * self.of(node).slice_s(num_tokens, start)

    def fixed_s(self, node: int) -> float:
        """Return the time of a step with one micro-batch that does not grow with its rows."""
        model = self.of(node)
        return self._num_layers * (model.attention_fixed_s + model.expert_fixed_s)

    def add_step(self, loads: Mapping[int, StepLoad], timings: Mapping[int, StepTimings]) -> None:
        """Learn from a step: each attention node's load, and its timings."""
        for node, load in loads.items():
            self.add_attention(node, load, timings[node].attention_s)
        if not loads:
            return
        m = max(load.num_micro_batches for load in loads.values())
        num_tokens = sum(load.num_tokens for load in loads.values())
        expert_s = max(each.expert_s for each in timings.values())
        self.add_expert(m, num_tokens, expert_s)
        if expert_s == 0.0 < min(each.attention_s for each in timings.values()):
            # The attention nodes have the experts: theirs is the time of both.
            self._share(replace(self._common, expert_fixed_s=0.0, expert_token_s=0.0))
        links = [each.link_s for each in timings.values() if each.link_s is not None]
        if links:
            widest = max(load.num_tokens for load in loads.values()) / m
            self.add_link(widest, sum(links) / len(links))

    def add_attention(self, node: int, load: StepLoad, attention_s: float) -> None:
        """Learn from one attention node's computing time in a step, all layers."""
        if node not in self._attention:
            self._attention[node] = LinearFit(self._own_prior())
        self._attention[node].add(load, attention_s / self._num_layers)
        self._models.pop(node, None)

    def add_expert(self, num_micro_batches: int, num_tokens: int, expert_s: float) -> None:
        """Learn from the busiest expert node's computing time in a step, all layers."""
        self._expert.add((num_micro_batches, num_tokens), expert_s / self._num_layers)
        fixed, token = self._expert.coefficients
        self._share(replace(self._common, expert_fixed_s=fixed, expert_token_s=token))

    def add_link(self, widest_rows: float, link_s: float) -> None:
        """Learn from a step's mean one-way time, of micro-batches of `widest_rows` rows."""
        common = self._common
        fixed = max(0.0, link_s - common.link_token_s * widest_rows)
        link = common.link_s + _LINK_RATE * (fixed - common.link_s)
        self._share(replace(common, link_s=link))

    def _share(self, common: CostModel) -> None:
        self._common = common
        self._models.clear()


class CostFits:
    """A CostFit for each set of layers that is local at times, whose steps differ in all times."""

    def __init__(self, prior: CostModel, num_layers: int, formation: Formation) -> None:
        """`num_layers` counts MoE layers."""
        self._prior = prior
        self._num_layers = num_layers
        self._formation = formation
        self._fits: dict[tuple[int, ...], CostFit] = {}

    @property
    def num_hops(self) -> int:
        """Return the MoE layers whose rows travel in the next step."""
        return self._num_layers - len(self._formation.table.local)

    def of(self, node: int) -> CostModel:
        """Return the model of attention node `node` for the next step."""
        return self.fit(self._formation.table.local).of(node)

    def prompt_s(self, node: int, num_tokens: int, start: int) -> float:
        """Return the time that positions of a prompt, from `start` on, add to steps."""
        return self.fit(self._formation.table.local).prompt_s(node, num_tokens, start)

    def fixed_s(self, node: int) -> float:
        """Return the time of a step with one micro-batch that does not grow with its rows."""
        return self.fit(self._formation.table.local).fixed_s(node)

    def add_step(
        self,
        local: tuple[int, ...],
        loads: Mapping[int, StepLoad],
        timings: Mapping[int, StepTimings],
    ) -> None:
        """Learn from a step in which the MoE layers `local` were so."""
        self.fit(local).add_step(loads, timings)

    def fit(self, local: tuple[int, ...] = ()) -> CostFit:
        """Return the fit of steps in which the MoE layers `local` are so."""
        if local not in self._fits:
            self._fits[local] = CostFit(self._prior, self._num_layers - len(local))
        return self._fits[local]
