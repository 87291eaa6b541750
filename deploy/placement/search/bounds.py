"""Loads that an engine over hosts does not exceed, and times that it does not undercut.

Owns the bounds by which the search leaves engines unrated. They are of sums that every setting
keeps: each side and each card must get through all rows, keys must have room, a step takes at least
a round trip per layer. A layer's time is taken to grow no faster than its rows, as rooflines do;
devices whose factors in a rally were measured have no bound. Called by
deploy.placement.search.search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from deploy.placement.cost import BatchRows
from deploy.placement.formats import Formats
from deploy.placement.search.layouts import MOST_NODES, DeviceSlot, EngineLayout
from deploy.placement.search.nodes import MAX_SEQUENCES, Binding
from deploy.placement.search.rating import Rater, budgets_of
from deploy.placement.search.steps import EngineSetup, node_shares
from deploy.placement.workload import Z95
from topspin.plan.settings import MAX_MICRO_BATCHES

MANY_ROWS = 1e6
"""So many that a layer's weights take no time of a row's."""
FEW_ROWS = 1e-6
HALVINGS = 30


class _Nodes(NamedTuple):
    """An engine over hosts, as the bounds see it.

    `chosen`: how often each expert of a node is chosen, which no busier node has less of. `room`:
    tokens of keys on an attention node. `remote`: the share of MoE layers whose rows travel at
    least.
    """

    layout: EngineLayout
    formats: Formats
    attention: DeviceSlot
    experts: DeviceSlot
    chosen: tuple[float, ...]
    room: int
    remote: float

    @property
    def are_rallied(self) -> bool:
        """Say whether their times in a rally were measured, so that no bound holds."""
        return any(slot.device.profile.rallies for slot in (self.attention, self.experts))


class LoadBounds:
    """The bounds of engines over hosts of one model and workload."""

    def __init__(self, rater: Rater) -> None:
        self._rater = rater
        self._clock, self._workload = rater.clock, rater.workload
        self._decoded = self._workload.output.average - 1
        self._num_moe = len(rater.model.moe_layers)
        self._rooms: dict[tuple[DeviceSlot, Formats], tuple[int, float] | None] = {}
        self._most: dict[tuple[object, ...], float] = {}

    def most_load(self, layout: EngineLayout, formats: Formats) -> float:
        """Return a load, in the workload's terms, that the engine does not exceed; 0: it has none.

        With n sequences and the prompts that come for each of their tokens a step takes g(n) at
        least, so that n / ((o - 1) g(n)) requests end per second, which grows with n.
        """
        nodes = self._nodes(layout, formats)
        if nodes is None:
            return 0.0
        if nodes.are_rallied:
            return math.inf
        running = self._most_running(nodes)
        if running <= 0:
            return 0.0
        rate = running / (self._decoded * self._step_s(nodes, running))
        if self._workload.arrival_rate is not None:
            return rate
        waits_s = self._workload.targets.ttft_s
        return math.inf if waits_s is None else running + rate * waits_s

    def least_answer_s(self, layout: EngineLayout, formats: Formats) -> float:
        """Return a time that an answer takes at least."""
        nodes = self._nodes(layout, formats)
        if nodes is None:
            return math.inf
        return 0.0 if nodes.are_rallied else self._decoded * self._step_s(nodes, FEW_ROWS)

    def _nodes(self, layout: EngineLayout, formats: Formats) -> _Nodes | None:
        """Return the nodes of an engine; None: it does not fit, whatever its settings."""
        contents, model = self._rater.nodes, self._rater.model
        budgets = budgets_of(layout)
        held = contents.shares(layout, formats, budgets[-1])
        if held is None or contents.kernels_misfit(layout) is not None:
            return None
        ((attention, num_attention),), ((experts, num_experts),) = layout.attention, layout.experts
        key = (attention, formats)
        if key not in self._rooms:
            # Keys have most room with the least tokens per step.
            itemsize = 1 if self._rater.may_have_fp8(layout) else None
            weights = (1.0 / num_attention,)
            least = EngineSetup(layout, formats, held, weights, 1, budgets[0], itemsize)
            room = contents.room(least)
            self._rooms[key] = None
            if not isinstance(room, Binding):
                local = contents.most_local(layout, formats, room)
                self._rooms[key] = room[0], 1.0 - local / self._num_moe
        found = self._rooms[key]
        if found is None:
            return None
        shares = node_shares(
            model.num_experts, model.top_k, held * num_experts, self._workload.expert_skew
        )
        return _Nodes(layout, formats, attention, experts, max(shares, key=math.fsum), *found)

    def _most_running(self, nodes: _Nodes) -> float:
        """Return more sequences than run at once within memory and the TPOT."""
        layout, targets = nodes.layout, self._workload.targets
        highest = min(nodes.room / self._clock.context, MAX_SEQUENCES) * layout.num_attention
        is_open = self._workload.arrival_rate is not None
        if targets.tpot_s is None:
            return _mean_of(highest) if is_open else highest
        if is_open and targets.percentile == "p95":
            highest = min(highest, self._within(nodes, targets.tpot_s, prompts=0.0))
        running = _mean_of(highest) if is_open else highest
        prompts = self._workload.prompt.average / self._decoded
        return min(running, self._within(nodes, targets.tpot_s, prompts=prompts))

    def _within(self, nodes: _Nodes, step_s: float, *, prompts: float) -> float:
        """Return the most sequences that each side serves in so long, with `prompts` for each."""
        layout, formats = nodes.layout, nodes.formats
        one = (nodes.attention, formats, prompts)
        all_of = (nodes.experts, layout.num_experts, nodes.remote, formats, prompts)
        if one not in self._most:
            self._most[one] = _largest(
                MAX_SEQUENCES, lambda n: self._attention_s(nodes, n, prompts * n) <= step_s
            )
        if all_of not in self._most:
            self._most[all_of] = _largest(
                MAX_SEQUENCES * MOST_NODES,
                lambda n: nodes.remote * self._experts_s(nodes, n, prompts * n) <= step_s,
            )
        return min(self._most[one] * layout.num_attention, self._most[all_of])

    def _step_s(self, nodes: _Nodes, running: float) -> float:
        """Return what a step takes at least, on average with the prompts that come meanwhile."""
        num_attention = nodes.layout.num_attention
        prompts = running * self._workload.prompt.average / self._decoded
        own_s = self._attention_s(nodes, running / num_attention, prompts / num_attention)
        hops_s = max(
            self._experts_s(nodes, running, prompts), self._card_s(nodes, running + prompts)
        )
        busy_s = max(own_s, nodes.remote * hops_s)
        if own_s < hops_s and nodes.remote < 1:
            # As many layers are local as make both sides equal.
            local_s = self._local_s(nodes, running / num_attention)
            share = min(1.0 - nodes.remote, (hops_s - own_s) / (hops_s + local_s))
            busy_s = max(own_s + share * local_s, (1.0 - share) * hops_s)
        least = running / MAX_MICRO_BATCHES
        trip_s = self._experts_s(nodes, least, 0.0) + 2 * self._card_s(nodes, least)
        link = nodes.layout.link
        assert link is not None
        trip_s += 2 * self._num_moe * link.link.alpha_s
        return max(
            busy_s,
            self._attention_s(nodes, least / num_attention, 0.0) + nodes.remote * trip_s,
        )

    def _attention_s(self, nodes: _Nodes, rows: float, prompts: float) -> float:
        """Return the seconds of an attention node; prompts' keys are not counted."""
        slot, formats, clock = nodes.attention, nodes.formats, self._clock
        plain, alone = BatchRows(rows, clock.context), BatchRows(rows)
        every = BatchRows(rows + (0.0 if slot.device.profile.tables else prompts))
        layers_s = sum(
            cls.num_layers
            * (
                clock.attention_s(slot, cls, every)
                + clock.attention_s(slot, cls, plain)
                - clock.attention_s(slot, cls, alone)
            )
            for cls in formats.classes
        )
        return layers_s + clock.fixed_s(slot, formats.head, rows)

    def _experts_s(self, nodes: _Nodes, rows: float, prompts: float) -> float:
        """Return the seconds of the busiest expert node: its weights once, and every row."""
        own_s = self._layers_s(nodes, nodes.experts, nodes.chosen, rows)
        if nodes.experts.device.profile.tables:
            return own_s
        many_s = self._layers_s(nodes, nodes.experts, nodes.chosen, MANY_ROWS)
        return max(own_s, 0.999 * many_s * (rows + prompts) / MANY_ROWS)

    def _local_s(self, nodes: _Nodes, rows: float) -> float:
        """Return the seconds of all layers' experts on an attention node."""
        model, skew = self._rater.model, self._workload.expert_skew
        every = node_shares(model.num_experts, model.top_k, (model.num_experts,), skew)
        return self._layers_s(nodes, nodes.attention, every[0], rows)

    def _layers_s(
        self, nodes: _Nodes, slot: DeviceSlot, chosen: tuple[float, ...], rows: float
    ) -> float:
        return sum(
            cls.num_layers * self._clock.experts_s(slot, cls, chosen, rows)
            for cls in nodes.formats.classes
            if self._rater.model.layers[cls.layer].is_moe
        )

    def _card_s(self, nodes: _Nodes, rows: float) -> float:
        """Return the seconds for which the busiest card has rows to send or to take, one way."""
        near, far = nodes.layout.spans
        link = nodes.layout.link
        assert link is not None
        taken = far.num_nodes * self._clock.reached(nodes.chosen, rows)
        row_bytes = self._clock.row_bytes() * self._num_moe
        # Of nodes with unequal experts only the busiest is known here.
        num_experts = 1 if self._workload.expert_skew else nodes.layout.num_experts
        own = rows / nodes.layout.num_attention
        sent = near.num_nodes * num_experts * self._clock.reached(nodes.chosen, own)
        return max(sent, taken) * row_bytes / link.link.bytes_per_s


def _mean_of(high: float) -> float:
    """Return the mean of a Poisson number with the p95 `high`."""
    return ((math.sqrt(Z95**2 + 4 * high) - Z95) / 2) ** 2


def _largest(limit: float, fits: Callable[[float], bool]) -> float:
    """Return the least number within a part in 2^HALVINGS of `limit` above all that fit."""
    if fits(limit):
        return limit
    low, high = 0.0, limit
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high
