"""The largest load of an engine within the targets, with its settings and what binds there.

Owns the settings that are tried (micro-batches, token budgets), the room for keys, the experts of
each node, and why an engine carries nothing. Called by deploy.placement.search.search.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from deploy.placement.formats import Formats
from deploy.placement.search.layouts import EngineLayout, most_copies
from deploy.placement.search.nodes import MAX_SEQUENCES, Binding, NodeContents
from deploy.placement.search.steady import EngineShape, Point, high_running, point
from deploy.placement.search.steps import Clock, EngineSetup, EngineSteps
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Z95, Workload, answer_s, asked_load
from topspin.plan.settings import MAX_MICRO_BATCHES

CPU_BUDGETS = (128, 256, 512, 1024)
GPU_BUDGETS = (512, 2048, 4096, 8192)
"""Tokens per step of an attention node that are tried (max_num_batched_tokens)."""


NOT_ASKED = Binding("sequences", "", 1, 1)
"""Until the best of a layout's settings is known, what binds in the others does not matter."""
SHARP = 5
"""Halvings of the way between two loads of the grid."""


@lru_cache(maxsize=1)
def running_grid() -> tuple[int, ...]:
    """Return the numbers of running sequences that are tried: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    steps = {1 << power for power in range(19)} | {3 << power for power in range(17)}
    return tuple(sorted(steps))


@dataclasses.dataclass(frozen=True, slots=True)
class Rating:
    """An engine at the largest load within the targets, and what binds there.

    `engine` None: no settings make it work at all, because of `binding`. `beyond`: the number of
    running sequences at which it failed. `room`: tokens of keys on a node of each group.
    `most_load`: of a rating at a smaller load (at_load), the largest one.
    """

    layout: EngineLayout
    formats: Formats
    binding: Binding
    engine: EngineSetup | None = None
    point: Point | None = None
    max_num_seqs: int = 0
    room: tuple[int, ...] = ()
    beyond: float = 0.0
    most_load: float = 0.0

    @property
    def settled(self) -> tuple[EngineSetup, Point]:
        """Return the settings and the state of an engine that works."""
        assert self.engine is not None
        assert self.point is not None
        return self.engine, self.point

    def load(self, workload: Workload) -> float:
        """Return what it carries in the workload's terms: requests per second, or users."""
        if self.point is None:
            return 0.0
        return load_of(self.point, workload)


def load_of(found: Point, workload: Workload) -> float:
    """Return a point's load in the workload's terms."""
    return found.users if workload.arrival_rate is None else found.rate


def max_model_len(workload: Workload, context_length: int) -> int:
    """Return the longest sequence that an engine is planned for."""
    if workload.max_model_len is not None:
        return min(workload.max_model_len, context_length)
    longest = 2 * (workload.prompt.high + workload.output.high)
    return min(context_length, 1 << (int(longest) - 1).bit_length())


class Rater:
    """Rates layouts of one model under one workload."""

    def __init__(self, model: ModelShape, workload: Workload, *, context_length: int) -> None:
        self.model = model
        self.workload = workload
        self.clock = Clock(model, workload)
        self.max_model_len = max_model_len(workload, context_length)
        self.nodes = NodeContents(self.clock, self.max_model_len, workload.users or math.inf)
        self._steps: dict[tuple[object, ...], EngineSteps] = {}
        self._last: EngineSteps | None = None

    def rate(self, layout: EngineLayout, formats: Formats) -> Rating:
        """Return the layout with the settings that carry most, or answer soonest at the load."""
        tried = sorted(self.settings(layout, formats), key=self.rank, reverse=True)
        best = self.sharpened(tried[0])
        for rating in tried[1:]:
            if rating.point is None or self._is_for_latency:
                break
            load = best.load(self.workload)
            least = self._needed(rating, load)
            if least < rating.beyond and not self._is_below(rating.settled[0], rating.beyond, load):
                best = max(best, self.sharpened(rating, least=least), key=self.rank)
        if best.engine is None:
            return best
        trial = LoadTrial(self, best.engine, best.room)
        return dataclasses.replace(best, binding=trial.binding(best.beyond))

    def _is_below(self, engine: EngineSetup, running: float, load: float) -> bool:
        """Say whether fewer sequences than so many cannot carry `load`, as decoding alone shows.

        As in .bounds steps are taken to grow no faster than their rows: where factors of a rally
        were measured, and of users, of whom some wait, it is not known.
        """
        steps = self.steps_of(engine)
        if self.workload.arrival_rate is None or self._is_for_latency or steps.is_rallied:
            return False
        decoded_s = (self.workload.output.average - 1) * steps.step_s(running, None)
        return running < load * decoded_s * (1 - 1e-9)

    def _needed(self, rating: Rating, load: float) -> float:
        """Return a number of sequences below which a rating of the grid cannot carry `load`."""
        engine, found = rating.settled
        if self.workload.arrival_rate is not None:
            # Twice the load takes at least twice the sequences.
            return found.running * load / rating.load(self.workload)
        # Users whose prompts wait are no sequences that run: near saturation there are many.
        beyond = self.point(engine, self.steps_of(engine), rating.beyond)
        reaches = (
            beyond is None or dataclasses.replace(rating, point=beyond).load(self.workload) > load
        )
        return 0.0 if reaches else rating.beyond

    def steps_of(self, engine: EngineSetup) -> EngineSteps:
        """Return the engine's steps, which settings of the layout last rated have in common."""
        if self._last is not None and self._last.engine is engine:
            return self._last
        key = (engine.held, engine.weights, engine.num_local, engine.ends)
        known = self._steps.get(key)
        if (
            known is None
            or known.engine.layout is not engine.layout
            or known.engine.formats is not engine.formats
        ):
            known = self._steps[key] = EngineSteps(engine, self.clock)
        self._last = known.with_settings(engine)
        return self._last

    @property
    def _is_for_latency(self) -> bool:
        return self.workload.objective == "min_latency"

    def settings(self, layout: EngineLayout, formats: Formats) -> Iterator[Rating]:
        """Yield the layout at its largest load of the grid, with each of the settings."""
        misfit = self.nodes.kernels_misfit(layout)
        if misfit is not None:
            yield Rating(layout, formats, misfit)
            return
        budgets = budgets_of(layout)
        held = self.nodes.shares(layout, formats, budgets[-1])
        if held is None:
            yield Rating(layout, formats, self.nodes.experts_misfit(layout, formats))
            return
        weights = self.nodes.weights(layout, formats)
        cuts = self.nodes.cuts(layout, formats, budgets[0])
        if not cuts:
            parts, num_layers = len(layout.chain), self.model.num_layers
            text = f"{parts} devices for {num_layers} layers"
            yield Rating(layout, formats, Binding("memory", text, parts, num_layers))
            return
        start, most_load = 0, 0.0
        for itemsize in (None, 1) if self.may_have_fp8(layout) else (None,):
            for tokens in budgets:
                engines = [
                    EngineSetup(layout, formats, held, weights, 1, tokens, itemsize, 0, ends)
                    for ends in cuts
                ]
                rooms = [self.nodes.room(engine) for engine in engines]
                missing = [room for room in rooms if isinstance(room, Binding)]
                if len(missing) == len(cuts):
                    least = min(missing, key=lambda each: each.needs / each.has)
                    yield Rating(layout, formats, least)
                    break
                for plain, room in zip(engines, rooms, strict=True):
                    for engine, left in self._with_local(plain, room):
                        for m in _micro_batches(layout):
                            tried = dataclasses.replace(engine, micro_batches=m)
                            if most_load and self._is_beaten(tried, left, start, most_load):
                                continue
                            rating = self.at_most(tried, left, start=start)
                            if rating.point is not None:
                                start = bisect_left(running_grid(), rating.point.running)
                                most_load = max(most_load, rating.load(self.workload))
                            yield rating

    def _is_beaten(
        self, engine: EngineSetup, room: tuple[int, ...], start: int, load: float
    ) -> bool:
        """Say whether settings fail at an index of the grid below which they carry less."""
        running = float(running_grid()[start])
        if not self._is_below(engine, running, load):
            return False
        return LoadTrial(self, engine, room).point(running) is None

    def _with_local(
        self, plain: EngineSetup, room: tuple[int, ...] | Binding
    ) -> Iterator[tuple[EngineSetup, tuple[int, ...]]]:
        """Yield an engine without local layers, and with all that fit, and the room for keys."""
        if isinstance(room, Binding):
            return
        yield plain, room
        layout = plain.layout
        # topspin.plan.stages: nodes whose layers are cut hold no routed experts.
        if layout.kind == "one_process" or not layout.experts or layout.stages:
            return
        most = self.nodes.most_local(layout, plain.formats, room)
        engine = dataclasses.replace(plain, num_local=most)
        left = self.nodes.room(engine)
        if most and not isinstance(left, Binding):
            yield engine, left

    def may_have_fp8(self, layout: EngineLayout) -> bool:
        """Say whether keys in 8 bits may be tried."""
        return self.workload.fp8_kv_cache and not any(
            slot.device.is_gpu for slot, _ in layout.attention
        )

    def rank(self, rating: Rating) -> tuple[float, ...]:
        """Return what is larger for a better rating: its load, then its speed, then its quality.

        For the least latency the speed at its share of the load comes first, if all copies carry
        that. Of what fails, what fails by least is better.
        """
        if rating.point is None:
            over = rating.binding.needs / rating.binding.has if rating.binding.has > 0 else 1e9
            return (-over, 0.0, -rating.formats.kl)
        load, found = rating.load(self.workload), rating.point
        if not self._is_for_latency:
            return (load, -found.tpot_s, -rating.formats.kl)
        copies = most_copies(rating.layout, self.workload.max_price_per_hour)
        share = asked_load(self.workload) / max(1, copies)
        if share > load:
            return (0.0, load, -rating.formats.kl)
        _, at = self.at_load(rating, share).settled
        return (1.0, -answer_s(self.workload, at.ttft_s, at.tpot_s), -rating.formats.kl)

    def at_most(self, engine: EngineSetup, room: tuple[int, ...], *, start: int = 0) -> Rating:
        """Return the engine at the largest load of the grid at which everything holds.

        The grid is searched from its index `start`, in steps that grow, then by bisection.
        """
        trial = LoadTrial(self, engine, room)
        grid = running_grid()
        low, high = -1, len(grid)
        found: Point | None = None
        at, stride = min(start, len(grid) - 1), 1
        while high - low > 1:
            tried = trial.point(float(grid[at]))
            if tried is not None:
                low, found = at, tried
            else:
                high = at
            if low > -1 and high < len(grid):
                at = (low + high) // 2
            else:
                at = min(low + stride, high - 1) if low >= 0 else max(high - stride, low + 1)
                stride *= 2
        beyond = float(grid[min(high, len(grid) - 1)])
        return self._rating(trial, found, beyond)

    def sharpened(self, rating: Rating, *, least: float = 0.0) -> Rating:
        """Return a rating of the grid at a load between its points, SHARP halvings closer.

        It stays as it is if it cannot have `least` running sequences.
        """
        if rating.point is None or rating.engine is None:
            return rating
        trial = LoadTrial(self, rating.engine, rating.room)
        low, high, found = rating.point.running, rating.beyond, rating.point
        if least > low:
            tried = trial.point(least)
            if tried is None:
                return rating
            low, found = least, tried
        for _ in range(SHARP):
            middle = (low + high) / 2
            tried = trial.point(middle)
            if tried is not None:
                low, found = middle, tried
            else:
                high = middle
        return self._rating(trial, found, high)

    def _rating(self, trial: LoadTrial, found: Point | None, beyond: float) -> Rating:
        engine = trial.engine
        if found is None:
            return Rating(engine.layout, engine.formats, trial.binding(beyond))
        slots = self.max_num_seqs(engine, found)
        return Rating(
            engine.layout, engine.formats, NOT_ASKED, engine, found, slots, trial.room, beyond
        )

    def at_load(self, rating: Rating, load: float) -> Rating:
        """Return a rated engine at a smaller load (deploy.placement.search.rating.load_of)."""
        engine, found = rating.settled
        most = rating.load(self.workload)
        if load >= most:
            return dataclasses.replace(rating, most_load=most)
        steps = self.steps_of(engine)
        low, high = 0.0, found.running
        for _ in range(40):
            middle = (low + high) / 2
            tried = self.point(engine, steps, middle)
            if tried is None or load_of(tried, self.workload) > load:
                high = middle
            else:
                low, found = middle, tried
            if high - low < 1e-3 * high:
                break
        return dataclasses.replace(rating, point=found, most_load=most)

    def point(self, engine: EngineSetup, steps: EngineSteps, running: float) -> Point | None:
        """Return the engine's state with so many running sequences."""
        shape = EngineShape(engine.layout.num_attention, engine.batched_tokens)
        return point(steps, self.workload, shape, running)

    def max_num_seqs(self, engine: EngineSetup, found: Point) -> int:
        """Return max_num_seqs: what the node with the largest share needs at the p95."""
        need = high_running(self.workload, found) * max(engine.weights)
        return max(1, min(MAX_SEQUENCES, engine.batched_tokens, -int(-need // 1)))


class LoadTrial:
    """Tries one engine at loads, and says what does not hold there."""

    def __init__(self, rater: Rater, engine: EngineSetup, room: tuple[int, ...]) -> None:
        self._rater = rater
        self._workload = rater.workload
        self.engine = engine
        self.room = room
        self._steps = rater.steps_of(engine)

    def point(self, running: float) -> Point | None:
        """Return the engine's state with `running` sequences if all limits and targets hold."""
        targets = self._workload.targets
        # Of requests that come whatever happens so many run at the p95.
        if self._workload.users is None and self._limit(_high(running)):
            return None
        # A token takes at least a step that only decodes, at the p95 one of so many.
        at_p95 = targets.percentile == "p95" and self._workload.users is None
        least = _high(running) if at_p95 else running
        if targets.tpot_s is not None and self._steps.step_s(least, None) > targets.tpot_s:
            return None
        found = self._rater.point(self.engine, self._steps, running)
        if found is None or self._missed(found):
            return None
        return None if self._limit(high_running(self._workload, found)) else found

    def binding(self, running: float) -> Binding:
        """Return what does not hold with `running` sequences."""
        found = self._rater.point(self.engine, self._steps, running)
        high = _high(running) if found is None else high_running(self._workload, found)
        limit = self._limit(high)
        if limit is not None:
            return limit
        if found is None:
            return Binding("prefill", "prompts would arrive faster than they are computed", 1, 1)
        targets, missed = self._workload.targets, self._missed(found)
        if missed == "tpot":
            assert targets.tpot_s is not None
            return self._tpot_binding(found, self.high_tpot_s(found), targets.tpot_s)
        if missed == "ttft":
            assert targets.ttft_s is not None
            text = (
                f"TTFT {milliseconds(found.ttft_s)} > {milliseconds(targets.ttft_s)}: a step with "
                f"prompts takes {milliseconds(found.mixed_s)}"
            )
            return Binding("ttft", text, found.ttft_s, targets.ttft_s)
        return Binding("sequences", "more was not tried", running, running)

    def _limit(self, high: float) -> Binding | None:
        """Return what has no room for `high` sequences."""
        for tokens, weight in zip(self.room, self.engine.weights, strict=True):
            need = high * weight * self._rater.clock.context
            if need > tokens:
                text = f"keys of {need:.0f} tokens per node, and there is room for {tokens}"
                return Binding("memory", text, need, tokens)
        need, most = high * max(self.engine.weights), min(MAX_SEQUENCES, self.engine.batched_tokens)
        if need <= most:
            return None
        text = f"{need:.0f} sequences at once on a node, which advances {most} at most"
        return Binding("sequences", text, need, most)

    def _missed(self, found: Point) -> Literal["tpot", "ttft"] | None:
        """Return the target that a point misses."""
        targets = self._workload.targets
        if targets.tpot_s is not None and self.high_tpot_s(found) > targets.tpot_s:
            return "tpot"
        return "ttft" if targets.ttft_s is not None and found.ttft_s > targets.ttft_s else None

    def high_tpot_s(self, found: Point) -> float:
        """Return the TPOT at the targets' percentile."""
        if self._workload.targets.percentile == "p50":
            return found.tpot_s
        high = high_running(self._workload, found)
        return found.tpot_s * self._steps.step_s(high, None) / found.decode_s

    def _tpot_binding(self, found: Point, tpot_s: float, target_s: float) -> Binding:
        step = self._steps.step(found.running, None)
        parts = {
            "attention": step.attention_s,
            "experts": step.experts_s,
            "the link": max(2 * step.link_s, step.card_s),
            "the head and sampling": step.fixed_s,
        }
        name = max(parts, key=lambda each: parts[each])
        text = (
            f"TPOT {milliseconds(tpot_s)} > {milliseconds(target_s)}: {name} "
            f"{milliseconds(parts[name])} of a step of {milliseconds(step.step_s)}"
        )
        return Binding("tpot", text, tpot_s, target_s)


def _high(running: float) -> float:
    return running + Z95 * math.sqrt(running)


def budgets_of(layout: EngineLayout) -> tuple[int, ...]:
    """Return the tokens per step of an attention node that are tried."""
    return GPU_BUDGETS if layout.attention[0][0].device.is_gpu else CPU_BUDGETS


def _micro_batches(layout: EngineLayout) -> range:
    """Return the numbers of micro-batches that are tried: without a link there is one."""
    if layout.kind == "one_process" or not layout.experts:
        return range(1, 2)
    return range(1, MAX_MICRO_BATCHES + 1)


def milliseconds(seconds: float) -> str:
    """Return a time for people."""
    return f"{seconds * 1e3:.4g} ms" if seconds < 10 else f"{seconds:.1f} s"
