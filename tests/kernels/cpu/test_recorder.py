"""Steps recorded as programs: the same work again, for new numbers; what no program can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu import ops
from kernels.cpu.attention import renew
from kernels.cpu.compiled.python_calls import call_again, call_python
from kernels.cpu.huge_pages import ALIGNMENT, CHUNK_BYTES
from kernels.cpu.recorder import CpuRuntime
from kernels.recordings import Recordings
from tests.kernels.cases.attention import Heads, attention_case
from topspin.trace import Kind, Ring, read_stamps


def run_often(
    body: Callable[[], Tensor], change: Callable[[int], None], recordings: Recordings[str]
) -> list[Tensor]:
    """Return the results of `body` after each change: run, recorded and replayed."""
    results: list[Tensor] = []
    out: list[Tensor] = []

    def step() -> None:
        out[:] = [body()]

    for turn in range(4):
        change(turn)
        recordings.run("step", step, None)
        results.append(out[0].clone())
    return results


@torch.inference_mode()
def test_a_replay_computes_with_the_numbers_of_its_time() -> None:
    torch.manual_seed(0)
    runtime = CpuRuntime()
    recordings: Recordings[str] = Recordings(runtime)
    x, residual = torch.zeros(3, 70).bfloat16(), torch.zeros(3, 70).bfloat16()
    weight, table = torch.randn(70).bfloat16(), torch.randn(9, 70).bfloat16()
    indices, slots = torch.tensor([4, 0, 8]), torch.randint(-1, 5, (2, 9), dtype=torch.int32)
    counts, found = torch.zeros(6, dtype=torch.int64), torch.tensor([1, 0, 3, 4])
    wide, copied = torch.zeros(3, 70), torch.zeros(3, 70)
    seen: list[Tensor] = []

    def change(turn: int) -> None:
        torch.manual_seed(turn)
        x.copy_(torch.randn(3, 70))
        residual.copy_(torch.randn(3, 70))
        indices.copy_(torch.randperm(9)[:3])
        wide.copy_(torch.randn(3, 70))

    def body() -> Tensor:
        rows = table[indices]
        rows += ops.add_rms_norm(x, residual, weight, eps=1e-5)
        rows.add_(wide)
        copied.copy_(rows)
        rows.copy_(copied.add_(wide))
        rows.clamp_(-0.7, 0.9)
        ops.add_counts(counts, found)
        seen[:] = [slots.index_select(1, indices)]
        return rows

    def expected(turn: int) -> Tensor:
        change(turn)
        return body()

    results = run_often(body, change, recordings)
    assert len(runtime.programs) == 1
    assert counts.tolist() == [4, 0, 12, 16, 4 * 3, 4]
    assert torch.equal(seen[0], slots[:, indices])
    for turn, result in enumerate(results):
        assert torch.equal(result, expected(turn))


@torch.inference_mode()
@pytest.mark.parametrize("obstacle", ["aten.sigmoid", "aten.item", "aten.mul", "aten.clamp_"])
def test_a_step_with_another_operation_runs_as_before(
    obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "recordings")
    runtime = CpuRuntime()
    recordings: Recordings[str] = Recordings(runtime)
    x, weight = torch.zeros(2, 16).bfloat16(), torch.ones(16).bfloat16()
    calls = []

    def body() -> Tensor:
        calls.append(1)
        normed = ops.rms_norm(x, weight, eps=1e-5)
        if obstacle == "aten.sigmoid":
            return normed.sigmoid()
        if obstacle == "aten.clamp_":
            return normed.clamp_(max=2)
        if obstacle == "aten.item":
            assert float(x[0, 0]) < 100
            return normed
        return normed * 2

    def change(turn: int) -> None:
        x[0] = turn + 1
        x[0, 0] = -1

    results = run_often(body, change, recordings)
    assert len(calls) == 4, "every step runs once"
    assert not runtime.programs
    assert len(caplog.messages) == 1
    assert f"not recorded: {obstacle}" in caplog.text
    assert not torch.equal(results[0], results[3])


@torch.inference_mode()
def test_replays_stamp_the_flight_recorder() -> None:
    ring, runtime = Ring(100), CpuRuntime()
    recordings: Recordings[str] = Recordings(runtime)
    trace = runtime.stamps_of(ring)
    assert trace is not None
    x, weight = torch.ones(1, 16).bfloat16(), torch.ones(16).bfloat16()

    def body() -> Tensor:
        normed = ops.rms_norm(x, weight, eps=1e-5)
        trace.stamp(Kind.ARRIVED, 12, 3, 65535)
        return normed

    def change(turn: int) -> None:
        trace.step = 2**40 + turn

    run_often(body, change, recordings)
    stamps = read_stamps(ring.dump())
    assert [stamp[1:] for stamp in stamps] == [
        (2**40 + turn, Kind.ARRIVED, 12, 3, 65535) for turn in range(4)
    ]
    times = [stamp.t_ns for stamp in stamps]
    assert times == sorted(times)
    assert runtime.stamps_of(None) is None


@torch.inference_mode()
def test_python_is_called_again_at_its_place_of_every_replay() -> None:
    """What it does is no op, whether a recording could hold that or not."""
    runtime = CpuRuntime()
    recordings: Recordings[str] = Recordings(runtime)
    numbers, doubled, ones = torch.zeros(3), torch.zeros(3), torch.ones(3)
    turns: list[float] = []

    def between() -> None:
        turns.append(numbers[0].item())
        numbers.mul_(2)

    def body() -> None:
        numbers.add_(ones)
        call_again(between)
        doubled.copy_(numbers)

    for turn in range(4):
        numbers.fill_(turn)
        recordings.run("step", body, None)
        assert doubled.tolist() == [2 * (turn + 1)] * 3
    assert turns == [1, 2, 3, 4]
    (program,) = runtime.programs
    assert program.kernels.count(call_python) == 1


@torch.inference_mode()
def test_recordings_share_the_memory_of_what_they_make() -> None:
    """Replayed in turn, each has the bits of its own plain step; more of them take no more."""
    torch.manual_seed(0)
    runtime = CpuRuntime()
    recordings: Recordings[int] = Recordings(runtime)
    weight, table = torch.randn(70).bfloat16(), torch.randn(9, 70).bfloat16()
    places: dict[int, int] = {}
    results: dict[int, Tensor] = {size: torch.zeros(size, 70).bfloat16() for size in range(1, 30)}
    indices = {size: torch.zeros(size, dtype=torch.int64) for size in results}

    def step(size: int) -> None:
        rows = table[indices[size]]
        normed = ops.rms_norm(rows, weight, eps=1e-5)
        places[size] = normed.data_ptr()
        rows += normed
        results[size].copy_(rows)

    sizes = []
    for turn in range(4):
        for size in sorted(results, reverse=turn == 3):
            indices[size].copy_(torch.randint(9, (size,)))
            recordings.run(size, lambda size=size: step(size), None)  # type: ignore[misc]
            rows = table[indices[size]]
            assert torch.equal(results[size], rows + ops.rms_norm(rows, weight, eps=1e-5))
        sizes.append(runtime.step_memory.size_bytes)
    assert len(runtime.programs) == len(results)
    assert sizes == [0, CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES]
    # Behind the rows, which begin where all recordings do.
    assert max(places.values()) - min(places.values()) < 30 * 70 * 2 + ALIGNMENT


@torch.inference_mode()
def test_recorded_attention_to_latents_has_the_bits_of_a_plain_step() -> None:
    """Each step is another token: a key more, in a plan that is renewed."""
    runtime = CpuRuntime()
    recordings: Recordings[str] = Recordings(runtime)
    heads = Heads(20, 1, 96, rank=64)
    cases = [
        attention_case(
            [300 + turn, 9], [1, 1], heads=heads, block_size=16, dtype=torch.bfloat16, seed=turn
        )
        for turn in range(4)
    ]
    kept = cases[0]
    q, cache, latents = kept.q.clone(), kept.k_cache.clone(), kept.v_cache.shape[3]

    def change(turn: int) -> None:
        q.copy_(cases[turn].q)
        cache.copy_(cases[turn].k_cache)
        renew(kept.meta, cases[turn].meta)

    def body() -> Tensor:
        return ops.paged_attention(q, cache, cache[..., :latents], kept.meta, scale=0.2)

    results = run_often(body, change, recordings)
    assert len(runtime.programs) == 1
    for case, result in zip(cases, results, strict=True):
        meta = replace(case.meta, memo={})
        plain = ops.paged_attention(case.q, case.k_cache, case.v_cache, meta, scale=0.2)
        assert torch.equal(result, plain)
