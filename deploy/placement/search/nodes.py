"""Contents of a layout's nodes: their bytes, the room for keys, the experts and the sequences.

Owns the division of experts and sequences between nodes of unequal speed. Called by
deploy.placement.search.rating and .precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import Literal, NamedTuple

from deploy.placement.cost import BatchRows
from deploy.placement.formats import Formats, LayerClass
from deploy.placement.memory import attention_weight_bytes, process_bytes
from deploy.placement.routing import touched
from deploy.placement.search.layouts import DeviceSlot, EngineLayout
from deploy.placement.search.ranges import MAX_CUTS, Chain, Ends, all_cuts, num_cuts, some_cuts
from deploy.placement.search.steps import Clock, EngineSetup, node_shares
from deploy.placement.shapes import Kernels, ModelShape
from topspin.plan.kv_cache import gpu_misfit

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

Limit = Literal["kernels", "memory", "tpot", "ttft", "prefill", "sequences"]


class Binding(NamedTuple):
    """What keeps an engine from carrying more, for people: it needs more than it has."""

    limit: Limit
    text: str
    needs: float
    has: float


def _usable(slot: DeviceSlot) -> float:
    """Return the bytes of a slot's device that nodes may use."""
    return slot.device.memory_bytes * USABLE


class _KeyMemory(NamedTuple):
    """Memory of which keys get what is left, equally on `num_nodes`.

    `size` of all that is no keys, which have `token_bytes` per token of a sequence of the usual
    length; `longest`: bytes of the longest sequence. `subject`: of a sentence.
    """

    size: float
    has: float
    token_bytes: float
    longest: float
    num_nodes: int = 1
    subject: str = "needs"

    @property
    def tokens(self) -> int:
        """Return the tokens for which each node has room."""
        return int((self.has - self.size) / self.num_nodes // self.token_bytes)


@lru_cache(maxsize=1024)
def layer_bytes(formats: Formats, kernels: Kernels) -> tuple[int, ...]:
    """Return the bytes of each layer on an attention node or a stage, without keys."""
    model = formats.model
    return tuple(
        attention_weight_bytes(model, formats.of, kernels=kernels, layers=(each,), with_ends=False)
        for each in range(model.num_layers)
    )


@lru_cache(maxsize=1024)
def one_expert_bytes(formats: Formats, kernels: Kernels) -> tuple[int, ...]:
    """Return the bytes of one routed expert of each MoE layer."""
    return tuple(
        formats.model.weight_bytes("experts", each, formats.of("experts", each), kernels=kernels)
        for each in formats.model.moe_layers
    )


class NodeContents:
    """The bytes and shares of nodes, for one model.

    `max_model_len`: the longest sequence. `most_rows`: more are never decoded at once.
    """

    def __init__(self, clock: Clock, max_model_len: int, most_rows: float = math.inf) -> None:
        self.clock = clock
        self.model = clock.model
        self.max_model_len = max_model_len
        self.most_rows = most_rows
        self._cuts = cache(self._some_cuts)
        self._held_s = cache(self._seconds_of_held)
        self._kept = cache(self.model.kept_bytes_per_token)

    def room(self, engine: EngineSetup) -> tuple[int, ...] | Binding:
        """Return the tokens that a node of each attention group has room for beside the rest.

        Of a node whose layers are cut, the least of its ranges. A Binding: not for one sequence.
        """
        parts = list(self._parts(engine))
        worst = max(parts, key=self._over)
        if self._over(worst) > 0:
            needs = worst.size + worst.longest
            text = (
                f"{worst.subject} {needs / GIB:.1f} GiB with the keys of one sequence of "
                f"{self.max_model_len} tokens, the node has {worst.has / GIB:.1f}"
            )
            return Binding("memory", text, needs, worst.has)
        rooms = tuple(part.tokens for part in parts)
        if engine.ends:
            return (min(rooms),)
        return rooms * len(engine.layout.attention) if engine.layout.shares_memory else rooms

    def _over(self, part: _KeyMemory) -> float:
        """Return by how many bytes a sequence's keys are too many; negative: they fit."""
        return part.size + part.num_nodes * part.longest - part.has

    def _parts(self, engine: EngineSetup) -> Iterator[_KeyMemory]:
        """Yield the memories that hold an engine's keys, by attention group or by range."""
        layout, formats, tokens = engine.layout, engine.formats, engine.batched_tokens
        if engine.ends:
            begins = (0, *engine.ends[:-1])
            ranges = zip(layout.chain, begins, engine.ends, strict=True)
            for place, (slot, begin, end) in enumerate(ranges):
                size = self.range_bytes(slot, formats, tokens, place=place)
                size += sum(layer_bytes(formats, slot.device.kernels)[begin:end])
                keys = self._keys(engine, range(begin, end))
                subject = f"layers {begin} to {end - 1} on {slot.device.name} need"
                yield _KeyMemory(size, _usable(slot), *keys, subject=subject)
            return
        keys = self._keys(engine, range(self.model.num_layers))
        num_local = len(self.model.moe_layers) if layout.is_colocated else engine.num_local
        sizes = [
            self.attention_bytes(slot, formats, tokens, num_local) for slot, _ in layout.attention
        ]
        if not layout.shares_memory:
            for (slot, _), size in zip(layout.attention, sizes, strict=True):
                yield _KeyMemory(size, _usable(slot), *keys)
            return
        used = sum(count * size for (_, count), size in zip(layout.attention, sizes, strict=True))
        if not layout.is_colocated:
            rows = tokens * layout.num_attention
            used += sum(
                count * self.expert_bytes(slot, formats, each, rows)
                for (slot, count), each in zip(layout.experts, engine.held, strict=True)
            )
        has = _usable(layout.attention[0][0])
        yield _KeyMemory(used, has, *keys, layout.num_attention)

    def _keys(self, engine: EngineSetup, layers: range) -> tuple[float, float]:
        """Return the bytes of keys in `layers`: per token as a rule, and of the longest sequence.

        A prompt may be fed in whole steps.
        """
        usual = self.kept_per_token(engine.kv_itemsize, layers)
        longest = self._kept(
            self.max_model_len,
            engine.kv_itemsize,
            layers=layers,
            step_tokens=engine.batched_tokens,
        )
        return usual, longest * self.max_model_len

    def kept_per_token(self, itemsize: int | None = None, layers: range | None = None) -> float:
        """Return the bytes of keys per token of a sequence of the usual length."""
        return self._kept(self.clock.context, itemsize, layers=layers)

    def cuts(self, layout: EngineLayout, formats: Formats, tokens: int) -> tuple[Ends, ...]:
        """Return the ends of layer ranges to try; ((),): the layout's layers are not cut.

        Empty: there are more devices than layers. What fits in no way is given cut evenly.
        """
        if not layout.stages:
            return ((),)
        num_layers, parts = self.model.num_layers, len(layout.chain)
        if tries_all_cuts(self.model, layout):
            return tuple(all_cuts(num_layers, parts))
        even = tuple(num_layers * (idx + 1) // parts for idx in range(parts))
        return self._cuts(layout.chain, formats, tokens) or (even,)

    def _some_cuts(
        self, slots: tuple[DeviceSlot, ...], formats: Formats, tokens: int
    ) -> tuple[Ends, ...]:
        chain = Chain(
            [self._request_s(slot, formats) for slot in slots],
            [layer_bytes(formats, slot.device.kernels) for slot in slots],
            [
                _usable(slot) - self.range_bytes(slot, formats, tokens, place=place)
                for place, slot in enumerate(slots)
            ],
            self.kept_per_token() / self.model.num_layers,
        )
        return tuple(some_cuts(chain, self.max_model_len))

    def _request_s(self, slot: DeviceSlot, formats: Formats) -> list[float]:
        """Return each layer's seconds for the tokens of one request, of both phases."""
        prompt, output = self.clock.prompt, self.clock.output
        decode, prefill = (
            BatchRows(REFERENCE_ROWS, self.clock.context),
            BatchRows(0, 0, PREFILL_ROWS),
        )
        by_class = [
            (output - 1) / decode.total * self.clock.attention_s(slot, cls, decode)
            + prompt / prefill.total * self.clock.attention_s(slot, cls, prefill)
            for cls in formats.classes
        ]
        return [by_class[idx] for idx in formats.class_of]

    def range_bytes(self, slot: DeviceSlot, formats: Formats, tokens: int, *, place: int) -> float:
        """Return the bytes beside the layers and keys of the range at `place` of a chain."""
        process = process_bytes(slot.device.profile, "attention")
        if place:
            return self._buffers(tokens) + process
        whole = self.attention_bytes(slot, formats, tokens)
        return whole - sum(layer_bytes(formats, slot.device.kernels))

    def attention_bytes(
        self, slot: DeviceSlot, formats: Formats, tokens: int, num_local: int = 0
    ) -> float:
        """Return an attention node's bytes without keys, the experts of local layers included."""
        model, kernels = self.model, slot.device.kernels
        weights = sum(layer_bytes(formats, kernels)) + model.embedding_bytes()
        weights += model.head_bytes(formats.head, kernels=kernels)
        logits = 4 * model.vocab_size * min(tokens, MAX_SEQUENCES)
        process = process_bytes(slot.device.profile, "attention")
        local = model.num_experts * sum(one_expert_bytes(formats, kernels)[:num_local])
        return weights + self._buffers(tokens) + logits + process + local

    def most_local(self, layout: EngineLayout, formats: Formats, room: tuple[int, ...]) -> int:
        """Return how many layers' experts fit beside the keys of one sequence on every node.

        `room`: tokens of keys without local layers. One layer, at least, stays remote.
        """
        per_token = self.kept_per_token()
        found = len(self.model.moe_layers) - 1
        for (slot, _), tokens in zip(layout.attention, room, strict=True):
            spare = (tokens - self.max_model_len) * per_token
            sizes = itertools.accumulate(one_expert_bytes(formats, slot.device.kernels))
            found = min(found, sum(self.model.num_experts * each <= spare for each in sizes))
        return max(0, found)

    def expert_bytes(self, slot: DeviceSlot, formats: Formats, held: int, rows: int) -> float:
        """Return an expert node's bytes."""
        each = sum(one_expert_bytes(formats, slot.device.kernels))
        process = process_bytes(slot.device.profile, "expert")
        return held * each + self._buffers(rows) + process

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
            spare = _usable(slot) - self.expert_bytes(slot, formats, 0, rows)
            if layout.shares_memory:
                spare /= count
            each = sum(one_expert_bytes(formats, slot.device.kernels))
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

    def _seconds_of_held(self, slot: DeviceSlot, cls: LayerClass, rows: float, held: int) -> float:
        """Return the time of a node that holds so many experts (all chosen alike).

        A layer waits for the slowest node, and the fewer experts a node has, the more their number
        that is touched differs from layer to layer: one standard deviation comes on top.
        """
        if not held:
            return 0.0
        chosen = node_shares(self.model.num_experts, self.model.top_k, (held,), 0.0)[0]
        is_touched = touched(chosen, rows) / held
        spread = math.sqrt((1.0 - is_touched) / (is_touched * held))
        return self.clock.experts_s(slot, cls, chosen, rows) * (1.0 + spread)

    def weights(self, layout: EngineLayout, formats: Formats) -> tuple[float, ...]:
        """Return the share of all sequences of a node of each attention group.

        The scheduler sends a request where the least work waits, by each node's own times.
        """
        if len(layout.attention) == 1:
            return (1.0 / layout.attention[0][1],)
        rows = BatchRows(float(REFERENCE_ROWS), self.clock.context)
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

    def kernels_misfit(self, layout: EngineLayout) -> Binding | None:
        """Return what the kernels of a layout's attention nodes lack; None: nothing."""
        rank = None if self.model.latent is None else self.model.latent.rank
        misfit = gpu_misfit(self.model.head_dim, rank)
        if misfit is None or not any(slot.device.is_gpu for slot, _ in layout.holders):
            return None
        return Binding("kernels", misfit, 1, 0)

    def experts_misfit(self, layout: EngineLayout, formats: Formats) -> Binding:
        needs = self.expert_bytes(layout.experts[0][0], formats, self.model.num_experts, 0)
        has = sum(count * _usable(slot) for slot, count in layout.experts)
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
