"""The choice of drafts (speculative decoding): whether they pay, their length, who computes them.

Owns the choice for the engines that a search has found, at their load: the search knows no drafts.
Called by deploy.placement.command; deploy.placement.write puts it into the plan.

A chain of n drafted tokens, each accepted with probability a, gives 1 + a + ... + a^n tokens per
step: (1 - a^(n+1)) / (1 - a) (Leviathan, Kalman, Matias, ICML 2023, formula 1). Its step has n + 1
rows per sequence. The draft model computes n passes before it on the attention nodes, or meanwhile
on a draft node. What the draft model takes for prompts, and a draft node to follow a rejection, is
not priced; nor is it that fewer sequences run when all are quicker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from deploy.placement.cost import BatchRows
from deploy.placement.formats import stored
from deploy.placement.memory import process_bytes
from deploy.placement.search.layouts import DeviceSlot, EngineLayout, most_copies, price_of
from deploy.placement.search.nodes import USABLE, NodeContents
from deploy.placement.search.rating import Rater
from deploy.placement.search.search import FleetMember, Inputs, Result
from deploy.placement.search.steady import high_running
from deploy.placement.search.steps import Clock, EngineSteps, node_shares
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Drafts
from topspin.plan.speculation import Speculation, cached_tokens

MIN_SAMPLED_ROWS: Final = 64
"""server.scheduler samples so many rows in a step, drafts included, however few sequences run."""


class Maker(NamedTuple):
    """Who computes drafts: a node on `slot` (None: the attention nodes, in turn with their own).

    `layout`: the engine's with that device. `room`: the tokens of keys that are left on a node of
    each attention group. `cached_tokens`: those of the draft node.
    """

    slot: DeviceSlot | None
    layout: EngineLayout
    room: tuple[int, ...]
    cached_tokens: int = 0

    def __str__(self) -> str:
        if self.slot is None:
            return "serially on the attention nodes"
        return f"by a draft node on {self.slot.device.name}"


class DraftChoice(NamedTuple):
    """Drafts of `num_tokens`: what a step gives per sequence, and how long it takes."""

    num_tokens: int
    maker: Maker
    tokens: float
    step_s: float

    @property
    def token_s(self) -> float:
        """Return the time per token of a sequence."""
        return self.step_s / self.tokens


@dataclass(frozen=True)
class Decision:
    """What was decided for one engine of the fleet. `choice` None: no drafts.

    `price` per hour: of the draft devices of all copies.
    """

    text: str
    choice: DraftChoice | None = None
    speculation: Speculation | None = None
    price: float = 0.0


def expected_tokens(acceptance: float, num_tokens: int) -> float:
    """Return the tokens of a step that verifies a chain of so many drafted tokens."""
    return sum(acceptance**k for k in range(num_tokens + 1))


def decide(inputs: Inputs, result: Result) -> tuple[Decision, ...]:
    """Return the decision for each engine of the fleet; (): the workload has no `speculation`."""
    asked, model = inputs.workload.speculation, inputs.draft
    if asked is None or model is None:
        return ()
    rater = inputs.rater()
    is_alone = len(result.members) == 1
    return tuple(
        EngineDrafts(rater, member, asked, model).decision(may_add=is_alone)
        for member in result.members
    )


class EngineDrafts:
    """The drafts of one engine of a fleet."""

    def __init__(self, rater: Rater, member: FleetMember, asked: Drafts, model: ModelShape) -> None:
        self._rater = rater
        self._rating, self._copies = member.rating, member.copies
        self._engine, self._point = member.rating.settled
        self._asked = asked
        self._model = model
        self._formats = stored(model)
        self._clock = Clock(model, rater.workload)
        self._nodes = NodeContents(self._clock, rater.max_model_len)
        # A step is one of one sequence at least.
        self.sequences = max(1.0, self._point.running)
        per_node = self.sequences / self._engine.layout.num_attention
        micro_batches = max(1, min(self._engine.micro_batches, int(per_node + 1e-9)))
        # A sequence's rows stay together, so there are no more micro-batches with drafts.
        engine = dataclasses.replace(self._engine, micro_batches=micro_batches)
        self._steps = EngineSteps(engine, rater.clock)

    def decision(self, *, may_add: bool) -> Decision:
        """Return the choice of the least time per token; `may_add`: spare devices may be used."""
        layout = self._engine.layout
        if layout.stages:
            return Decision("drafts refused: the engine has none where layers are cut")
        plain_s = self._steps.step_s(self.sequences, None)
        makers = [*self._serial(), *(self._apart() if may_add else ())]
        if not makers:
            return Decision("drafts refused: no device has room for the draft model")
        most = min(self._asked.max_tokens, self._most_tokens())
        found = [self.choice(n, maker) for n in range(1, most + 1) for maker in makers]
        if not found:
            return Decision(
                f"drafts refused: beside {self.sequences:.3g} sequences a step has no room for them"
            )
        in_time = [each for each in found if not self._is_late(each.step_s / plain_s)]
        # The first of equal ones: fewer tokens, and no device more.
        best = min(in_time or found, key=lambda each: each.token_s)
        ratio = best.step_s / plain_s
        if not in_time or best.token_s >= plain_s:
            late = "" if in_time else ", and the TTFT could miss its target"
            return Decision(
                f"drafts refused: at {self.sequences:.3g} sequences a step of "
                f"{best.num_tokens + 1}x rows, drafted {best.maker}, takes {ratio:.2f}x for "
                f"{best.tokens:.2f}x tokens{late}"
            )
        return Decision(
            f"drafts of {best.num_tokens} tokens: {best.tokens:.2f}x tokens per step, step "
            f"{ratio:.2f}x: taken, {best.maker}",
            best,
            Speculation(
                method="draft_model",
                model=self._asked.draft_model,
                num_speculative_tokens=best.num_tokens,
            ),
            price_of(best.maker.layout, self._copies) - price_of(layout, self._copies),
        )

    def choice(self, num_tokens: int, maker: Maker) -> DraftChoice:
        """Return drafts of `num_tokens` with their times."""
        verify_s = self._steps.step_s((num_tokens + 1) * self.sequences, None)
        tokens = expected_tokens(self._asked.acceptance, num_tokens)
        if maker.slot is not None:
            draft_s = num_tokens * self._pass_s(maker.slot, self.sequences)
            return DraftChoice(num_tokens, maker, tokens, max(verify_s, draft_s))
        engine = self._engine
        slowest_s = max(
            self._pass_s(slot, self.sequences * weight)
            for (slot, _), weight in zip(engine.layout.attention, engine.weights, strict=True)
        )
        return DraftChoice(num_tokens, maker, tokens, verify_s + num_tokens * slowest_s)

    def _pass_s(self, slot: DeviceSlot, rows: float) -> float:
        """Return the time of a pass of the whole draft model on one device."""
        model, clock = self._model, self._clock
        total_s = clock.fixed_s(slot, self._formats.head, rows)
        for cls in self._formats.classes:
            layer_s = clock.attention_s(slot, cls, BatchRows(rows, clock.context))
            if model.layers[cls.layer].is_moe:
                every = node_shares(
                    model.num_experts, model.top_k, (model.num_experts,), clock.skew
                )
                layer_s += clock.experts_s(slot, cls, every[0], rows)
            total_s += cls.num_layers * layer_s
        return total_s

    def _most_tokens(self) -> int:
        """Return the longest drafts that the scheduler plans for all sequences of a step."""
        engine = self._engine
        running = self.sequences * max(engine.weights)
        sampled = max(self._rating.max_num_seqs, MIN_SAMPLED_ROWS) - running
        return int(min(sampled, (engine.batched_tokens - running) // 2) / running + 1e-9)

    def _is_late(self, ratio: float) -> bool:
        """Say whether the TTFT could miss its target if no step grows by more than `ratio`."""
        limit = self._rater.workload.targets.ttft_s
        return limit is not None and ratio > 1 and self._point.ttft_s * ratio > limit

    def _serial(self) -> Iterator[Maker]:
        """Yield the attention nodes, if they have room for the draft model and its keys."""
        rating = self._rating
        per_token = self._rater.nodes.kept_per_token(self._engine.kv_itemsize)
        high = high_running(self._rater.workload, self._point)
        room = []
        for (slot, _), tokens, weight in zip(
            self._engine.layout.attention, rating.room, self._engine.weights, strict=True
        ):
            left = tokens * per_token - self._bytes(slot, rating.max_num_seqs)
            own = self._model.kv_bytes_per_token()
            if slot.device.is_gpu:
                left -= own * cached_tokens(rating.max_num_seqs, self._rater.max_model_len)
                own = 0
            # On a CPU the draft model has as many slots as the node's own cache.
            room.append(int(left // (per_token + own)))
            need = high * weight * self._rater.clock.context
            if room[-1] < max(need, self._rater.max_model_len):
                return
        yield Maker(None, self._engine.layout, tuple(room))

    def _apart(self) -> Iterator[Maker]:
        """Yield a draft node on each kind of device that the fleet leaves over.

        For the least price one that costs nothing more, else within the workload's limit.
        """
        layout, workload = self._engine.layout, self._rater.workload
        rows = self._rating.max_num_seqs * layout.num_attention
        cached = cached_tokens(rows, self._rater.max_model_len)
        for device in layout.host.devices:
            used = tuple(count + (group == device.group) for group, count in enumerate(layout.used))
            more = dataclasses.replace(layout, used=used)
            if most_copies(more, workload.max_price_per_hour) < self._copies:
                continue
            extra = price_of(more, self._copies) - price_of(layout, self._copies)
            if workload.objective == "min_price" and extra > 1e-9:
                continue
            slot = DeviceSlot(device, device.cores)
            needs = self._bytes(slot, rows) + cached * self._model.kv_bytes_per_token()
            needs += process_bytes(device.profile, "attention")
            if needs <= device.memory_bytes * USABLE:
                yield Maker(slot, more, self._rating.room, cached)

    def _bytes(self, slot: DeviceSlot, rows: int) -> float:
        """Return the bytes of the draft model beside its keys, without a process."""
        whole = self._nodes.attention_bytes(slot, self._formats, rows, len(self._model.moe_layers))
        return whole - process_bytes(slot.device.profile, "attention")
