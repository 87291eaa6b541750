"""Replays steps as a dependency graph: how long they would take if a node were faster.

Owns the pipeline's exact recurrence and the what-if analysis of nodes. Pure: maps durations to
times, in any one unit. Called by report.py; the scheduler's model of equal micro-batches is
tested against it.

Order, as m2n_comm.net prescribes it: every node serves (layer, micro-batch) in turn; an
expert node begins one when it is free and every attention node's frame is there, an
attention node when it is free and every expert node's answer to the layer before is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

# durations[node][layer][micro_batch]
Durations = Mapping[str, Sequence[Sequence[float]]]


class StepGraph(NamedTuple):
    """The activity of every node in one step, and its durations."""

    step: int
    attention: Durations
    experts: Durations


class WhatIf(NamedTuple):
    """How much shorter steps would be, as a share, were `name` as fast as the others' mean."""

    name: str
    gain: float


def replay(attention: Durations, experts: Durations, link: float) -> float:
    """Return the time of a step's last answer if frames take `link` each way."""
    free = dict.fromkeys([*attention, *experts], 0.0)
    first = next(iter(attention.values()))
    num_layers, num_micro_batches = len(first), len(first[0])
    back = [0.0] * num_micro_batches
    for layer in range(num_layers):
        for micro_batch in range(num_micro_batches):
            arrived = 0.0
            for name, grid in attention.items():
                free[name] = max(free[name], back[micro_batch]) + grid[layer][micro_batch]
                arrived = max(arrived, free[name] + link)
            answered = 0.0
            for name, grid in experts.items():
                free[name] = max(free[name], arrived) + grid[layer][micro_batch]
                answered = max(answered, free[name])
            back[micro_batch] = answered + link
    return max(back)


def what_if(graphs: Sequence[StepGraph], link: float) -> list[WhatIf]:
    """Return the gain of making each node average, largest first.

    A node's times are replaced by the mean of its role's other nodes on the same step,
    layer and micro-batch, where that is less. A node without others is left out.
    """
    total = sum(replay(graph.attention, graph.experts, link) for graph in graphs)
    if not total:
        return []
    found = []
    for is_attention in (True, False):
        sides = [graph.attention if is_attention else graph.experts for graph in graphs]
        if max(map(len, sides)) == 1:
            continue
        for name in sorted({name for side in sides for name in side}):
            changed = 0.0
            for graph, side in zip(graphs, sides, strict=True):
                averaged = _averaged(side, name)
                attention = averaged if is_attention else graph.attention
                experts = graph.experts if is_attention else averaged
                changed += replay(attention, experts, link)
            found.append(WhatIf(name, 1.0 - changed / total))
    return sorted(found, key=lambda each: -each.gain)


def _averaged(side: Durations, name: str) -> Durations:
    """Return one side of a step with `name` made average."""
    others = [grid for other, grid in side.items() if other != name]
    if name not in side or not others:
        return side
    average = [
        [min(own, fmean(grid[layer][idx] for grid in others)) for idx, own in enumerate(row)]
        for layer, row in enumerate(side[name])
    ]
    return {**side, name: average}
