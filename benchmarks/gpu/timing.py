"""The time of a call on a device, and the device's measured limits.

Owns the clock of the GPU benchmark: calls are recorded into a CUDA graph, as the engine
replays them, and replays are timed by the device's events, so that neither launches nor the
host's noise count; on the host (device cpu, for tests) it is the host's clock, whose times are
not speeds. The ceilings are measured by a plain copy and by cuBLAS, not taken from the vendor.
Knows no kernel of Topspin. Called by benchmarks.gpu.rooflines and benchmarks.gpu.decode.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.part import Part
from kernels.runtime import Replay, Runtime

REPLAYS: Final = 11
MIN_REPLAY_S: Final = 2e-3
"""The least time of a replay of short calls: an event's resolution is 0.5 us."""
MAX_CALLS: Final = 200
GRAPH: Final = "graph"
STREAM: Final = "stream"


class Timed(NamedTuple):
    """Seconds of one call."""

    median_s: float
    calls: int
    """The number of calls in a replay."""
    by: str
    """"graph", or "stream" if the calls could not be recorded."""


def time_once(runtime: Runtime, enqueue: Callable[[], object]) -> float:
    """Return the device's seconds for the work enqueued by `enqueue`."""
    if not runtime.is_asynchronous:
        begin = time.perf_counter()
        enqueue()
        return max(time.perf_counter() - begin, 1e-9)
    stream = runtime.current_stream()
    first = stream.record(timed=True)
    enqueue()
    last = stream.record(timed=True)
    last.wait()
    return max(last.seconds_since(first), 1e-9)


def calls_for(call_s: float, copies: int) -> int:
    """Return the number of calls in a replay: enough for the clock, and to use every copy."""
    wanted = int(MIN_REPLAY_S / max(call_s, 1e-9)) + 1
    return max(min(wanted, MAX_CALLS), copies)


def time_call(
    runtime: Runtime, call: Callable[[int], object], copies: int = 1, replays: int = REPLAYS
) -> Timed:
    """Time call(i) for i = 0, 1, ..: the median over several replays.

    The first call compiles and is not timed.
    """
    if not runtime.is_asynchronous:
        seconds = time_once(runtime, lambda: call(0))
        return Timed(seconds, 1, STREAM)
    call(0)
    runtime.synchronize()
    num_calls = calls_for(time_once(runtime, lambda: call(1)), copies)
    replay, by = _recorded(runtime, call, num_calls)
    # A single call takes as long as its launch; a replay may need more calls.
    wanted = calls_for(time_once(runtime, replay) / num_calls, copies)
    if wanted > 2 * num_calls:
        num_calls = wanted
        replay, by = _recorded(runtime, call, num_calls)
    times = [time_once(runtime, replay) / num_calls for _ in range(replays)]
    return Timed(statistics.median(times), num_calls, by)


def _recorded(
    runtime: Runtime, call: Callable[[int], object], num_calls: int
) -> tuple[Replay, str]:
    """Return a recording of the calls, or the calls if they cannot be recorded; run them once."""

    def body() -> None:
        for idx in range(num_calls):
            call(idx)

    replay: Replay = body
    by = STREAM
    # A failed recording may leave an error behind, which the calls then raise.
    with contextlib.suppress(RuntimeError):
        replay, by = runtime.capture(body), GRAPH
    replay()
    runtime.synchronize()
    return replay, by


def copy_bandwidth(runtime: Runtime, *, is_quick: bool = False) -> float:
    """Return the bytes per second, read and written, of a copy far larger than any cache."""
    num_bytes = 1 << (20 if is_quick else 32)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=runtime.device)
    target = torch.empty_like(source)
    timed = time_call(runtime, lambda _: target.copy_(source))
    return 2 * num_bytes / timed.median_s


def read_bandwidth(runtime: Runtime, *, is_quick: bool = False) -> float:
    """Return the bytes per second of a sum over an array far larger than any cache."""
    num_bytes = 1 << (20 if is_quick else 32)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=runtime.device)
    # Enough rows for all processors: the sum of a single row would be a tree of few programs.
    rows = source.view(4096, -1)
    out = torch.empty(4096, device=runtime.device)
    timed = time_call(runtime, lambda _: torch.sum(rows, 1, out=out))
    return num_bytes / timed.median_s


def measure_bandwidths(part: Part, runtime: Runtime, *, is_quick: bool) -> float:
    """Record both bandwidths and return the greater one."""
    rates = {
        "copy": copy_bandwidth(runtime, is_quick=is_quick),
        "read": read_bandwidth(runtime, is_quick=is_quick),
    }
    for name, rate in rates.items():
        line = f"{name} bandwidth: {rate / 1e12:.3f} TB/s"
        part.figure(line, of="ceiling", name=name, per_s=rate)
    return max(rates.values())


def matmul_rate(runtime: Runtime, dtype: torch.dtype, *, is_quick: bool = False) -> float:
    """Return the operations per second of a large square product, of bf16 or of fp8 (e4m3).

    Raises RuntimeError or NotImplementedError if the device does not support the product.
    """
    size = 64 if is_quick else 8192
    # Zeros would take less power, so the clock would be higher than in real use.
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=runtime.device) for _ in range(2))
    out = torch.empty(size, size, dtype=torch.bfloat16, device=runtime.device)
    multiply: Callable[[int], Tensor]
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=runtime.device)
        left, right = a.to(dtype), b.to(dtype).t()

        def multiply(_: int) -> Tensor:
            return torch._scaled_mm(
                left,
                right,
                scale_a=one,
                scale_b=one,
                out_dtype=torch.bfloat16,
                # Hopper's peak holds for this: sums in less than fp32 between instructions.
                use_fast_accum=True,
            )
    else:

        def multiply(_: int) -> Tensor:
            return torch.mm(a, b, out=out)

    return 2 * size**3 / time_call(runtime, multiply).median_s
