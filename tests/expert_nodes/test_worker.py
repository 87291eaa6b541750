"""A ticket in one recording: its results, and when a recording may serve another ticket.

With interpreted kernels without a GPU; on a GPU with its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_nodes.versions import Held
from expert_nodes.worker import TicketGraphs, run_ticket
from kernels.runtime import Replay, Runtime, open_runtime
from m2n_comm.net import ExpertBatch
from tests.checkpoints import make_checkpoint
from tests.expert_nodes.nodes import load, prepare, reader_of, taken
from tests.m2n_comm.gpu.ipc_fleet import ticket_of
from topspin.messages import StepTicket

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
FIRST: Held = ((0, 1), (5, 6))
SECOND: Held = ((4, 1), (5, 6))
WINDOW, WIDTH = 4, 32


class WindowNet:
    """Graph-safe windows of 4 rows for each of 2 attention nodes, and the answers.

    A batch has a bucket's rows of every participant; those beyond a participant's count get slot -1
    and keep the contents of an earlier frame.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.trace = None
        self.epoch = 0
        self.local: frozenset[int] = frozenset()
        self.is_graph_safe = True
        self.calls: list[str] = []
        device, windows = runtime.device, (2, 2, 2 * WINDOW)
        self._hidden = torch.full((*windows, WIDTH), float("nan"), device=device)
        self._slots = torch.zeros(*windows, 2, dtype=torch.int32, device=device)
        self._weights = torch.ones(*windows, 2, device=device)
        self._counts = torch.zeros(2, 2, 2, dtype=torch.int64, device=device)
        self.answers = torch.full((*windows, WIDTH), float("nan"), device=device)
        self._ticket: StepTicket | None = None

    def begin(self, ticket: StepTicket) -> None:
        self.calls.append("begin")
        self._ticket = ticket

    def put(self, layer: int, mb: int, bucket: int, rows: list[tuple[Tensor, Tensor]]) -> None:
        """Let each participant send hidden [n, WIDTH] and slots [n, 2]."""
        for participant, (hidden, slots) in enumerate(rows):
            low, count = participant * bucket, len(hidden)
            self._hidden[layer, mb, low : low + count] = hidden
            self._slots[layer, mb, low : low + count] = slots
            self._counts[layer, mb, participant] = count

    def gather(self, mb: int, layer: int) -> Iterator[ExpertBatch]:
        assert self._ticket is not None
        bucket, count = self._ticket.row_buckets[mb], len(self._ticket.participants)
        rows = bucket * count
        place = torch.arange(rows, device=self._hidden.device)
        is_there = place % bucket < self._counts[layer, mb].index_select(0, place // bucket)
        slots = self._slots[layer, mb, :rows].masked_fill(~is_there[:, None], -1)
        hidden, weights = self._hidden[layer, mb, :rows], self._weights[layer, mb, :rows]
        version = self._ticket.table_version
        yield ExpertBatch(mb, layer, 0, hidden, slots, weights, (bucket,) * count, version)

    def reply(self, batch: ExpertBatch, partial: Tensor) -> None:
        self.answers[batch.layer, batch.micro_batch, : len(partial)].copy_(partial)

    def finish(self) -> None:
        self._runtime.synchronize()
        self.calls.append("finish")


class CountingRuntime:
    """A runtime, counting recordings and their replays."""

    def __init__(self) -> None:
        self._runtime = open_runtime(DEVICE)
        self.captured = 0
        self.replayed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def capture(self, body: Callable[[], None]) -> Replay:
        self.captured += 1
        replay = self._runtime.capture(body)

        def counted() -> None:
            self.replayed += 1
            replay()

        return counted


class World:
    """An expert node with Triton's kernels in recordings, and a plain torch oracle of it."""

    def __init__(self, path: Path) -> None:
        self.runtime = CountingRuntime()
        self._reader = reader_of(path, device=DEVICE)
        self.experts, self._oracle = (
            load(path, FIRST, kernels=each, device=DEVICE, runtime=self.runtime)
            for each in ("triton", "reference")
        )
        self.graphs = TicketGraphs(self.runtime)
        self.net, self._step = WindowNet(self.runtime), 0

    def prepare(self, version: int, held: Held) -> None:
        for experts in (self.experts, self._oracle):
            prepare(experts, version, held, self._reader)

    def serve(
        self, *buckets: int, participants: tuple[int, ...] = (0, 1), version: int = 1
    ) -> None:
        """Serve a ticket of random rows, fewer than the buckets, and check every answer."""
        self._step += 1
        generator = torch.Generator().manual_seed(self._step)
        ticket = ticket_of(self._step, buckets=buckets, participants=participants, version=version)
        sent: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for layer in range(2):
            for mb, bucket in enumerate(buckets):
                rows = []
                for participant in participants:
                    count = (self._step + layer + mb + participant) % (bucket + 1)
                    hidden = torch.randn(count, WIDTH, generator=generator)
                    slots = torch.randint(-1, 2, (count, 2), generator=generator).int()
                    rows.append((hidden.to(DEVICE), slots.to(DEVICE)))
                sent[layer, mb] = rows
                self.net.put(layer, mb, bucket, rows)
        self.net.answers.fill_(float("nan"))
        run_ticket(self.net, self.experts, ticket, graphs=self.graphs)
        for (layer, mb), rows in sent.items():
            for position, (hidden, slots) in enumerate(rows):
                count, low = len(hidden), position * buckets[mb]
                weights = torch.ones(count, 2, device=DEVICE)
                batch = ExpertBatch(mb, layer, 0, hidden, slots, weights, (count,), version)
                want = self._oracle.compute(batch)
                got = self.net.answers[layer, mb, low : low + count]
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    @property
    def recorded(self) -> tuple[int, int]:
        """Return how many recordings were made, and how often one was replayed."""
        return self.runtime.captured, self.runtime.replayed

    def counts_agree(self) -> bool:
        return taken(self.experts) == taken(self._oracle)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tickets")
    return make_checkpoint(directory, "mixtral", hidden_size=WIDTH, intermediate_size=32)


@pytest.fixture
def world(path: Path) -> World:
    return World(path)


def test_tickets_of_one_shape_are_one_recording_whatever_rows_come(world: World) -> None:
    for replayed in (0, 1, 2):  # run, recorded, replayed
        world.serve(1, 4)
        assert world.recorded == (min(replayed, 1), replayed)
    world.serve(1, 4, participants=(0, 2))  # other participants
    assert world.recorded == (1, 3)
    assert world.counts_agree()
    assert world.net.calls == ["begin", "finish"] * 4


@pytest.mark.slow
def test_other_buckets_or_numbers_of_participants_are_other_recordings(world: World) -> None:
    for _ in range(2):
        world.serve(2)
        world.serve(1)
        world.serve(2, participants=(1,))
    assert world.recorded == (3, 3)
    assert len(world.graphs) == 3


@pytest.mark.slow
def test_a_table_switch_makes_recordings_anew_and_counts_by_version(world: World) -> None:
    for _ in range(2):
        world.serve(2)
    world.prepare(2, SECOND)
    world.serve(2, version=2)
    assert world.recorded == (1, 1)
    for _ in range(2):
        world.serve(2, version=2)
    assert world.recorded == (2, 3)
    assert world.experts.versions == [2]
    assert world.counts_agree()


def test_a_net_that_cannot_be_recorded_is_served_batch_by_batch(world: World) -> None:
    world.net.is_graph_safe = False
    for _ in range(2):
        world.serve(2)
    assert world.recorded == (0, 0)


@pytest.mark.slow
def test_another_epoch_or_net_and_a_closed_one_leave_no_recording(world: World) -> None:
    for _ in range(2):
        world.serve(2)
    world.net.epoch = 1
    for _ in range(2):
        world.serve(2)
    assert world.recorded == (2, 2)
    world.net = WindowNet(world.runtime)
    world.net.epoch = 1
    for _ in range(2):
        world.serve(2)
    assert world.recorded == (3, 3)
    world.graphs.clear()
    assert len(world.graphs) == 0
