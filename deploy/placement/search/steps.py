"""The seconds of a step of a planned engine, fast enough to be asked for a hundred thousand times.

Owns the assembly of a step from the cost model's parts (deploy.placement.cost): the rows of each
node, the slowest of them, the link, the pipeline. Keeps every part that was asked for once. Called
by deploy.placement.search.rating.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from deploy.placement.cost import (
    BatchRows,
    attention_layer_s,
    barrier_s,
    chain_s,
    experts_layer_s,
    link_s,
    step_fixed_s,
)
from deploy.placement.devices import LinkProfile
from deploy.placement.formats import Formats, LayerClass
from deploy.placement.routing import rows_reached, shares_of_nodes, touched
from deploy.placement.search.layouts import DeviceSlot, DeviceSlots, EngineLayout
from deploy.placement.search.ranges import Ends
from deploy.placement.search.steady import Chunks
from deploy.placement.shapes import ModelShape
from deploy.placement.tables import RallyFactors, rally_factors
from deploy.placement.workload import Workload
from topspin.pipeline import HopTimes, layers_s, pipeline_s
from topspin.plan.precision import Format

NO_LINK = LinkProfile(name="local", alpha_s=0.0, bytes_per_s=1e18)
NO_FACTORS = RallyFactors()
PAIR_BYTES = 8


@dataclass(frozen=True)
class EngineSetup:
    """All that is decided of an engine.

    `held[i]`: the experts of a node on layout.experts[i]; `weights[i]`: the share of all
    sequences that a node on layout.attention[i] has. `kv_itemsize` None: keys have the model's
    dtype. The first `num_local` MoE layers keep their routed experts on the attention nodes,
    always. `ends`: where the layer ranges of layout.chain end (deploy.placement.search.ranges);
    (): layers are not cut.
    """

    layout: EngineLayout
    formats: Formats
    held: tuple[int, ...]
    weights: tuple[float, ...]
    micro_batches: int
    batched_tokens: int
    kv_itemsize: int | None = None
    num_local: int = 0
    ends: Ends = ()

    @property
    def local_layers(self) -> tuple[int, ...]:
        """Return the decoder layers whose routed experts are on the attention nodes."""
        return self.formats.model.moe_layers[: self.num_local]


class StepEstimate(NamedTuple):
    """A step's times: those of the slowest layer and micro-batch, and the whole."""

    micro_batches: int
    rows: float
    hop: HopTimes
    step_s: float
    attention_s: float
    experts_s: float
    link_s: float
    """The shares of all layers, as if nothing overlapped."""
    fixed_s: float
    card_s: float = 0.0
    """Of one way, for which the busiest card of a host sends or takes the rows of all layers."""


class Clock:
    """The times of a model's layers under a workload, each asked for once."""

    def __init__(self, model: ModelShape, workload: Workload) -> None:
        self.model = model
        self.skew = workload.expert_skew
        prompt, output = workload.prompt, workload.output
        self.prompt, self.output = prompt.average, output.average
        # Long answers are met more often among those that run.
        self.context = prompt.average + output.average * output.squared / 2
        variance = prompt.average**2 * (prompt.squared - 1)
        variance += output.average**2 * output.squared / 3
        self.variation = math.sqrt(max(0.0, variance)) / self.context
        self._known: dict[tuple[object, ...], float] = {}

    def _once(self, key: tuple[object, ...], compute: Callable[[], float]) -> float:
        """Return what belongs to the key, computed the first time."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = compute()
        return found

    def attention_s(self, slot: DeviceSlot, cls: LayerClass, rows: BatchRows) -> float:
        """Return the time of a layer on an attention node, without routed experts."""
        device, formats = slot.device, cls.formats
        return self._once(
            ("attention", slot, self.model.layers[cls.layer], formats[:2], rows),
            lambda: (
                device.slow
                * attention_layer_s(
                    device.profile,
                    self.model,
                    cls.layer,
                    lambda part, _: formats.attention if part == "attention" else formats.mlp,
                    rows,
                    threads=max(1, slot.threads),
                )
            ),
        )

    def experts_s(
        self, slot: DeviceSlot, cls: LayerClass, chosen: tuple[float, ...], rows: float
    ) -> float:
        """Return the time of a layer on an expert node whose experts are `chosen` so often."""
        return self._once(
            ("experts", slot, cls.formats.experts, chosen, rows),
            lambda: (
                slot.device.slow
                * experts_layer_s(
                    slot.device.profile,
                    self.model,
                    cls.layer,
                    cls.formats.experts,
                    rows=self.reached(chosen, rows),
                    pairs=rows * math.fsum(chosen),
                    touched=touched(chosen, rows),
                    threads=max(1, slot.threads),
                )
            ),
        )

    def reached(self, chosen: tuple[float, ...], rows: float) -> float:
        """Return how many of `rows` choose one of these experts."""
        return self._once(("reached", chosen, rows), lambda: rows_reached(chosen, rows))

    def fixed_s(self, slot: DeviceSlot, head: Format, rows: float) -> float:
        """Return the time outside the layers on an attention node that samples `rows` tokens."""
        device = slot.device
        return self._once(
            ("fixed", slot, head, rows),
            lambda: (
                device.slow
                * step_fixed_s(device.profile, self.model, head, rows, threads=max(1, slot.threads))
            ),
        )

    def row_bytes(self) -> float:
        """Return the bytes of a row on the wire, the mean of both ways."""
        there = self.model.hidden_size * self.model.itemsize + self.model.top_k * PAIR_BYTES
        return (there + self.model.hidden_size * self.model.itemsize) / 2


@lru_cache(maxsize=4096)
def node_shares(
    num_experts: int, top_k: int, held: tuple[int, ...], skew: float
) -> tuple[tuple[float, ...], ...]:
    """Return how often each expert of each node is chosen, the nodes in their order."""
    if not skew:
        return tuple((top_k / num_experts,) * count for count in held)
    return tuple(map(tuple, shares_of_nodes(num_experts, top_k, list(held), skew)))


@lru_cache(maxsize=256)
def highest_of(count: int) -> float:
    """Return the expected highest of `count` standard normal numbers."""
    return barrier_s([(0.0, 1.0)] * count)


class EngineSteps:
    """The steps of one engine (deploy.placement.search.steady.StepModel)."""

    def __init__(self, engine: EngineSetup, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        layout, model = engine.layout, clock.model
        counts = [count for _, count in layout.experts]
        held = tuple(
            each for each, count in zip(engine.held, counts, strict=True) for _ in range(count)
        )
        shares = node_shares(model.num_experts, model.top_k, held, clock.skew) if held else ()
        slots = [slot for slot, count in layout.experts for _ in range(count)]
        # Nodes with equal shares on like slots take equal times.
        self._experts = tuple(dict.fromkeys(zip(slots, shares, strict=True)))
        self._shares = Counter(shares)
        self._known: dict[tuple[int, float, Chunks | None], float] = {}
        local = frozenset(engine.local_layers)
        # Without ranges every layer is on all attention nodes.
        self._holders = (
            [((slot, 1),) for slot in layout.chain] if engine.ends else [layout.attention]
        )
        kinds = [
            (engine.formats.classes[idx], layer in local, bisect_right(engine.ends[:-1], layer))
            for layer, idx in enumerate(engine.formats.class_of)
        ]
        self._kinds = Counter(kinds)
        places = {kind: idx for idx, kind in enumerate(self._kinds)}
        self._kind_of = tuple(places[kind] for kind in kinds)
        self._num_attention = layout.num_attention
        slots = [slot for slot, _ in (*layout.holders, *layout.experts)]
        self._is_rallied = not layout.is_colocated and any(s.device.profile.rallies for s in slots)
        self._link = NO_LINK if layout.link is None else layout.link.link

    def with_settings(self, engine: EngineSetup) -> EngineSteps:
        """Return the steps of an engine that differs in its settings only; they share what is kept.

        Settings: micro-batches, tokens per step, the bytes of keys.
        """
        other = copy.copy(self)
        other.engine = engine
        return other

    def step_s(self, running: float, chunks: Chunks | None) -> float:
        """Return the time of a step."""
        key = (self._micro_batches(running, chunks), running, chunks)
        if key not in self._known:
            self._known[key] = self.step(running, chunks).step_s
        return self._known[key]

    def step(self, running: float, chunks: Chunks | None) -> StepEstimate:
        """Return a step's times."""
        engine, clock = self.engine, self.clock
        m = self._micro_batches(running, chunks)
        per_node: list[BatchRows] = []
        fixed_s = 0.0
        for (slot, _), weight in zip(engine.layout.attention, engine.weights, strict=True):
            tokens = 0.0 if chunks is None else chunks.tokens
            per_node.append(
                BatchRows(
                    running * weight / m,
                    clock.context,
                    tokens / m,
                    0.0 if chunks is None else chunks.start,
                )
            )
            sampled = running * weight + (0.0 if chunks is None else chunks.slices)
            fixed_s = max(fixed_s, clock.fixed_s(slot, engine.formats.head, sampled))
        rows = running if chunks is None else running + chunks.replicas * chunks.tokens
        widest = max(each.total for each in per_node)
        hops = [
            self._hop(cls, self._holders[part], per_node, rows / m, widest, m, is_local=is_local)
            for cls, is_local, part in self._kinds
        ]
        shares = [
            sum(count * hop[side] for count, hop in zip(self._kinds.values(), hops, strict=True))
            for side in range(4)
        ]
        rallied = 1.0
        if self._is_rallied:
            rallied = max(
                self._factor(slot, m, own.total).step
                for holders in self._holders
                for (slot, _), own in zip(holders, per_node, strict=True)
            )
        pass_s = link_s(self._link, widest * clock.model.hidden_size * clock.model.itemsize)
        whole_s = rallied * (fixed_s + self._layers_s(hops, m, pass_s))
        slowest = max(hops, key=lambda hop: hop.t_a + hop.t_e + 2 * hop.t_c)
        return StepEstimate(
            m,
            rows,
            slowest,
            whole_s,
            m * shares[0],
            m * shares[1],
            shares[2],
            fixed_s,
            m * shares[3],
        )

    def _micro_batches(self, running: float, chunks: Chunks | None) -> int:
        """Return into how many micro-batches a step's rows can be split, of those of the engine."""
        num_attention = self._num_attention
        slices = running / num_attention
        if chunks is not None:
            slices = chunks.slices if chunks.replicas == num_attention else 1.0
        return max(1, min(self.engine.micro_batches, int(slices + 1e-9)))

    def _layers_s(self, hops: Sequence[HopTimes], m: int, pass_s: float) -> float:
        turns, ends = self.engine.layout.takes_turns, self.engine.ends
        if ends:
            layers = [hops[idx] for idx in self._kind_of]
            return chain_s(layers, ends, num_micro_batches=m, pass_s=pass_s)
        if len(hops) == 1:
            return pipeline_s(
                hops[0], num_micro_batches=m, num_layers=len(self._kind_of), shares_cores=turns
            )
        layers = [hops[idx] for idx in self._kind_of]
        return layers_s(layers, num_micro_batches=m, shares_cores=turns)

    def _hop(
        self,
        cls: LayerClass,
        holders: DeviceSlots,
        per_node: Sequence[BatchRows],
        rows: float,
        widest: float,
        m: int,
        *,
        is_local: bool,
    ) -> HopTimes:
        """Return a layer's times, of the slowest node of each role."""
        layout, clock = self.engine.layout, self.clock
        t_a = 0.0
        for (slot, count), own in zip(holders, per_node, strict=True):
            mean_s = clock.attention_s(slot, cls, own)
            if count > 1 and own.decode and clock.variation:
                spread = clock.variation / math.sqrt(max(1.0, own.decode))
                wider = own._replace(context=own.context * (1 + spread))
                mean_s += highest_of(count) * max(0.0, clock.attention_s(slot, cls, wider) - mean_s)
            t_a = max(t_a, self._factor(slot, m, own.total).attention * mean_s)
        if not clock.model.layers[cls.layer].is_moe or not layout.experts:
            return HopTimes(t_a, 0.0, 0.0)
        if is_local:
            return HopTimes(t_a + self._local_s(cls, per_node), 0.0, 0.0)
        t_e = 0.0
        for slot, chosen in self._experts:
            t_e = max(
                t_e, self._factor(slot, m, rows).experts * clock.experts_s(slot, cls, chosen, rows)
            )
        if layout.is_colocated:
            return HopTimes(t_a + t_e, 0.0, 0.0)
        if layout.kind == "one_process":
            return HopTimes(t_a, t_e, 0.0)
        row_bytes = clock.row_bytes()
        sent = row_bytes * sum(
            count * clock.reached(chosen, widest) for chosen, count in self._shares.items()
        )
        taken = max(clock.reached(chosen, rows) for _, chosen in self._experts) * row_bytes
        if not layout.spans:
            return HopTimes(t_a, t_e, link_s(self._link, max(sent, taken)))
        # The nodes of a host share its card.
        near, far = layout.spans
        card_s = max(near.num_nodes * sent, far.num_nodes * taken) / self._link.bytes_per_s
        return HopTimes(t_a, t_e, self._link.alpha_s + card_s, card_s)

    def _factor(self, slot: DeviceSlot, m: int, rows: float) -> RallyFactors:
        if not self._is_rallied:
            return NO_FACTORS
        return rally_factors(
            slot.device.profile,
            shares_cores=self.engine.layout.takes_turns,
            micro_batches=m,
            rows=rows,
        )

    def _local_s(self, cls: LayerClass, per_node: Sequence[BatchRows]) -> float:
        """Return the time of routed experts that an attention node computes by itself."""
        model = self.clock.model
        held = (model.num_experts,)
        everyone = node_shares(model.num_experts, model.top_k, held, self.clock.skew)
        return max(
            self.clock.experts_s(slot, cls, everyone[0], own.total)
            for (slot, _), own in zip(self.engine.layout.attention, per_node, strict=True)
        )
