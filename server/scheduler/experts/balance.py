"""Placement of the copies of one layer's experts, so that expert nodes are evenly loaded.

Owns the algorithms, pure and for one MoE layer: how many copies each expert gets, which node
holds which, and how even the load is. Follows the two policies of EPLB (DeepSeek): *global*, and
*hierarchical*, which first gives whole expert groups to hosts; beyond them it never puts two
copies of one expert on a node, takes nodes of different capacities, and improves a placement
by exchanges. Knows no time, no table version and no slot: placement.py does.

A node's time is its load divided by its speed; what is balanced is the time. An expert's load is
shared by its copies in proportion to their nodes' speeds, so that each adds as much time to its
node; a node's load is the sum over its experts. Without `speeds` all are 1, and time is load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from topspin.expert_table import ExpertTable

Bins = list[set[int]]
"""The experts that each node holds."""

# The most changes in a refinement of one layer, per node.
MAX_CHANGES_PER_NODE = 4
# A change must lower the peak by at least this share of the mean node load.
MIN_STEP = 0.005


def balance(
    table: ExpertTable, loads: Sequence[Sequence[float]], speeds: Sequence[float] | None = None
) -> float:
    """Return the experts' time under `table`, divided by that of perfect balance.

    loads[layer][expert]. Layers are computed one after the other, each in the time of its slowest
    node: the sum over layers of the longest time, divided by that of all loads on all nodes at
    once. 1 if there is no load. Nodes that hold nothing in a layer do not count there, and layers
    that are local do not count. Copies share loads by the speeds in the table, whatever the nodes'
    `speeds` are.
    """
    speeds = speeds or (1.0,) * table.num_nodes
    peak = mean = 0.0
    for idx, (layer, layer_loads) in enumerate(zip(table.slots, loads, strict=True)):
        if idx in table.local:
            continue
        found = node_loads(layer, layer_loads, table.speeds)
        layer_peak, layer_mean = peak_and_mean(found, layer, speeds)
        peak, mean = peak + layer_peak, mean + layer_mean
    return peak / mean if mean else 1.0


def peak_and_mean(
    node_loads: Sequence[float], nodes: Sequence[Sequence[int]], speeds: Sequence[float]
) -> tuple[float, float]:
    """Return the longest time of a node with experts in one layer, and that of all at once."""
    held = [
        (load, speed)
        for load, experts, speed in zip(node_loads, nodes, speeds, strict=True)
        if experts
    ]
    if not held:
        return 0.0, 0.0
    peak = max(load / speed for load, speed in held)
    return peak, sum(load for load, _ in held) / sum(speed for _, speed in held)


def node_loads(
    nodes: Sequence[Sequence[int] | set[int]],
    loads: Sequence[float],
    speeds: Sequence[float] | None = None,
) -> list[float]:
    """Return the load of each node of one layer: its shares of its experts' loads."""
    speeds = speeds or (1.0,) * len(nodes)
    weights = [0.0] * len(loads)
    for experts, speed in zip(nodes, speeds, strict=True):
        for expert in experts:
            weights[expert] += speed
    return [
        speed * sum(loads[expert] / weights[expert] for expert in experts)
        for experts, speed in zip(nodes, speeds, strict=True)
    ]


def node_times(
    nodes: Sequence[Sequence[int] | set[int]],
    loads: Sequence[float],
    speeds: Sequence[float] | None = None,
) -> list[float]:
    """Return the time of each node of one layer, whose copies share loads by `speeds`."""
    speeds = speeds or (1.0,) * len(nodes)
    found = node_loads(nodes, loads, speeds)
    return [load / speed for load, speed in zip(found, speeds, strict=True)]


def replicate(loads: Sequence[float], *, num_slots: int, max_copies: int) -> list[int]:
    """Return the number of copies of each expert, `num_slots` in all.

    Each further copy goes to the expert with the highest load per copy; equal ones in turn.
    No expert gets more than `max_copies`, so some slots may stay unused.
    """
    num_experts = len(loads)
    assert num_experts <= num_slots, "every expert needs a slot"
    copies = [1] * num_experts
    queue = [(-load, 1, expert) for expert, load in enumerate(loads)]
    heapify(queue)
    for _ in range(min(num_slots, num_experts * max_copies) - num_experts):
        expert = queue[0][2]
        while copies[expert] == max_copies:
            heapreplace(queue, (float("inf"), 0, expert))
            expert = queue[0][2]
        copies[expert] += 1
        heapreplace(queue, (-loads[expert] / copies[expert], copies[expert], expert))
    return copies


def pack(
    loads: Sequence[float],
    copies: Sequence[int],
    capacities: Sequence[int],
    speeds: Sequence[float] | None = None,
) -> Bins:
    """Place `copies` of each expert: the heaviest first, where it is done first, if there is room.

    A copy counts as an equal part of its expert's load here, on a node of any speed.

    A node never gets two copies of one expert. If capacities leave no node for a last copy,
    another copy makes room; if that is impossible, another expert gets the slot.
    """
    speeds = speeds or (1.0,) * len(capacities)
    bins: Bins = [set() for _ in capacities]
    filled = [0.0] * len(capacities)
    shares = [load / count for load, count in zip(loads, copies, strict=True)]
    order = sorted(range(len(loads)), key=lambda expert: (-shares[expert], expert))
    for expert in order:
        for _ in range(copies[expert]):
            open_nodes = [
                node
                for node, held in enumerate(bins)
                if len(held) < capacities[node] and expert not in held
            ]
            if not open_nodes:
                _make_place(bins, expert, loads, capacities)
                filled = [
                    sum(shares[other] for other in held) / speed
                    for held, speed in zip(bins, speeds, strict=True)
                ]
                continue
            ends = {node: filled[node] + shares[expert] / speeds[node] for node in open_nodes}
            # Rounding makes ends equal of times that are not.
            node = min(open_nodes, key=lambda node: (ends[node], filled[node], node))
            bins[node].add(expert)
            filled[node] = ends[node]
    return bins


def _make_place(bins: Bins, expert: int, loads: Sequence[float], capacities: Sequence[int]) -> None:
    """Place a copy of `expert` although every node with room holds one already."""
    room = next(node for node, held in enumerate(bins) if len(held) < capacities[node])
    for held in bins:
        movable = held - bins[room]
        if expert not in held and movable:
            moved = min(movable, key=lambda other: (loads[other], other))
            held.remove(moved)
            held.add(expert)
            bins[room].add(moved)
            return
    # Every node without `expert` holds only experts of `room`: the copy cannot be placed.
    others = [other for other in range(len(loads)) if other not in bins[room]]
    if others:
        bins[room].add(max(others, key=lambda other: (loads[other], -other)))


def refine(bins: Bins, loads: Sequence[float], speeds: Sequence[float] | None = None) -> Bins:
    """Return `bins` after changes of one or two experts that lower the busiest node's time.

    The busiest node exchanges an expert with another node or, where that does not help, a
    spare copy of an expert is replaced by a copy of another. Sizes do not change. Each
    change is the best of its kind; the function ends when none helps.
    """
    state = _Refinement([set(held) for held in bins], loads, speeds or (1.0,) * len(bins))
    for _ in range(MAX_CHANGES_PER_NODE * len(bins)):
        change = state.best_exchange() or state.best_substitution()
        if change is None:
            break
        state.make(change)
    return state.bins


@dataclass(frozen=True, slots=True)
class _Change:
    """`node` drops one expert for another; if `partner` is a node, it does the opposite.

    `peak` is the longest time after the change among the nodes whose time changes.
    """

    peak: float
    node: int
    dropped: int
    added: int
    partner: int | None = None


class _Refinement:
    """A placement in progress. Invariant: `_copies`, `_weights`, `_filled`, `_hot` are its own.

    `_weights` are the sums of the speeds of each expert's nodes: a copy adds the time load / weight
    to its node, whichever that is.
    """

    def __init__(self, bins: Bins, loads: Sequence[float], speeds: Sequence[float]) -> None:
        self.bins = bins
        self._loads = loads
        self._speeds = speeds
        self._count()

    def _count(self) -> None:
        self._copies = [0] * len(self._loads)
        self._weights = [0.0] * len(self._loads)
        for held, speed in zip(self.bins, self._speeds, strict=True):
            for expert in held:
                self._copies[expert] += 1
                self._weights[expert] += speed
        self._shares = [
            load / (weight or 1.0) for load, weight in zip(self._loads, self._weights, strict=True)
        ]
        self._filled = [sum(self._shares[expert] for expert in held) for held in self.bins]
        self._hot = max(range(len(self.bins)), key=lambda node: (self._filled[node], -node))
        mean = sum(self._filled) / len(self._filled)
        self._limit = self._filled[self._hot] - MIN_STEP * mean

    def make(self, change: _Change) -> None:
        """Carry out a change."""
        self.bins[change.node].remove(change.dropped)
        self.bins[change.node].add(change.added)
        if change.partner is not None:
            self.bins[change.partner].remove(change.added)
            self.bins[change.partner].add(change.dropped)
        self._count()

    def best_exchange(self) -> _Change | None:
        """Return the best exchange between the hot node and another, None if none helps.

        With unequal speeds it also changes the times of third nodes with copies of the two experts,
        which are not looked at: the caller compares whole placements.
        """
        best: _Change | None = None
        hot, shares, filled = self.bins[self._hot], self._shares, self._filled
        for node, held in enumerate(self.bins):
            if filled[node] >= self._limit:
                continue
            here = sorted((shares[expert], expert) for expert in held - hot)
            if not here:
                continue
            ratio = self._speeds[node] / self._speeds[self._hot]
            excess = filled[self._hot] - filled[node]
            for given in sorted(hot - held):
                there = self._share_at(given, self._hot, node)
                # Taken for it, an expert of this time makes both nodes' times equal.
                wanted = (shares[given] + there - excess) / (1 + ratio)
                at = bisect_left(here, (wanted, -1))
                for share, taken in here[max(0, at - 1) : at + 1]:
                    lost = shares[given] - self._share_at(taken, node, self._hot)
                    gained = there - share
                    peak = max(filled[self._hot] - lost, filled[node] + gained)
                    if peak < (self._limit if best is None else best.peak):
                        best = _Change(peak, self._hot, given, taken, partner=node)
        return best

    def _share_at(self, expert: int, old: int, new: int) -> float:
        """Return the time that an expert's copy on node `old` would add to node `new`."""
        return self._loads[expert] / (self._weights[expert] - self._speeds[old] + self._speeds[new])

    def best_substitution(self) -> _Change | None:
        """Return the best way to give a spare copy's slot to another expert.

        Either the hot node drops a copy, or another node takes a copy of one of its experts;
        otherwise the hot node's time would not fall.
        """
        best: _Change | None = None
        hot = self.bins[self._hot]
        for node, held in enumerate(self.bins):
            spare = sorted(expert for expert in held if self._copies[expert] > 1)
            if node == self._hot:
                added = [expert for expert in range(len(self._loads)) if expert not in held]
            else:
                added = sorted(hot - held)
            for old in spare:
                for new in added:
                    peak = self._peak_after(node, old, new)
                    if peak < (self._limit if best is None else best.peak):
                        best = _Change(peak, node, old, new)
        return best

    def _peak_after(self, node: int, dropped: int, added: int) -> float:
        """Return the longest changed time if `node` held `added` instead of `dropped`."""
        loads, weights, shares = self._loads, self._weights, self._shares
        speed = self._speeds[node]
        raised = loads[dropped] / (weights[dropped] - speed)
        lowered = loads[added] / (weights[added] + speed)
        peak = self._filled[node] - shares[dropped] + lowered
        for other, held in enumerate(self.bins):
            if other == node or not (other == self._hot or dropped in held or added in held):
                continue
            load = self._filled[other]
            if dropped in held:
                load += raised - shares[dropped]
            if added in held:
                load += lowered - shares[added]
            peak = max(peak, load)
        return peak


def place_global(
    loads: Sequence[float], capacities: Sequence[int], speeds: Sequence[float] | None = None
) -> Bins:
    """Return a placement over nodes with `capacities` slots each.

    Raises AssertionError if they cannot hold every expert once.
    """
    assert max(capacities) <= len(loads), "more slots on a node than there are experts"
    num_nodes = sum(capacity > 0 for capacity in capacities)
    copies = replicate(loads, num_slots=sum(capacities), max_copies=num_nodes)
    return refine(pack(loads, copies, capacities, speeds), loads, speeds)


def place_hierarchical(
    loads: Sequence[float],
    capacities: Sequence[int],
    *,
    num_groups: int,
    hosts: Sequence[Sequence[int]],
    speeds: Sequence[float] | None = None,
) -> Bins:
    """Return a placement that keeps each expert group on one host.

    Groups are runs of equal length; `hosts` lists the nodes of each host. Each host gets
    equally many groups, then experts are replicated and packed within the host. If that is
    impossible (the groups do not divide, or do not fit a host's slots), the placement is the
    global one.
    """
    num_experts = len(loads)
    size = num_experts // num_groups
    groups_per_host = num_groups // len(hosts)
    slots = [sum(capacities[node] for node in nodes) for nodes in hosts]
    fits = all(
        groups_per_host * size <= count
        and all(capacities[node] <= groups_per_host * size for node in nodes)
        for nodes, count in zip(hosts, slots, strict=True)
    )
    if num_experts % num_groups or num_groups % len(hosts) or not fits:
        return place_global(loads, capacities, speeds)
    ends = accumulate([size] * num_groups, initial=0)
    groups = [range(low, high) for low, high in pairwise(ends)]
    group_loads = [sum(loads[expert] for expert in group) for group in groups]
    ones = [1] * num_groups
    speeds = speeds or (1.0,) * len(capacities)
    of_hosts = [sum(speeds[node] for node in nodes) / len(nodes) for nodes in hosts]
    packed = pack(group_loads, ones, [groups_per_host] * len(hosts), of_hosts)
    chosen = refine(packed, group_loads, of_hosts)
    bins: Bins = [set() for _ in capacities]
    for nodes, held in zip(hosts, chosen, strict=True):
        experts = [expert for group in sorted(held) for expert in groups[group]]
        local = place_global(
            [loads[expert] for expert in experts],
            [capacities[node] for node in nodes],
            [speeds[node] for node in nodes],
        )
        for node, found in zip(nodes, local, strict=True):
            bins[node] = {experts[idx] for idx in found}
    return bins
