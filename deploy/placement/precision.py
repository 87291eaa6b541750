"""The precisions that an engine is tried with, under the workload's bound on quality.

Owns the translation between engines and deploy.placement.bits: what a format of a part costs on a
unit's devices. Without a sensitivity file, or without a bound, weights stay as they are stored.
Called by deploy.placement.search.
"""

from __future__ import annotations

from collections.abc import Iterator

from deploy.placement.bits import (
    Budget,
    Choice,
    Item,
    Option,
    Phase,
    Problem,
    all_choices,
    allocate,
    evaluate,
    num_choices,
    solve,
)
from deploy.placement.cost import Rows
from deploy.placement.formats import LAYER_PARTS, Formats, LayerClass, LayerFormats, stored
from deploy.placement.nodes import USABLE, kernels_of
from deploy.placement.rating import Rater, Rating
from deploy.placement.sensitivity import Sensitivity
from deploy.placement.steps import node_shares
from deploy.placement.units import Unit
from topspin.plan.precision import KERNEL_FORMATS, LM_HEAD_FORMATS, UNQUANTISED, Format, Part

EXHAUSTIVE = 64
"""Assignments that are all tried; of more, the best by a solver are."""
MAX_SOLVER_ITEMS = 120
"""Beyond them the allocator answers."""
PREFILL_ROWS = 512.0
RUNNING = 16.0
"""Running sequences per attention node for which formats are chosen where no load is known."""


class Precisions:
    """The formats worth trying for units of one model."""

    def __init__(self, rater: Rater, sensitivity: Sensitivity | None) -> None:
        self._rater = rater
        self._model = rater.model
        self._sensitivity = sensitivity
        self._max_kl = rater.workload.max_kl
        self.stored = stored(rater.model)
        self._known: dict[tuple[object, ...], tuple[Formats, ...]] = {}

    @property
    def may_quantise(self) -> bool:
        """Say whether anything but the stored precision can be chosen."""
        return self._sensitivity is not None and bool(self._max_kl)

    def of(self, unit: Unit) -> tuple[Formats, ...]:
        """Return the formats to try on a unit, the stored ones first.

        Those of units of like devices: the fastest within the bound, and the smallest.
        """
        if not self.may_quantise:
            return (self.stored,)
        key = (
            unit.layout,
            tuple(seat for seat, _ in unit.holders),
            tuple(seat for seat, _ in unit.experts),
        )
        if key not in self._known:
            self._known[key] = self._portfolio(unit)
        return self._known[key]

    def refined(self, rating: Rating) -> Iterator[Formats]:
        """Yield formats for a rated unit's own memory and load, with room to serve more."""
        if not self.may_quantise or rating.engine is None or rating.point is None:
            return
        for growth in (1.0, 2.0):
            problem = self.problem(rating.unit, running=rating.point.running, growth=growth)
            choice = _solved(problem)
            if choice is not None:
                yield self._formats(problem, choice)

    def _portfolio(self, unit: Unit) -> tuple[Formats, ...]:
        problem = self.problem(unit)
        if num_choices(problem) <= EXHAUSTIVE:
            choices = [each for each in all_choices(problem) if evaluate(problem, each).fits]
        else:
            choices = [
                each for each in (_solved(problem), _solved(_by_bytes(problem))) if each is not None
            ]
        found = {self.stored.key: self.stored}
        for choice in choices:
            formats = self._formats(problem, choice)
            found.setdefault(formats.key, formats)
        return tuple(found.values())

    def problem(
        self, unit: Unit, *, running: float | None = None, growth: float | None = None
    ) -> Problem:
        """Return the choice of formats for a unit; with `growth`, within its memory.

        Weights then leave room for `growth` times the keys of `running` sequences.
        """
        rater, workload = self._rater, self._rater.workload
        assert self._max_kl is not None
        num_attention = unit.num_attention
        rows = RUNNING * num_attention if running is None else running
        prefill = PREFILL_ROWS * num_attention
        m = 1 if unit.takes_turns else 2
        link_s = 0.0 if unit.link is None else unit.link.link.alpha_s
        row_s = 0.0
        if unit.link is not None:
            row_s = rater.clock.row_bytes() / unit.link.link.bytes_per_s
        decode = Phase(
            weight=(workload.output.average - 1) / rows,
            micro_batches=m,
            link_s=link_s + row_s * rows / num_attention / m,
            takes_turns=unit.takes_turns,
        )
        filled = Phase(
            weight=workload.prompt.average / prefill,
            micro_batches=1,
            link_s=link_s + row_s * PREFILL_ROWS,
            takes_turns=unit.takes_turns,
        )
        items = self._items(unit, rows / m, prefill)
        budgets: tuple[Budget, ...] = ()
        if growth is not None:
            budgets = self._budgets(unit, keys=growth * rows * rater.clock.context)
        return Problem(items, budgets, self._max_kl, decode, filled)

    def _items(self, unit: Unit, rows: float, prefill: float) -> tuple[Item, ...]:
        found: list[Item] = []
        by_class: dict[tuple[object, ...], tuple[float, float]] = {}
        for layer, kind in enumerate(self._model.layers):
            for part in LAYER_PARTS:
                if not self._model.matrices(part, layer) or (
                    part == "experts" and not unit.experts
                ):
                    continue
                options = []
                for name in self._formats_of(unit, part, layer):
                    key = (kind, part, name)
                    if key not in by_class:
                        by_class[key] = (
                            self._part_s(unit, part, layer, name, rows, is_prefill=False),
                            self._part_s(unit, part, layer, name, prefill, is_prefill=True),
                        )
                    options.append(self._option(unit, part, layer, name, by_class[key]))
                found.append(Item(layer, part, tuple(options)))
        head = [
            self._option(unit, "lm_head", None, name, (self._head_s(unit, name, rows), 0.0))
            for name in self._formats_of(unit, "lm_head", None)
        ]
        return (*found, Item(None, "lm_head", tuple(head)))

    def _option(
        self,
        unit: Unit,
        part: Part,
        layer: int | None,
        name: Format,
        times: tuple[float, float],
    ) -> Option:
        assert self._sensitivity is not None
        seats = unit.experts if part == "experts" else unit.attention
        kernels = kernels_of(seats[0][0])
        size = self._model.weight_bytes(part, layer, name, kernels=kernels)
        if part == "lm_head":
            size = self._model.head_bytes(name, kernels=kernels)
        kl = self._sensitivity.kl(part, layer, name)
        assert kl is not None
        return Option(name, size, kl, *times)

    def _formats_of(self, unit: Unit, part: Part, layer: int | None) -> list[Format]:
        """Return the formats that all devices of a part compute with, and that were measured."""
        assert self._sensitivity is not None
        seats = unit.experts if part == "experts" else unit.holders
        found: list[Format] = [UNQUANTISED]
        for name in ("int8", "int4", "fp8"):
            kernels = ("triton" if seat.device.is_gpu else "cpu" for seat, _ in seats)
            if (
                all(name in seat.device.profile.formats for seat, _ in seats)
                and all(name in KERNEL_FORMATS[each] for each in kernels)
                and (part != "lm_head" or name in LM_HEAD_FORMATS)
                and self._sensitivity.kl(part, layer, name) is not None
            ):
                found.append(name)
        return found

    def _part_s(
        self, unit: Unit, part: Part, layer: int, name: Format, rows: float, *, is_prefill: bool
    ) -> float:
        """Return the seconds that a part in a format takes on the slowest node of its role."""
        clock, model = self._rater.clock, self._model
        if part == "experts":
            nodes = unit.num_experts
            share = -(-model.num_experts // nodes)
            chosen = node_shares(model.num_experts, model.top_k, (share,), 0.0)[0]
            cls = LayerClass(layer, 1, LayerFormats(experts=name))
            return max(clock.experts_s(seat, cls, chosen, rows) for seat, _ in unit.experts)
        own = rows / unit.num_attention
        at = Rows(prefill=own) if is_prefill else Rows(own, clock.context)

        def half_s(formats: LayerFormats) -> float:
            cls = LayerClass(layer, 1, formats)
            return max(clock.attention_s(seat, cls, at) for seat, _ in unit.holders)

        if part == "attention":
            return half_s(LayerFormats(attention=name))
        # Beside the attention half, whose time has the MLP's in stored weights already.
        return half_s(LayerFormats(mlp=name)) - half_s(LayerFormats())

    def _head_s(self, unit: Unit, name: Format, rows: float) -> float:
        own = rows / unit.num_attention
        return max(self._rater.clock.fixed_s(seat, name, own) for seat, _ in unit.attention)

    def _budgets(self, unit: Unit, *, keys: float) -> tuple[Budget, ...]:
        """Return the memory of the tightest node of each role, for quantisable weights."""
        rater, model = self._rater, self._model
        own_keys = max(keys / unit.num_attention, rater.max_model_len)
        kept = own_keys * model.kv_bytes_per_token()
        plain = model.embedding_bytes() + sum(map(model.other_bytes, range(model.num_layers)))
        buffers = rater.nodes.attention_bytes(unit.attention[0][0], self.stored, 512)
        buffers -= self._quantisable(unit)
        fixed = max(kept + buffers, kept + plain)
        held = -(-model.num_experts // max(1, unit.num_experts))
        if unit.shares_memory:
            room = unit.attention[0][0].device.memory_bytes * USABLE
            shares: dict[Part, float] = dict.fromkeys(
                ("attention", "mlp", "lm_head"), float(unit.num_attention)
            )
            shares["experts"] = float(model.num_experts)
            return (Budget(room - fixed * unit.num_attention, shares),)
        rooms = [seat.device.memory_bytes * USABLE for seat, _ in unit.holders]
        # Ranges of layers share the weights.
        room = sum(rooms) if unit.stages else min(rooms)
        budgets = [Budget(room - fixed, {"attention": 1.0, "mlp": 1.0, "lm_head": 1.0})]
        if unit.experts:
            room = min(seat.device.memory_bytes for seat, _ in unit.experts) * USABLE
            spare = room - rater.nodes.expert_bytes(unit.experts[0][0], self.stored, 0, 512)
            budgets.append(Budget(spare, {"experts": float(held)}))
        return tuple(budgets)

    def _quantisable(self, unit: Unit) -> float:
        kernels = kernels_of(unit.attention[0][0])
        total = float(self._model.head_bytes(UNQUANTISED, kernels=kernels))
        for layer in range(self._model.num_layers):
            for part in ("attention", "mlp"):
                total += self._model.weight_bytes(part, layer, UNQUANTISED, kernels=kernels)
        return total

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


def _solved(problem: Problem) -> Choice | None:
    if len(problem.items) > MAX_SOLVER_ITEMS:
        return allocate(problem)
    return solve(problem)


def _by_bytes(problem: Problem) -> Problem:
    """Return the problem whose objective is the bytes: what fits where little does."""
    items = tuple(
        item._replace(
            options=tuple(
                option._replace(decode_s=option.num_bytes * 1e-12, prefill_s=0.0)
                for option in item.options
            )
        )
        for item in problem.items
    )
    phase = Phase(1.0, 1, 0.0, True)
    return Problem(items, (), problem.max_kl, phase, phase)
