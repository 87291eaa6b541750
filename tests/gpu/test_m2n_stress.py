"""Both sides of M2N on one device, each on its own stream, for any number of frames.

On a GPU the kernels of the two sides wait for each other while they run, in CUDA graphs: flags,
counters, acquire and release work as in real use. Every frame's sums are compared exactly on the
device with the expected ones, and times of frames give the histogram of round trips. Without a GPU
the sides take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from kernels.m2n_windows import WindowShape
from kernels.triton.m2n.wait import now
from tests.kernels.triton.m2n.bench import Bench, runtime_of

ON_GPU = torch.cuda.is_available()
NUM_EXPERTS = 4
PERCENTILES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)


@triton.jit
def stamp(times_ptr: tl.tensor, count_ptr: tl.tensor) -> None:
    """Write down the time, in nanoseconds."""
    place = tl.load(count_ptr)
    tl.store(times_ptr + place, now(place))
    tl.store(count_ptr, place + 1)


@dataclass(frozen=True)
class Stress:
    """Frames of `rows` rows, in graphs of `per_graph` frames."""

    rows: int
    hidden: int
    frames: int
    per_graph: int
    wire: torch.dtype = torch.bfloat16


CASES = (
    [Stress(4, 2048, 100_000, 100), Stress(128, 2048, 5000, 100)]
    if ON_GPU
    else [Stress(2, 32, 6, 3)]
)


class Sides:
    """The work of each side for one frame; the attention side counts wrong numbers."""

    def __init__(self, stress: Stress, device: torch.device) -> None:
        self.shape = WindowShape(
            rows=stress.rows,
            hidden_size=stress.hidden,
            top_k=2,
            wire=stress.wire,
            answer=torch.bfloat16,
        )
        self.bench = Bench(self.shape, device)
        self.attention = self.bench.attention_port()
        self.expert = self.bench.expert_port(limits=(NUM_EXPERTS,), compute=torch.bfloat16)
        self.hidden = torch.zeros(stress.rows, stress.hidden, dtype=torch.bfloat16, device=device)
        self.experts = torch.tensor([[0, 2]] * stress.rows, device=device)
        self.weights = torch.full((stress.rows, 2), 2.0, device=device)
        self.slot_of = torch.arange(NUM_EXPERTS, dtype=torch.int32, device=device)[None, None]
        self.out = torch.zeros(stress.rows, stress.hidden, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.times = torch.zeros(stress.frames + stress.per_graph, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def send(self) -> None:
        """Dispatch rows that differ from frame to frame, so that stale ones show."""
        self.hidden.add_(1.0).remainder_(97.0)
        args = (self.hidden, self.experts, self.weights, self.slot_of)
        self.attention.dispatch(*args, layer=0)

    def serve(self) -> None:
        """Answer rows times their weight, a product that bf16 holds exactly."""
        joined = self.expert.gather(0, layer=0, num_participants=1, bucket=self.shape.rows)
        partial = joined.hidden * joined.weights[:, :1].bfloat16()
        self.expert.reply(partial, 0, num_participants=1)

    def receive(self) -> None:
        """Combine, and count inexact sums."""
        self.attention.combine(self.out, layer=0)
        self.wrong.add_((self.out != 2.0 * self.hidden.float()).sum())
        stamp[(1,)](self.times, self.count, num_warps=4)

    def rehearse(self) -> None:
        """Compile and run every kernel once, without sending or waiting."""
        self.bench.begin(0)
        self.send()
        self.serve()
        self.receive()
        self.bench.begin(1)
        for each in (self.wrong, self.count, self.times):
            each.zero_()


def run_at_once(sides: Sides, stress: Stress, device: torch.device) -> None:
    """Replay graphs of both sides on two streams."""
    runtime = runtime_of(device)

    def repeated(*bodies: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            for _ in range(stress.per_graph):
                for each in bodies:
                    each()

        return body

    attention = runtime.capture(repeated(sides.send, sides.receive))
    expert = runtime.capture(repeated(sides.serve))
    runtime.synchronize()
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    for _ in range(stress.frames // stress.per_graph):
        for stream, replay in zip(streams, (expert, attention), strict=True):
            with torch.cuda.stream(stream):
                replay()
    runtime.synchronize()


def run_in_turn(sides: Sides, stress: Stress) -> None:
    for _ in range(stress.frames):
        sides.send()
        sides.serve()
        sides.receive()


@pytest.mark.parametrize("stress", CASES, ids=lambda s: f"{s.rows} rows")
def test_every_frame_is_exact(
    stress: Stress, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    sides = Sides(stress, device)
    with torch.inference_mode():
        sides.rehearse()
        if ON_GPU:
            run_at_once(sides, stress, device)
        else:
            run_in_turn(sides, stress)
    assert [control.fault for control in sides.bench.controls] == [None, None]
    assert int(sides.count) == stress.frames
    assert int(sides.wrong) == 0
    assert torch.equal(sides.out, 2.0 * sides.hidden.float())
    trips_us = sides.times[: stress.frames].diff().double().cpu() / 1000
    quantiles = trips_us.quantile(torch.tensor(PERCENTILES, dtype=torch.float64))
    for share, trip_us in zip(PERCENTILES, quantiles.tolist(), strict=True):
        record_property(f"round_trip_us_p{100 * share:g}", round(trip_us, 2))
    assert (trips_us >= 0).all()
