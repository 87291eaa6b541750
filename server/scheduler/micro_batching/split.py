"""The number of micro-batches of a step, and the assignment of slices to them.

Pure functions of predicted times (cost.py). A slice is never cut, so a sequence stays in
one micro-batch per step. Called by plans.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from server.scheduler.micro_batching.cost import CostModel
from topspin.pipeline import HopTimes, pipeline_s
from topspin.plan.settings import MAX_MICRO_BATCHES

# A new number of micro-batches must be this much faster than the one in use. With TIE it bounds
# the cost of keeping that one (3 %); fitted times vary less than this under a constant load.
HYSTERESIS = 0.015
# Times this close to the best count as equal; the smallest number is then taken, since every
# micro-batch has its own costs.
TIE = 0.01
# On shared cores the link is all that more micro-batches can hide. One that takes a smaller share
# of the computing time than this is not worth their own costs, whatever the fit says of them: what
# it takes for the time to read weights is vague while all steps have about as many rows.
MIN_LINK_SHARE = 0.25
DEFAULT_NUM_LAYERS = 30


class NodeLoad(NamedTuple):
    """The load of one attention node in a step, by its own times; `largest_s`: its longest slice.

    `fixed_s` is the node's time for reading weights (None: the cost model's).
    """

    num_slices: int
    num_tokens: int
    slices_s: float
    largest_s: float = 0.0
    fixed_s: float | None = None


def hop_times(cost: CostModel, loads: Sequence[NodeLoad], num_micro_batches: int) -> HopTimes:
    """Return the predicted times of the largest of `num_micro_batches` micro-batches."""
    m = num_micro_batches
    num_tokens = sum(load.num_tokens for load in loads)
    widest = max(load.num_tokens for load in loads)
    # slices_s includes the experts' time per token, which is subtracted here.
    # A slice is never cut: one that is longer than its share determines the time.
    t_a = max(
        (cost.attention_fixed_s if load.fixed_s is None else load.fixed_s)
        + max(
            0.0,
            max(load.slices_s / m, load.largest_s) - load.num_tokens / m * cost.expert_token_s,
        )
        for load in loads
    )
    return HopTimes(
        t_a=t_a,
        t_e=cost.expert_fixed_s + cost.expert_token_s * num_tokens / m,
        t_c=cost.link_s + cost.link_token_s * widest / m,
    )


def step_times(
    cost: CostModel, loads: Sequence[NodeLoad], *, shares_cores: bool, num_layers: int
) -> list[float]:
    """Return the predicted seconds of a step with 1, 2, ... micro-batches.

    Their number is limited by MAX_MICRO_BATCHES and by the slices of the widest node.
    """
    limit = min(MAX_MICRO_BATCHES, max(1, *(load.num_slices for load in loads)))
    return [
        pipeline_s(
            hop_times(cost, loads, m),
            num_micro_batches=m,
            num_layers=num_layers,
            shares_cores=shares_cores,
        )
        for m in range(1, limit + 1)
    ]


def choose_num_micro_batches(
    cost: CostModel,
    loads: Sequence[NodeLoad],
    *,
    shares_cores: bool,
    num_layers: int = DEFAULT_NUM_LAYERS,
    current: int | None = None,
) -> int:
    """Return the number of micro-batches with the least predicted time, the smallest of equals.

    `current`, the number in use, stays unless another one is faster by HYSTERESIS.
    """
    if not loads:
        return 1
    if shares_cores:
        hop = hop_times(cost, loads, 1)
        if 2 * hop.t_c < MIN_LINK_SHARE * (hop.t_a + hop.t_e):
            return 1
    times = step_times(cost, loads, shares_cores=shares_cores, num_layers=num_layers)
    good_s = min(times) * (1.0 + TIE)
    best = next(m for m, time_s in enumerate(times, 1) if time_s <= good_s)
    if current is None or current > len(times):
        return best
    is_better = times[best - 1] < (1.0 - HYSTERESIS) * times[current - 1]
    return best if is_better else current


def split_slices(slices_s: Sequence[float], num_micro_batches: int) -> list[list[int]]:
    """Return the indices of each micro-batch's slices, balanced by predicted time.

    Greedy, longest first, to the least loaded: at most 4/3 of the best possible makespan
    (Graham 1969). Deterministic; indices ascend within a micro-batch.
    """
    if num_micro_batches == 1:
        return [list(range(len(slices_s)))]
    parts: list[list[int]] = [[] for _ in range(num_micro_batches)]
    loads = [(0.0, part) for part in range(num_micro_batches)]
    heapify(loads)
    for idx in sorted(range(len(slices_s)), key=slices_s.__getitem__, reverse=True):
        load_s, part = loads[0]
        parts[part].append(idx)
        heapreplace(loads, (load_s + slices_s[idx], part))
    for indices in parts:
        indices.sort()
    return parts


def row_bucket(num_rows: int) -> int:
    """Return the next power of two (0: 0): a node can then keep one graph per step shape."""
    return 0 if num_rows == 0 else 1 << (num_rows - 1).bit_length()
