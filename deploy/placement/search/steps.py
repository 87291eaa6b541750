"""The seconds of a step of a planned engine, fast enough to be asked for a hundred thousand times.

Owns the assembly of a step from the cost model's parts (deploy.placement.cost): the rows of each
node, the slowest of them, the link, the pipeline. Keeps every part that was asked for once, and
what does not change with the rows. Called by deploy.placement.search.rating.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from deploy.placement.cost import (
    AttentionLayer,
    BatchRows,
    ExpertLayer,
    StepEnds,
    barrier_s,
    chain_s,
    link_s,
)
from deploy.placement.devices import LinkProfile
from deploy.placement.formats import Formats, LayerClass
from deploy.placement.routing import rows_reached, shares_of_nodes, touched
from deploy.placement.search.layouts import DeviceSlot, EngineLayout
from deploy.placement.search.ranges import Ends
from deploy.placement.search.steady import Chunks
from deploy.placement.shapes import ModelShape
from deploy.placement.tables import RallyFactors, rally_factors
from deploy.placement.workload import Workload
from topspin.pipeline import HopTimes, layers_s, pipeline_s
from topspin.plan.precision import Format

NO_LINK = LinkProfile(name="local", alpha_s=0.0, bytes_per_s=1e18)
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
        self._known: dict[tuple[object, ...], Callable[[Any], float]] = {}

    def _once(
        self, key: tuple[object, ...], make: Callable[[], Callable[[Any], float]]
    ) -> Callable[[Any], float]:
        """Return what computes the times of a key, each once; made the first time."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = cache(make())
        return found

    def attention(self, slot: DeviceSlot, cls: LayerClass) -> Callable[[BatchRows], float]:
        """Return what gives the time of a layer on an attention node, without routed experts."""
        formats = cls.formats

        def make() -> Callable[[BatchRows], float]:
            layer = AttentionLayer(
                slot.device.profile,
                self.model,
                cls.layer,
                lambda part, _: formats.attention if part == "attention" else formats.mlp,
                threads=max(1, slot.threads),
            )
            return lambda rows: slot.device.slow * layer.seconds(rows)

        key = (slot, self.model.layers[cls.layer], formats.attention, formats.mlp)
        return self._once(("attention", *key), make)

    def attention_s(self, slot: DeviceSlot, cls: LayerClass, rows: BatchRows) -> float:
        """Return the time of a layer on an attention node, without routed experts."""
        return self.attention(slot, cls)(rows)

    def experts(
        self, slot: DeviceSlot, cls: LayerClass, chosen: tuple[float, ...]
    ) -> Callable[[float], float]:
        """Return what gives experts_s() by the number of rows."""

        def make() -> Callable[[float], float]:
            layer = ExpertLayer(
                slot.device.profile,
                self.model,
                cls.layer,
                cls.formats.experts,
                threads=max(1, slot.threads),
            )
            reached, per_row = self.reached_of(chosen), math.fsum(chosen)
            return lambda rows: (
                slot.device.slow
                * layer.seconds(
                    rows=reached(rows), pairs=rows * per_row, touched=touched(chosen, rows)
                )
            )

        return self._once(("experts", slot, cls.formats.experts, chosen), make)

    def experts_s(
        self, slot: DeviceSlot, cls: LayerClass, chosen: tuple[float, ...], rows: float
    ) -> float:
        """Return the time of a layer on an expert node whose experts are `chosen` so often."""
        return self.experts(slot, cls, chosen)(rows)

    def reached_of(self, chosen: tuple[float, ...]) -> Callable[[float], float]:
        """Return what gives reached() by the number of rows."""
        # It is in proportion to them.
        share = rows_reached(chosen, 1.0)
        return lambda rows: rows * share

    def reached(self, chosen: tuple[float, ...], rows: float) -> float:
        """Return how many of `rows` choose one of these experts."""
        return self._once(("reached", chosen), lambda: self.reached_of(chosen))(rows)

    def ends(self, slot: DeviceSlot, head: Format) -> Callable[[float], float]:
        """Return what gives fixed_s() by the number of rows."""

        def make() -> Callable[[float], float]:
            threads = max(1, slot.threads)
            ends = StepEnds(slot.device.profile, self.model, head, threads=threads)
            return lambda rows: slot.device.slow * ends.seconds(rows)

        return self._once(("ends", slot, head), make)

    def fixed_s(self, slot: DeviceSlot, head: Format, rows: float) -> float:
        """Return the time outside the layers on an attention node that samples `rows` tokens."""
        return self.ends(slot, head)(rows)

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


class _LayerKind(NamedTuple):
    """What gives the times of layers of one kind, by rows.

    `halves`: of each attention group its slot, its nodes, and their time. `experts`: of unlike
    expert nodes; empty if the layers have no routed experts, or have them on the attention nodes,
    of whose groups `local` then has the times.
    """

    halves: tuple[tuple[DeviceSlot, int, Callable[[BatchRows], float]], ...]
    experts: tuple[tuple[DeviceSlot, Callable[[float], float]], ...] = ()
    local: tuple[Callable[[float], float], ...] = ()


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
        self._counts = tuple(Counter(kinds).values())
        places = {kind: idx for idx, kind in enumerate(dict.fromkeys(kinds))}
        self._kinds = [self._kind(*each) for each in places]
        self._kind_of = tuple(places[kind] for kind in kinds)
        self._num_attention = layout.num_attention
        self._ends = [clock.ends(slot, engine.formats.head) for slot, _ in layout.attention]
        # The bytes that an attention node sends for each of its rows, that an expert node takes for
        # each of all.
        row_bytes = clock.row_bytes()
        reached = {each: row_bytes * clock.reached(each, 1.0) for each in dict.fromkeys(shares)}
        self._sent = sum(map(reached.__getitem__, shares))
        self._taken = max(reached.values(), default=0.0)
        slots = [slot for slot, _ in (*layout.holders, *layout.experts)]
        self.is_rallied = not layout.is_colocated and any(s.device.profile.rallies for s in slots)
        self._link = NO_LINK if layout.link is None else layout.link.link

    def _kind(self, cls: LayerClass, is_local: bool, part: int) -> _LayerKind:
        clock, model, layout = self.clock, self.clock.model, self.engine.layout
        halves = tuple((slot, n, clock.attention(slot, cls)) for slot, n in self._holders[part])
        if not model.layers[cls.layer].is_moe or not layout.experts:
            return _LayerKind(halves)
        if not is_local:
            each = ((slot, clock.experts(slot, cls, chosen)) for slot, chosen in self._experts)
            return _LayerKind(halves, tuple(each))
        (every,) = node_shares(model.num_experts, model.top_k, (model.num_experts,), clock.skew)
        own = tuple(clock.experts(slot, cls, every) for slot, _ in layout.attention)
        return _LayerKind(halves, local=own)

    def with_settings(self, engine: EngineSetup) -> EngineSteps:
        """Return the steps of an engine that differs in its settings only; they share what is kept.

        Settings: micro-batches, tokens per step, the bytes of keys.
        """
        # A search asks for it so often that copy.copy() is too slow.
        other = EngineSteps.__new__(EngineSteps)
        vars(other).update(vars(self), engine=engine)
        return other

    def step_s(self, running: float, chunks: Chunks | None) -> float:
        """Return the time of a step."""
        m = self._micro_batches(running, chunks)
        key = (m, running, chunks)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._whole(running, chunks, m)[0]
        return found

    def step(self, running: float, chunks: Chunks | None) -> StepEstimate:
        """Return a step's times."""
        m = self._micro_batches(running, chunks)
        whole_s, fixed_s, hops = self._whole(running, chunks, m)
        shares = [
            sum(count * hop[side] for count, hop in zip(self._counts, hops, strict=True))
            for side in range(4)
        ]
        rows = running if chunks is None else running + chunks.replicas * chunks.tokens
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

    def _whole(
        self, running: float, chunks: Chunks | None, m: int
    ) -> tuple[float, float, list[HopTimes]]:
        """Return the seconds of a step and of all outside its layers, and of each kind of layer."""
        engine, clock = self.engine, self.clock
        rows, own, slices, start = running, 0.0, 0.0, 0.0
        if chunks is not None:
            rows += chunks.replicas * chunks.tokens
            own, slices, start = chunks.tokens / m, chunks.slices, chunks.start
        per_node: list[BatchRows] = []
        fixed_s = widest = 0.0
        for ends_s, weight in zip(self._ends, engine.weights, strict=True):
            decoded = running * weight
            per_node.append(BatchRows(decoded / m, clock.context, own, start))
            each_s, wide = ends_s(decoded + slices), decoded / m + own
            fixed_s = each_s if each_s > fixed_s else fixed_s
            widest = wide if wide > widest else widest
        hops = [self._hop(kind, per_node, rows / m, widest, m) for kind in self._kinds]
        rallied = 1.0
        if self.is_rallied:
            rallied = max(
                self._factor(slot, m, each.total).step
                for holders in self._holders
                for (slot, _), each in zip(holders, per_node, strict=True)
            )
        return rallied * (fixed_s + self._layers_s(hops, m, widest)), fixed_s, hops

    def _micro_batches(self, running: float, chunks: Chunks | None) -> int:
        """Return into how many micro-batches a step's rows can be split, of those of the engine."""
        num_attention = self._num_attention
        most = self.engine.micro_batches
        if most == 1:
            return 1
        slices = running / num_attention
        if chunks is not None:
            slices = chunks.slices if chunks.replicas == num_attention else 1.0
        return max(1, min(most, int(slices + 1e-9)))

    def _layers_s(self, hops: Sequence[HopTimes], m: int, widest: float) -> float:
        turns, ends, model = self.engine.layout.takes_turns, self.engine.ends, self.clock.model
        if ends:
            layers = [hops[idx] for idx in self._kind_of]
            pass_s = link_s(self._link, widest * model.hidden_size * model.itemsize)
            return chain_s(layers, ends, num_micro_batches=m, pass_s=pass_s)
        if len(hops) == 1:
            return pipeline_s(
                hops[0], num_micro_batches=m, num_layers=len(self._kind_of), shares_cores=turns
            )
        layers = [hops[idx] for idx in self._kind_of]
        return layers_s(layers, num_micro_batches=m, shares_cores=turns)

    def _hop(
        self, kind: _LayerKind, per_node: Sequence[BatchRows], rows: float, widest: float, m: int
    ) -> HopTimes:
        """Return a layer's times, of the slowest node of each role."""
        layout, variation = self.engine.layout, self.clock.variation
        t_a = 0.0
        for (slot, count, half_s), own in zip(kind.halves, per_node, strict=True):
            each_s, decode = half_s(own), own.decode
            if count > 1 and decode and variation:
                spread = variation / math.sqrt(decode if decode > 1.0 else 1.0)
                wider = BatchRows(decode, own.context * (1 + spread), own.prefill, own.start)
                longer_s = half_s(wider)
                each_s += highest_of(count) * (longer_s - each_s) if longer_s > each_s else 0.0
            if self.is_rallied:
                each_s *= self._factor(slot, m, own.total).attention
            t_a = each_s if each_s > t_a else t_a
        if kind.local:
            local_s = (each(own.total) for each, own in zip(kind.local, per_node, strict=True))
            return HopTimes(t_a + max(local_s), 0.0, 0.0)
        if not kind.experts:
            return HopTimes(t_a, 0.0, 0.0)
        t_e = 0.0
        for slot, experts_s in kind.experts:
            each_s = experts_s(rows)
            if self.is_rallied:
                each_s *= self._factor(slot, m, rows).experts
            t_e = each_s if each_s > t_e else t_e
        if layout.is_colocated:
            return HopTimes(t_a + t_e, 0.0, 0.0)
        if layout.kind == "one_process":
            return HopTimes(t_a, t_e, 0.0)
        sent, taken = widest * self._sent, rows * self._taken
        if not layout.spans:
            return HopTimes(t_a, t_e, link_s(self._link, max(sent, taken)))
        # The nodes of a host share its card.
        near, far = layout.spans
        card_s = max(near.num_nodes * sent, far.num_nodes * taken) / self._link.bytes_per_s
        return HopTimes(t_a, t_e, self._link.alpha_s + card_s, card_s)

    def _factor(self, slot: DeviceSlot, m: int, rows: float) -> RallyFactors:
        return rally_factors(
            slot.device.profile,
            self.clock.model.experts_key(),
            shares_cores=self.engine.layout.takes_turns,
            micro_batches=m,
            rows=rows,
        )
