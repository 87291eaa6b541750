"""A new expert table from an old one: better balanced, with few experts moved.

Owns the cost of a change: contents are given to the nodes that hold most of them already,
experts keep their slots, and a layer is only touched if that gains more than reading its new
experts costs. Pure: loads and tables in, a table out. The algorithms of one layer are
balance.py's; balancer.py decides when.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import msgspec

from server.scheduler.experts.balance import (
    Bins,
    balance,
    node_times,
    place_global,
    place_hierarchical,
    refine,
)
from topspin.expert_table import ExpertTable

Layer = tuple[tuple[int, ...], ...]
"""The experts of each node, in slot order."""

# The cost of reading all experts of a layer, as a share of the mean node load: moving one
# expert of 64 slots must gain a 64th of it.
MIGRATION_COST = 0.2


class Hierarchy(NamedTuple):
    """For the hierarchical policy: the model's expert groups, and each host's nodes."""

    num_groups: int
    hosts: tuple[tuple[int, ...], ...]


def migrations(old: ExpertTable, new: ExpertTable) -> int:
    """Return how many experts nodes must read for `new` that they do not hold in `old`."""
    return sum(
        len(set(after) - set(before))
        for old_layer, new_layer in zip(old.slots, new.slots, strict=True)
        for before, after in zip(old_layer, new_layer, strict=True)
    )


def keep_slots(old: Sequence[int], experts: set[int]) -> tuple[int, ...]:
    """Return `experts` in slot order such that those of `old` stay where they are.

    The others take the free slots, ascending. A slot beyond len(experts) is given up.
    """
    slots: list[int | None] = [
        expert if expert in experts else None for expert in old[: len(experts)]
    ]
    slots += [None] * (len(experts) - len(slots))
    new = iter(sorted(experts - {expert for expert in slots if expert is not None}))
    return tuple(next(new) if expert is None else expert for expert in slots)


def match_contents(
    old: Sequence[set[int]], new: Sequence[set[int]], kinds: Sequence[object]
) -> list[int]:
    """Return, for each place, the index in `new` of its content, so that much of `old` is kept.

    Content i was made for place i; it may go to places of an equal kind only. Pairs with
    the most in common are matched first, then exchanges that help are made.
    """
    num_places = len(old)
    common = [[len(held & content) for content in new] for held in old]
    pairs = sorted(
        (-common[place][idx], place, idx)
        for place in range(num_places)
        for idx in range(num_places)
        if kinds[place] == kinds[idx]
    )
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for _, place, idx in pairs:
        if place not in chosen and idx not in taken:
            chosen[place] = idx
            taken.add(idx)
    result = [chosen[place] for place in range(num_places)]
    for first in range(num_places):
        for second in range(first + 1, num_places):
            one, two = result[first], result[second]
            now = common[first][one] + common[second][two]
            if kinds[first] == kinds[second] and common[first][two] + common[second][one] > now:
                result[first], result[second] = two, one
    return result


def match_nodes(
    old: Sequence[set[int]],
    bins: Bins,
    hosts: Sequence[Sequence[int]],
    speeds: Sequence[float] | None = None,
) -> Bins:
    """Return `bins` reordered so that nodes keep many of their experts.

    Whole hosts exchange their contents, then nodes within a host. Only contents of the same
    size are exchanged, since sizes are the nodes' capacities, and only between equal speeds.
    """
    speeds = speeds or (1.0,) * len(bins)
    result = list(bins)
    whole = match_contents(
        [set().union(*(old[node] for node in nodes)) for nodes in hosts],
        [set().union(*(bins[node] for node in nodes)) for nodes in hosts],
        [tuple((len(bins[node]), speeds[node]) for node in nodes) for nodes in hosts],
    )
    for nodes, host_idx in zip(hosts, whole, strict=True):
        contents = [bins[node] for node in hosts[host_idx]]
        inside = match_contents(
            [old[node] for node in nodes],
            contents,
            # Of the place that a content was made for.
            [(len(bins[node]), speeds[node]) for node in hosts[host_idx]],
        )
        for node, idx in zip(nodes, inside, strict=True):
            result[node] = contents[idx]
    return result


def place_layer(
    old: Layer,
    loads: Sequence[float],
    *,
    capacities: Sequence[int],
    speeds: Sequence[float] | None = None,
    hierarchy: Hierarchy | None = None,
    required: Sequence[int] | None = None,
) -> Layer:
    """Return the layer with the lowest cost: its longest time plus the price of experts to read.

    The candidates are `old` as it is (if it has the right sizes), `old` with a few experts
    exchanged, and a new placement. With `required`, which hold every expert in `old`, only those
    where these nodes still do, and `old` with experts exchanged between them.
    """
    held = [set(experts) for experts in old]
    speeds = speeds or (1.0,) * len(old)
    hosts: Sequence[Sequence[int]] = [[node] for node in range(len(old))]
    if hierarchy is None:
        fresh = place_global(loads, capacities, speeds)
    else:
        hosts = hierarchy.hosts
        fresh = place_hierarchical(
            loads, capacities, num_groups=hierarchy.num_groups, hosts=hosts, speeds=speeds
        )
    candidates = [match_nodes(held, fresh, hosts, speeds)]
    if [len(experts) for experts in old] == list(capacities) and all_held(held, len(loads)):
        candidates = [held, *([] if hierarchy else [refine(held, loads, speeds)]), *candidates]
    if required is not None:
        own = refine([held[n] for n in required], loads, [speeds[n] for n in required])
        exchanged = list(held)
        for node, experts in zip(required, own, strict=True):
            exchanged[node] = experts
        candidates = [
            bins
            for bins in (held, exchanged, *candidates)
            if all_held([bins[node] for node in required], len(loads))
        ]
    price = MIGRATION_COST * sum(loads) / sum(speeds) / max(1, sum(capacities))

    def cost(bins: Bins) -> float:
        moved = sum(len(after - before) for before, after in zip(held, bins, strict=True))
        return max(node_times(bins, loads, speeds)) + moved * price

    best = min(candidates, key=cost)
    return tuple(keep_slots(before, after) for before, after in zip(old, best, strict=True))


def all_held(bins: Sequence[set[int]], num_experts: int) -> bool:
    """Say whether every expert is on some node."""
    return len(set().union(*bins)) == num_experts


def plan_table(
    old: ExpertTable,
    loads: Sequence[Sequence[float]],
    *,
    min_gain: float,
    speeds: Sequence[float] | None = None,
    hierarchy: Hierarchy | None = None,
    required: Sequence[int] | None = None,
) -> Generator[None, None, ExpertTable | None]:
    """Return a table for loads[layer][expert], with the next version; yields after each layer.

    Nodes keep their numbers of slots, and layers that are local stay as they are; `speeds` None:
    they are equally fast. The `required` nodes (None: all) together keep every expert. None if the
    table's balance would not be better than that of `old` by a factor above 1 + min_gain.
    """
    layers: list[Layer] = []
    for idx, (layer, layer_loads) in enumerate(zip(old.slots, loads, strict=True)):
        if idx in old.local:
            layers.append(layer)
            continue
        capacities = [len(experts) for experts in layer]
        layers.append(
            place_layer(
                layer,
                layer_loads,
                capacities=capacities,
                speeds=speeds,
                hierarchy=hierarchy,
                required=required,
            )
        )
        yield
    new = msgspec.structs.replace(
        old, version=old.version + 1, slots=tuple(layers), speeds=tuple(speeds or ())
    )
    new.validate()
    gains = balance(old, loads, speeds) > balance(new, loads, speeds) * (1 + min_gain)
    return new if gains else None
