"""The precisions that an engine is tried with, under the workload's bound on quality.

Owns the translation between engines and deploy.placement.search.bits: what a format of a part
costs on a layout's devices. Without a sensitivity file, or without a bound, weights stay as they
are stored. Called by deploy.placement.search.search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from deploy.placement.cost import BatchRows
from deploy.placement.formats import LAYER_PARTS, Formats, LayerClass, LayerFormats, stored
from deploy.placement.search.bits import (
    Budget,
    Choice,
    Item,
    Option,
    Phase,
    Problem,
    evaluate,
    least,
    solve,
)
from deploy.placement.search.layouts import Device, EngineLayout
from deploy.placement.search.nodes import USABLE, layer_bytes
from deploy.placement.search.rating import Rater, Rating
from deploy.placement.search.steps import node_shares
from deploy.placement.sensitivity import Sensitivity
from topspin.plan.precision import KERNEL_FORMATS, LM_HEAD_FORMATS, UNQUANTISED, Format, Part, Rules

FORMATS: tuple[Format, ...] = (UNQUANTISED, "int8", "int4", "fp8")
PREFILL_ROWS = 512.0
RUNNING = 16.0
"""Running sequences per attention node for which formats are chosen where no load is known."""


class Precisions:
    """The formats worth trying for layouts of one model."""

    def __init__(
        self,
        rater: Rater,
        sensitivity: Sensitivity | None,
        own: Mapping[str, Rules] = MappingProxyType({}),
    ) -> None:
        """`own`: the rules of a quantised checkpoint, by kernels."""
        self._rater = rater
        self._model = rater.model
        self._sensitivity = sensitivity
        self._max_kl = rater.workload.max_kl
        self.plain = stored(rater.model)
        self._own = {name: stored(rater.model, rules) for name, rules in own.items()}
        self._known: dict[tuple[object, ...], tuple[Formats, ...]] = {}

    @property
    def may_quantise(self) -> bool:
        """Say whether anything but the stored precision can be chosen."""
        return self._sensitivity is not None and bool(self._max_kl)

    def stored_on(self, layout: EngineLayout) -> Formats:
        """Return the formats in which a layout's kernels serve the weights as they are stored.

        Attention nodes may hold experts as well.
        """
        if not self._own:
            return self.plain
        holders = [slot.device for slot, _ in layout.holders]
        experts = self._own_on([*holders, *(slot.device for slot, _ in layout.experts)])
        others = self._own_on(holders)
        layers = tuple(
            own._replace(experts=each.experts)
            for own, each in zip(others.layers, experts.layers, strict=True)
        )
        return replace(others, layers=layers)

    def _own_on(self, devices: Sequence[Device]) -> Formats:
        """Return the formats that all `devices` compute with: those of a CPU, if need be."""
        found = self._own["triton"]
        names = {rule.format for rule in found.rules()}
        is_known = all(
            each.kernels == "triton" and names <= {*each.profile.formats} for each in devices
        )
        return found if is_known else self._own["cpu"]

    def of(self, layout: EngineLayout) -> tuple[Formats, ...]:
        """Return the formats to try on a layout, the stored ones first.

        Those of layouts of like devices: the fastest within the bound, and the smallest.
        """
        key = (
            layout.kind,
            layout.link,
            tuple(slot for slot, _ in layout.holders),
            tuple(slot for slot, _ in layout.experts),
        )
        if key not in self._known:
            self._known[key] = (
                self._portfolio(layout) if self.may_quantise else (self.stored_on(layout),)
            )
        return self._known[key]

    def refined(self, rating: Rating) -> Iterator[Formats]:
        """Yield formats for a rated layout's own memory and load, with room to serve more."""
        if not self.may_quantise or rating.engine is None or rating.point is None:
            return
        for growth in (1.0, 2.0):
            problem = self.problem(rating.layout, running=rating.point.running, growth=growth)
            choice = solve(problem)
            if choice is not None:
                yield self._formats(problem, choice)

    def _portfolio(self, layout: EngineLayout) -> tuple[Formats, ...]:
        problem = self.problem(layout)
        smallest = least(problem.items, lambda option: option.num_bytes, max_kl=problem.max_kl)
        choices = [each for each in (solve(problem), smallest) if each is not None]
        own = self.stored_on(layout)
        found = {own.key: own}
        for choice in choices:
            formats = self._formats(problem, choice)
            found.setdefault(formats.key, formats)
        return tuple(found.values())

    def problem(
        self, layout: EngineLayout, *, running: float | None = None, growth: float | None = None
    ) -> Problem:
        """Return the choice of formats for a layout; with `growth`, within its memory.

        Weights then leave room for `growth` times the keys of `running` sequences.
        """
        rater, workload = self._rater, self._rater.workload
        assert self._max_kl is not None
        num_attention = layout.num_attention
        rows = RUNNING * num_attention if running is None else running
        prefill = PREFILL_ROWS * num_attention
        m = 1 if layout.takes_turns else 2
        link_s = 0.0 if layout.link is None else layout.link.link.alpha_s
        row_s = 0.0
        if layout.link is not None:
            row_s = rater.clock.row_bytes() / layout.link.link.bytes_per_s
        decode = Phase(
            weight=(workload.output.average - 1) / rows,
            micro_batches=m,
            link_s=link_s + row_s * rows / num_attention / m,
            takes_turns=layout.takes_turns,
        )
        filled = Phase(
            weight=workload.prompt.average / prefill,
            micro_batches=1,
            link_s=link_s + row_s * PREFILL_ROWS,
            takes_turns=layout.takes_turns,
        )
        own = BatchRows(rows / m / num_attention, rater.clock.context)
        items = self._items(layout, own, BatchRows(prefill=PREFILL_ROWS))
        budgets: tuple[Budget, ...] = ()
        if growth is not None:
            budgets = self._budgets(layout, keys=growth * rows * rater.clock.context)
        return Problem(items, budgets, self._max_kl, (decode, filled))

    def _items(
        self, layout: EngineLayout, decode: BatchRows, prefill: BatchRows
    ) -> tuple[Item, ...]:
        """Return the parts and their options, for such rows on each attention node."""
        places: list[tuple[int | None, Part]] = [
            (layer, part)
            for layer in range(self._model.num_layers)
            for part in LAYER_PARTS
            if self._model.matrices(part, layer) and (part != "experts" or layout.experts)
        ]
        return tuple(
            Item(layer, part, tuple(self._options(layout, part, layer, (decode, prefill))))
            for layer, part in (*places, (None, "lm_head"))
        )

    def _options(
        self,
        layout: EngineLayout,
        part: Part,
        layer: int | None,
        phases: tuple[BatchRows, BatchRows],
    ) -> Iterator[Option]:
        """Yield the formats that all devices of a part compute with, and that were measured."""
        assert self._sensitivity is not None
        slots = layout.experts if part == "experts" else layout.holders
        devices = [slot.device for slot, _ in slots]
        for name in FORMATS:
            kl = self._sensitivity.kl(part, layer, name)
            computes = name == UNQUANTISED or all(
                name in each.profile.formats and name in KERNEL_FORMATS[each.kernels]
                for each in devices
            )
            if kl is None or not computes or (layer is None and name not in LM_HEAD_FORMATS):
                continue
            kernels = devices[0].kernels
            size = self._model.weight_bytes(part, layer, name, kernels=kernels)
            if layer is None:
                size = self._model.head_bytes(name, kernels=kernels)
            seconds = tuple(self._part_s(layout, part, layer, name, rows) for rows in phases)
            yield Option(name, size, kl, seconds)

    def _part_s(
        self,
        layout: EngineLayout,
        part: Part,
        layer: int | None,
        name: Format,
        rows: BatchRows,
    ) -> float:
        """Return the seconds that a part in a format takes on the slowest node of its role."""
        clock, model = self._rater.clock, self._model
        if layer is None:
            head_s = (clock.fixed_s(slot, name, rows.decode) for slot, _ in layout.attention)
            return max(head_s) if rows.decode else 0.0
        if part == "experts":
            share = -(-model.num_experts // layout.num_experts)
            chosen = node_shares(model.num_experts, model.top_k, (share,), 0.0)[0]
            cls = LayerClass(layer, 1, LayerFormats(experts=name))
            total = rows.total * layout.num_attention
            return max(clock.experts_s(slot, cls, chosen, total) for slot, _ in layout.experts)

        def half_s(formats: LayerFormats) -> float:
            cls = LayerClass(layer, 1, formats)
            return max(clock.attention_s(slot, cls, rows) for slot, _ in layout.holders)

        if part == "attention":
            return half_s(LayerFormats(attention=name))
        # Beside the attention half, whose time has the MLP's in stored weights already.
        return half_s(LayerFormats(mlp=name)) - half_s(LayerFormats())

    def _budgets(self, layout: EngineLayout, *, keys: float) -> tuple[Budget, ...]:
        """Return the memory of the tightest node of each role, for quantisable weights."""
        rater, model = self._rater, self._model
        own_keys = max(keys / layout.num_attention, rater.max_model_len)
        kept = own_keys * rater.nodes.kept_per_token()
        # What cannot be quantised: all but the matrices of the layers and the head.
        first = layout.attention[0][0]
        fixed = kept + rater.nodes.attention_bytes(first, self.plain, 512)
        fixed -= model.head_bytes(UNQUANTISED, kernels=first.device.kernels)
        fixed -= sum(layer_bytes(self.plain, first.device.kernels))
        fixed += sum(map(model.other_bytes, range(model.num_layers)))
        held = -(-model.num_experts // max(1, layout.num_experts))
        if layout.shares_memory:
            room = layout.attention[0][0].device.memory_bytes * USABLE
            shares: dict[Part, float] = dict.fromkeys(
                ("attention", "mlp", "lm_head"), float(layout.num_attention)
            )
            shares["experts"] = float(model.num_experts)
            return (Budget(room - fixed * layout.num_attention, shares),)
        rooms = [slot.device.memory_bytes * USABLE for slot, _ in layout.holders]
        # Ranges of layers share the weights.
        room = sum(rooms) if layout.stages else min(rooms)
        budgets = [Budget(room - fixed, {"attention": 1.0, "mlp": 1.0, "lm_head": 1.0})]
        if layout.experts:
            room = min(slot.device.memory_bytes for slot, _ in layout.experts) * USABLE
            spare = room - rater.nodes.expert_bytes(layout.experts[0][0], self.plain, 0, 512)
            budgets.append(Budget(spare, {"experts": float(held)}))
        return tuple(budgets)

    def _formats(self, problem: Problem, choice: Choice) -> Formats:
        layers = [dict[str, Format]() for _ in self._model.layers]
        head: Format = UNQUANTISED
        for item, idx in zip(problem.items, choice, strict=True):
            name = item.options[idx].format
            if item.layer is None:
                head = name
            else:
                layers[item.layer][item.part] = name
        kl = evaluate(problem, choice).kl
        return Formats(self._model, tuple(LayerFormats(**each) for each in layers), head, kl)
