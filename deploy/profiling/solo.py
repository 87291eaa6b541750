"""Times each side of an engine alone, on a grid: the tables of a device's profile.

Owns the grids, the order of visits and the statistic. All points are visited in turn, round after
round, so that a disturbance of the machine hits all alike, and other load only adds time: the lower
quartile of a point's samples counts. Knows no process and no file. Called by worker.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final, NamedTuple

import torch

from attention_nodes.step.absent_experts import AbsentExperts
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.model_runner import ModelRunner
from deploy.placement.devices import AXES, Operation, Table
from deploy.placement.shapes import ModelShape
from deploy.profiling.hops import CAPACITY, Durations, add_durations, lower_quartile
from deploy.profiling.slices import ATTENTION_BYTES, GROWTH, Measured, rig_of
from deploy.rig.nodes import Rig
from kernels.runtime import Runtime
from m2n_comm.net import ExpertBatch
from models.description.parts import LayerConfig
from topspin.messages import StepPlan
from topspin.plan.precision import Format, format_of, rules_of
from topspin.trace import Kind, Ring


class Grid(NamedTuple):
    """The points of all tables, and how often each is measured.

    Decoding: `rows` sequences over `keys` cached keys together. Prompts: `chunks` from `starts` on.
    Experts: `touched` different ones with `pairs` rows each.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    keys: tuple[int, ...] = (256, 2048, 16384)
    chunks: tuple[int, ...] = (16, 64, 256, 512)
    starts: tuple[int, ...] = (0, 512, 2048)
    touched: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    pairs: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
    rounds: int = 5
    steps: int = 3
    budget_s: float = 12.0

    @property
    def most_keys(self) -> int:
        """Return the keys that the cache must hold."""
        return max(*self.keys, max(self.starts) + max(self.chunks))


PROMPT_LAYERS: Final = 6

Name = tuple[str, float, float]
"""A table, and a point on its axes (0: it has no second one)."""


class Visit(NamedTuple):
    """A point and what measures it; each call returns samples of a layer's seconds."""

    name: Name
    run: Callable[[], Sequence[float]]


def interleaved(
    visits: Sequence[Visit], *, rounds: int, budget_s: float, done: Callable[[], None]
) -> dict[Name, float]:
    """Run all visits in turn, for `rounds` rounds or until `budget_s` is over (two at least).

    Each round has another order: next to each other, visits of the same experts would find weights
    in caches, as no step does. Returns each one's lower quartile. `done` is called after each visit
    of the first `rounds`.
    """
    found: dict[Name, list[float]] = {visit.name: [] for visit in visits}
    order = Random(0)
    started = time.perf_counter()
    for count in range(rounds):
        if count >= 2 and time.perf_counter() - started > budget_s:
            break
        for visit in order.sample(visits, len(visits)):
            found[visit.name] += visit.run()
            done()
    return {name: lower_quartile(samples) for name, samples in found.items()}


class NoExperts(AbsentExperts):
    """The net of a node that is measured alone: answers are whatever the buffer holds.

    Nothing is done for them, so that a recorded step has attention's work only.
    """

    is_graph_safe = True

    def combine(self, micro_batch: int, layer: int, out: torch.Tensor) -> torch.Tensor:
        return out


def samples_of(ring: Ring, kind: Kind) -> list[float]:
    """Return how long each event of a kind took, and empty the ring."""
    found: Durations = {}
    add_durations(found, ring, (kind,))
    return found.get(kind, [])


class Attention:
    """An attention node that is visited."""

    def __init__(self, rig: Rig, decoder: Decoder, runner: ModelRunner, *, steps: int) -> None:
        self._runner, self._decoder = runner, decoder
        self._steps = steps
        self._batch = rig.batch(range(runner.num_blocks))
        self._net = NoExperts()
        # A GPU's work has no stamps: there a step's time counts.
        self._ring = None if runner.runtime.is_asynchronous else Ring(CAPACITY)
        runner.trace = self._ring
        self.fixed: dict[int, list[float]] = {}
        """By rows, the seconds of steps outside their layers."""

    def decode(self, rows: int, keys: int) -> list[float]:
        """Return samples of the seconds of a layer in which `rows` sequences decode."""
        self._batch.begin(rows, max(1, keys // rows) - 1, growth=GROWTH)
        # The first step has new inputs.
        fixed, samples = self._visit([self._batch.decode() for _ in range(1 + self._steps)])
        self.fixed.setdefault(rows, []).extend(fixed[1:])
        return samples

    def prompt(self, chunk: int, start: int) -> list[float]:
        """Return samples of the seconds of a layer for a prompt's chunk."""
        decoder, layers = self._decoder, self._decoder.layers
        # Such steps are not recorded, and too long for the caches to matter.
        decoder.layers = layers[:PROMPT_LAYERS]
        try:
            return self._visit(self._batch.prefill(chunk, start=start, most=chunk))[1]
        finally:
            decoder.layers = layers

    def _visit(self, plans: Sequence[StepPlan]) -> tuple[list[float], list[float]]:
        """Return the seconds of steps outside their layers, and samples of a layer's."""
        fixed, samples = [], []
        for plan in plans:
            timings = self._runner.execute(plan, self._net, index=0).timings
            fixed.append(timings.total_s - timings.attention_s)
            samples.append(timings.attention_s / len(self._decoder.layers))
        if self._ring is not None:
            samples = samples_of(self._ring, Kind.ATTENTION) or samples
        return fixed, samples


class TimedLayers:
    """An operation on all layers of a slice, recorded as nodes record it, and timed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ring = None if runtime.is_asynchronous else Ring(CAPACITY)
        self._stamps = runtime.stamps_of(self._ring)
        self._replays: dict[object, Callable[[], None]] = {}

    def time(self, key: object, works: Sequence[Callable[[], object]]) -> list[float]:
        """Return samples of the seconds of a layer; `works` has each layer's."""
        if key not in self._replays:
            self._run(works)
            self._replays[key] = self._runtime.capture(partial(self._run, works))
            self._replays[key]()
        self._runtime.synchronize()
        started = time.perf_counter()
        self._replays[key]()
        self._runtime.synchronize()
        whole_s = (time.perf_counter() - started) / len(works)
        if self._ring is None:
            return [whole_s]
        return samples_of(self._ring, Kind.COMPUTED) or [whole_s]

    def _run(self, works: Sequence[Callable[[], object]]) -> None:
        for layer, work in enumerate(works):
            work()
            if self._stamps is not None:
                self._stamps.stamp(Kind.COMPUTED, layer)


def expert_batches(rig: Rig, *, touched: int, pairs: int) -> list[ExpertBatch]:
    """Return for each layer a batch with `pairs` rows for each of `touched` experts.

    A row has up to top_k of them, all different; other layers have other experts.
    """
    moe, device = rig.model.moe, rig.runtime.device
    assert moe is not None
    each = min(touched, moe.top_k)
    total = touched * pairs
    num_rows = -(-total // each)
    order = torch.arange(num_rows * each)
    slots = torch.where(order < total, order % touched, -1).view(num_rows, each)
    rows = torch.randn(num_rows, rig.model.hidden_size).to(rig.dtype).to(device)
    stride = moe.num_experts // touched
    found = []
    for layer in range(rig.model.num_layers):
        padded = torch.full((num_rows, moe.top_k), -1, dtype=torch.int32)
        padded[:, :each] = torch.where(slots < 0, -1, (slots * stride + layer) % moe.num_experts)
        found.append(
            ExpertBatch(
                micro_batch=0,
                layer=layer,
                part=0,
                hidden=rows,
                slots=padded.to(device),
                weights=torch.full((num_rows, moe.top_k), 1.0 / moe.top_k, device=device),
                row_counts=(num_rows,),
            )
        )
    return found


class Sides:
    """Both sides of a slice, made once; measure() may run in a fork of the process that made them.

    `shape` is the whole model's; `mlp_widths` are those of its dense MLPs and shared experts.
    """

    def __init__(self, measured: Measured, shape: ModelShape, mlp_widths: Sequence[int]) -> None:
        self.measured, self.shape = measured, shape
        self.rig = rig_of(measured)
        self.decoder = self.rig.decoder(measured.num_blocks)
        self.runner = self.rig.runner(self.decoder)
        self.experts = None if measured.model.moe is None else self.rig.experts()
        self._mlps = {width: make_mlps(measured, width) for width in mlp_widths}

    def measure(self, grid: Grid, *, threads: int, done: Callable[[], None]) -> list[Table]:
        """Return the tables of this format."""
        return self.tables(self.points([grid], done=done), threads)

    def points(self, grids: Sequence[Grid], *, done: Callable[[], None]) -> dict[Name, float]:
        """Return the seconds at the points of all grids, measured in one run as the first says."""
        runtime = self.runner.runtime
        runtime.prepare_capture()
        if runtime.is_asynchronous:
            self.runner.record_steps(NoExperts(), self.rig.config, check=lambda: None)
        first = grids[0]
        attention = Attention(self.rig, self.decoder, self.runner, steps=first.steps)
        visits = [visit for grid in grids for visit in self._visits(grid, attention)]
        # The first visit of each compiles, allocates and records.
        for visit in visits:
            visit.run()
            done()
        attention.fixed.clear()
        found = interleaved(visits, rounds=first.rounds, budget_s=first.budget_s, done=done)
        heads = {("head", rows, 0): lower_quartile(each) for rows, each in attention.fixed.items()}
        return found | heads

    def num_visits(self, grid: Grid) -> int:
        """Return how often measure() calls `done` at most."""
        num_experts = self.shape.num_experts
        touched = {min(each, num_experts) for each in grid.touched} if self.experts else set()
        visits = len(grid.rows) * (len(grid.keys) + len(self._mlps))
        visits += len(grid.chunks) * len(grid.starts) + len(touched) * len(grid.pairs)
        return (1 + grid.rounds) * visits

    def _visits(self, grid: Grid, attention: Attention) -> list[Visit]:
        layers = TimedLayers(self.runner.runtime)
        return [
            *(
                Visit(("attention", rows, keys), partial(attention.decode, rows, keys))
                for rows in grid.rows
                for keys in grid.keys
            ),
            *(
                Visit(("prefill", chunk, start), partial(attention.prompt, chunk, start))
                for chunk in grid.chunks
                for start in grid.starts
            ),
            *self._expert_visits(grid, layers),
            *self._mlp_visits(grid, layers),
        ]

    def _expert_visits(self, grid: Grid, layers: TimedLayers) -> list[Visit]:
        experts, moe = self.experts, self.measured.model.moe
        if experts is None or moe is None:
            return []

        visits = []
        for touched in sorted({min(each, moe.num_experts) for each in grid.touched}):
            for pairs in grid.pairs:
                batches = expert_batches(self.rig, touched=touched, pairs=pairs)
                name = ("experts", touched, pairs)
                works = [partial(experts.compute, batch) for batch in batches]
                visits.append(Visit(name, partial(layers.time, name, works)))
        return visits

    def _mlp_visits(self, grid: Grid, layers: TimedLayers) -> list[Visit]:
        visits = []
        for width, decoder in self._mlps.items():
            for count in grid.rows:
                like = torch.randn(count, self.rig.model.hidden_size)
                rows = like.to(self.rig.dtype).to(self.rig.runtime.device)
                name = (f"mlp {width}", count, 0)
                works = [partial(decoder.local_mlp, each, rows) for each in decoder.layers]
                visits.append(Visit(name, partial(layers.time, name, works)))
        return visits

    def tables(self, found: Mapping[Name, float], threads: int) -> list[Table]:
        """Return the tables of points that make up whole grids."""
        shape, weight_format = self.shape, self.measured.weight_format
        head_format = format_of(rules_of(weight_format), "lm_head")
        kinds: list[tuple[str, Operation, tuple[int, ...], Format]] = [
            ("attention", "attention", shape.attention_key(), weight_format),
            ("prefill", "prefill", shape.attention_key(), weight_format),
            ("experts", "experts", shape.experts_key(), weight_format),
            ("head", "head", shape.head_key(), head_format),
        ]
        for width in self._mlps:
            mlp_key = (shape.hidden_size, width, shape.itemsize)
            kinds.append((f"mlp {width}", "mlp", mlp_key, weight_format))
        tables = []
        for name, operation, key, coded in kinds:
            points = {point[1:]: each_s for point, each_s in found.items() if point[0] == name}
            if points:
                tables.append(_table(points, operation, key, coded, threads))
        return tables


def _table(
    points: Mapping[tuple[float, float], float],
    operation: Operation,
    shape: tuple[int, ...],
    weight_format: Format,
    threads: int,
) -> Table:
    firsts, seconds = (tuple(sorted({point[idx] for point in points})) for idx in (0, 1))
    return Table(
        operation=operation,
        shape=shape,
        format=weight_format,
        threads=threads,
        axes=(firsts, seconds) if len(AXES[operation]) == 2 else (firsts,),
        seconds=tuple(points[one, two] for one in firsts for two in seconds),
    )


def make_mlps(measured: Measured, width: int) -> Decoder:
    """Return a decoder whose layers have dense MLPs of `width`, and next to no vocabulary."""
    count = -(-ATTENTION_BYTES // (3 * width * measured.model.hidden_size * 2))
    model = replace(
        measured.model,
        vocab_size=64,
        intermediate_size=width,
        mlp_bias=False,
        layers=(LayerConfig(),) * min(count, 4 * measured.model.num_layers),
    )
    return rig_of(measured._replace(model=model)).decoder(1)
