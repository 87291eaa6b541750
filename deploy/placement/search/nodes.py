"""What the nodes of a layout hold: their bytes, the room for keys, the experts and the sequences.

Owns the division of experts and sequences between nodes of unequal speed. Called by
deploy.placement.search.rating and .precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from deploy.placement.cost import Rows
from deploy.placement.formats import Formats, LayerClass
from deploy.placement.memory import attention_weight_bytes, expert_weight_bytes, process_bytes
from deploy.placement.routing import touched
from deploy.placement.search.layouts import DeviceSlot, EngineLayout
from deploy.placement.search.ranges import MAX_CUTS, Chain, Ends, all_cuts, num_cuts, some_cuts
from deploy.placement.search.steps import Clock, node_shares
from deploy.placement.shapes import Kernels, ModelShape

USABLE = 0.9
"""Of a device's memory (gpu_memory_utilization)."""
MAX_SEQUENCES = 4096
"""The most sequences at once on a node."""
REFERENCE_ROWS = 32
"""Rows per attention node, if there are so many, at which experts are divided between nodes of
unequal speed."""
PREFILL_ROWS = 512
"""Rows of a prompt, beside REFERENCE_ROWS that decode, for which layers are cut."""
BUFFERS_PER_TOKEN = 8
"""Arrays of hidden size that a step keeps per token."""
GIB = 2**30

Limit = Literal["memory", "tpot", "ttft", "prefill", "sequences"]


class Binding(NamedTuple):
    """What keeps an engine from carrying more, for people: it needs more than it has."""

    limit: Limit
    text: str
    needs: float
    has: float


class Room(NamedTuple):
    """The tokens for which a node of each attention group has room; None: weights do not fit.

    `missing`: what to say then.
    """

    tokens: tuple[int, ...] | None
    missing: Binding | None = None


def kernels_of(slot: DeviceSlot) -> Kernels:
    """Return the kernels that pack a slot's weights."""
    return "triton" if slot.device.is_gpu else "cpu"


class Nodes:
    """The bytes and shares of nodes, for one model.

    `max_model_len`: the longest sequence. `most_rows`: more are never decoded at once.
    """

    def __init__(self, clock: Clock, max_model_len: int, most_rows: float = math.inf) -> None:
        self.clock = clock
        self.model = clock.model
        self.max_model_len = max_model_len
        self.most_rows = most_rows
        self._bytes: dict[tuple[object, ...], int] = {}
        self._local: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._layers: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._cuts: dict[tuple[object, ...], tuple[Ends, ...]] = {}
        self._held: dict[tuple[object, ...], float] = {}

    def room(
        self,
        layout: EngineLayout,
        formats: Formats,
        held: tuple[int, ...],
        tokens: int,
        kv_itemsize: int | None,
        num_local: int = 0,
        ends: Ends = (),
    ) -> Room:
        """Return the tokens that attention nodes have room for beside weights and buffers.

        Of a node whose layers are cut at `ends`, the least of its ranges.
        """
        if ends:
            return self._room_of_ranges(layout, formats, tokens, kv_itemsize, ends)
        free: list[float] = []
        if layout.shares_memory:
            device = layout.attention[0][0].device
            if layout.is_colocated:
                num_local = len(self.model.moe_layers)
            used = sum(
                count * self.attention_bytes(slot, formats, tokens, num_local)
                for slot, count in layout.attention
            )
            if not layout.is_colocated:
                used += sum(
                    count * self.expert_bytes(slot, formats, each, tokens * layout.num_attention)
                    for (slot, count), each in zip(layout.experts, held, strict=True)
                )
            free = [(device.memory_bytes * USABLE - used) / layout.num_attention]
            free *= len(layout.attention)
            needs, has = used, device.memory_bytes * USABLE
        else:
            sizes = [
                self.attention_bytes(slot, formats, tokens, num_local)
                for slot, _ in layout.attention
            ]
            rooms = [slot.device.memory_bytes * USABLE for slot, _ in layout.attention]
            free = [room - size for room, size in zip(rooms, sizes, strict=True)]
            worst = min(range(len(free)), key=lambda idx: free[idx])
            needs, has = sizes[worst], rooms[worst]
        per_token = self.model.kv_bytes_per_token(kv_itemsize)
        own = per_token * self.max_model_len
        if min(free) < own:
            text = (
                f"needs {(needs + own) / GIB:.1f} GiB with the keys of one sequence of "
                f"{self.max_model_len} tokens, the node has {has / GIB:.1f}"
            )
            return Room(None, Binding("memory", text, needs + own, has))
        return Room(tuple(int(each // per_token) for each in free))

    def _room_of_ranges(
        self,
        layout: EngineLayout,
        formats: Formats,
        tokens: int,
        kv_itemsize: int | None,
        ends: Ends,
    ) -> Room:
        rooms: list[int] = []
        closest: Binding | None = None
        for place, (slot, begin, end) in enumerate(
            zip(layout.chain, (0, *ends), ends, strict=False)
        ):
            size = self.range_bytes(slot, formats, tokens, place=place)
            size += sum(self.layer_bytes(slot, formats)[begin:end])
            per_token = (end - begin) * self.model.kv_layer_bytes(kv_itemsize)
            has = slot.device.memory_bytes * USABLE
            needs = size + per_token * self.max_model_len
            if needs > has and (closest is None or needs - has > closest.needs - closest.has):
                text = (
                    f"layers {begin} to {end - 1} on {slot.device.name} need {needs / GIB:.1f} GiB "
                    f"with the keys of one sequence of {self.max_model_len} tokens, the node has "
                    f"{has / GIB:.1f}"
                )
                closest = Binding("memory", text, needs, has)
            rooms.append(int((has - size) // per_token))
        return Room((min(rooms),)) if closest is None else Room(None, closest)

    def cuts(self, layout: EngineLayout, formats: Formats, tokens: int) -> tuple[Ends, ...]:
        """Return the ends of layer ranges to try; ((),): the layout's layers are not cut.

        Empty: there are more devices than layers. What fits in no way is given cut evenly.
        """
        if not layout.stages:
            return ((),)
        num_layers, parts = self.model.num_layers, len(layout.chain)
        if tries_all_cuts(self.model, layout):
            return tuple(all_cuts(num_layers, parts))
        key = (layout.chain, formats.key, tokens)
        if key not in self._cuts:
            free = [
                slot.device.memory_bytes * USABLE
                - self.range_bytes(slot, formats, tokens, place=place)
                for place, slot in enumerate(layout.chain)
            ]
            chain = Chain(
                [self._request_s(slot, formats) for slot in layout.chain],
                [self.layer_bytes(slot, formats) for slot in layout.chain],
                free,
                float(self.model.kv_layer_bytes()),
            )
            even = tuple(num_layers * (idx + 1) // parts for idx in range(parts))
            self._cuts[key] = tuple(some_cuts(chain, self.max_model_len)) or (even,)
        return self._cuts[key]

    def _request_s(self, slot: DeviceSlot, formats: Formats) -> list[float]:
        """Return each layer's seconds for the tokens of one request, of both phases."""
        prompt, output = self.clock.prompt, self.clock.output
        decode, prefill = Rows(REFERENCE_ROWS, self.clock.context), Rows(0, 0, PREFILL_ROWS)
        by_class = [
            (output - 1) / decode.total * self.clock.attention_s(slot, cls, decode)
            + prompt / prefill.total * self.clock.attention_s(slot, cls, prefill)
            for cls in formats.classes
        ]
        return [by_class[idx] for idx in formats.class_of]

    def layer_bytes(self, slot: DeviceSlot, formats: Formats) -> tuple[int, ...]:
        """Return the bytes of each layer on an attention node or a stage, without keys."""
        key = (kernels_of(slot), formats.key)
        if key not in self._layers:
            self._layers[key] = tuple(
                attention_weight_bytes(
                    self.model,
                    formats.of,
                    kernels=kernels_of(slot),
                    layers=(layer,),
                    with_ends=False,
                )
                for layer in range(self.model.num_layers)
            )
        return self._layers[key]

    def range_bytes(self, slot: DeviceSlot, formats: Formats, tokens: int, *, place: int) -> float:
        """Return the bytes beside the layers and keys of the range at `place` of a chain."""
        process = process_bytes(slot.device.profile, "attention")
        if place:
            return self._buffers(tokens) + process
        whole = self.attention_bytes(slot, formats, tokens)
        return whole - sum(self.layer_bytes(slot, formats))

    def attention_bytes(
        self, slot: DeviceSlot, formats: Formats, tokens: int, num_local: int = 0
    ) -> float:
        """Return an attention node's bytes without keys, the experts of local layers included."""
        key = ("attention", kernels_of(slot), formats.key)
        if key not in self._bytes:
            self._bytes[key] = attention_weight_bytes(
                self.model, formats.of, kernels=kernels_of(slot)
            )
        logits = 4 * self.model.vocab_size * min(tokens, MAX_SEQUENCES)
        process = process_bytes(slot.device.profile, "attention")
        local = sum(self.local_bytes(slot, formats)[:num_local])
        return self._bytes[key] + self._buffers(tokens) + logits + process + local

    def local_bytes(self, slot: DeviceSlot, formats: Formats) -> tuple[int, ...]:
        """Return the bytes of all routed experts of each MoE layer."""
        key = (kernels_of(slot), formats.key)
        if key not in self._local:
            self._local[key] = tuple(
                self.model.num_experts
                * self.model.weight_bytes(
                    "experts", layer, formats.of("experts", layer), kernels=kernels_of(slot)
                )
                for layer in self.model.moe_layers
            )
        return self._local[key]

    def most_local(self, layout: EngineLayout, formats: Formats, room: tuple[int, ...]) -> int:
        """Return how many layers' experts fit beside the keys of one sequence on every node.

        `room`: tokens of keys without local layers. One layer, at least, stays remote.
        """
        per_token = self.model.kv_bytes_per_token()
        found = len(self.model.moe_layers) - 1
        for (slot, _), tokens in zip(layout.attention, room, strict=True):
            spare = (tokens - self.max_model_len) * per_token
            sizes = itertools.accumulate(self.local_bytes(slot, formats))
            found = min(found, sum(size <= spare for size in sizes))
        return max(0, found)

    def expert_bytes(self, slot: DeviceSlot, formats: Formats, held: int, rows: int) -> float:
        """Return an expert node's bytes."""
        key = ("expert", kernels_of(slot), formats.key)
        if key not in self._bytes:
            self._bytes[key] = expert_weight_bytes(
                self.model, formats.of, held=1, kernels=kernels_of(slot)
            )
        process = process_bytes(slot.device.profile, "expert")
        return held * self._bytes[key] + self._buffers(rows) + process

    def _buffers(self, rows: int) -> float:
        return BUFFERS_PER_TOKEN * rows * self.model.hidden_size * self.model.itemsize

    def shares(
        self, layout: EngineLayout, formats: Formats, max_tokens: int
    ) -> tuple[int, ...] | None:
        """Return the experts that a node of each group holds; None: they do not fit.

        The slowest node is as fast as can be at REFERENCE_ROWS, within every node's memory.
        """
        if not layout.experts:
            return ()
        total = self.model.num_experts
        rows = max_tokens * layout.num_attention
        caps = []
        for slot, count in layout.experts:
            spare = slot.device.memory_bytes * USABLE - self.expert_bytes(slot, formats, 0, rows)
            if layout.shares_memory:
                spare /= count
            each = self.expert_bytes(slot, formats, 1, 0) - self.expert_bytes(slot, formats, 0, 0)
            caps.append(max(0, min(total, int(spare // each))))
        counts = [count for _, count in layout.experts]
        if sum(cap * count for cap, count in zip(caps, counts, strict=True)) < total:
            return None
        if len(counts) == 1:
            return (-(-total // counts[0]),)
        cls = next(each for each in formats.classes if self.model.layers[each.layer].is_moe)
        at = min(REFERENCE_ROWS * layout.num_attention, self.most_rows)
        return minmax_shares(
            total,
            counts,
            caps,
            [partial(self._held_s, slot, cls, at) for slot, _ in layout.experts],
        )

    def _held_s(self, slot: DeviceSlot, cls: LayerClass, rows: float, held: int) -> float:
        """Return the time of a node that holds so many experts (all chosen alike).

        A layer waits for the slowest node, and the fewer experts a node has, the more their number
        that is touched differs from layer to layer: one standard deviation comes on top.
        """
        if not held:
            return 0.0
        key = (slot, cls.formats.experts, rows, held)
        if key not in self._held:
            model = self.model
            chosen = node_shares(model.num_experts, model.top_k, (held,), 0.0)[0]
            is_touched = touched(chosen, rows) / held
            spread = math.sqrt((1.0 - is_touched) / (is_touched * held))
            self._held[key] = self.clock.experts_s(slot, cls, chosen, rows) * (1.0 + spread)
        return self._held[key]

    def weights(self, layout: EngineLayout, formats: Formats) -> tuple[float, ...]:
        """Return the share of all sequences of a node of each attention group.

        The scheduler sends a request where the least work waits, by each node's own times.
        """
        if len(layout.attention) == 1:
            return (1.0 / layout.attention[0][1],)
        rows = Rows(float(REFERENCE_ROWS), self.clock.context)
        speeds = [
            1.0
            / sum(
                cls.num_layers * self.clock.attention_s(slot, cls, rows) for cls in formats.classes
            )
            for slot, _ in layout.attention
        ]
        total = sum(
            speed * count for speed, (_, count) in zip(speeds, layout.attention, strict=True)
        )
        return tuple(speed / total for speed in speeds)

    def experts_misfit(self, layout: EngineLayout, formats: Formats) -> Binding:
        needs = self.expert_bytes(layout.experts[0][0], formats, self.model.num_experts, 0)
        has = sum(count * slot.device.memory_bytes * USABLE for slot, count in layout.experts)
        text = f"experts need {needs / GIB:.1f} GiB, their nodes have {has / GIB:.1f}"
        return Binding("memory", text, needs, has)


def tries_all_cuts(model: ModelShape, layout: EngineLayout) -> bool:
    """Say whether all cuts of a layout's layers are tried."""
    return not layout.stages or num_cuts(model.num_layers, len(layout.chain)) <= MAX_CUTS


def minmax_shares(
    total: int,
    counts: Sequence[int],
    caps: Sequence[int],
    times: Sequence[Callable[[int], float]],
) -> tuple[int, ...]:
    """Return how many of `total` experts each node of a group holds, the slowest node fastest.

    `counts[g]` like nodes hold at most `caps[g]` each; `times[g](held)` does not fall with `held`.
    Exact: the least time T such that nodes which take T or less hold everything, by bisection over
    all times there are. What is held too much is taken back from the slowest.
    """
    tables = [
        [time(held) for held in range(cap + 1)] for time, cap in zip(times, caps, strict=True)
    ]
    candidates = sorted({value for table in tables for value in table})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _holds(tables, counts, candidates[middle]) >= total:
            high = middle
        else:
            low = middle + 1
    held = [_most(table, candidates[low]) for table in tables]
    while True:
        spare = sum(each * count for each, count in zip(held, counts, strict=True)) - total
        groups = [g for g, each in enumerate(held) if each > 0 and counts[g] <= spare]
        if not groups:
            return tuple(held)
        slowest = max(groups, key=lambda g: (tables[g][held[g]], g))
        held[slowest] -= 1


def _most(table: Sequence[float], time_s: float) -> int:
    """Return the largest index whose time, and all before it, are within `time_s`."""
    most = 0
    while most + 1 < len(table) and table[most + 1] <= time_s:
        most += 1
    return most


def _holds(tables: Sequence[Sequence[float]], counts: Sequence[int], time_s: float) -> int:
    return sum(_most(table, time_s) * count for table, count in zip(tables, counts, strict=True))
