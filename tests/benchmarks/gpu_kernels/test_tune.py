"""The tuner's search with made-up times, what it proposes, and the file that it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from triton.errors import TritonError

from benchmarks.gpu_compile import read_share
from benchmarks.gpu_kernels import tune_attention, tune_linear
from benchmarks.gpu_kernels.attention import Batch
from benchmarks.gpu_kernels.grouped_mlp import Layer, expert_bytes, random_experts
from benchmarks.gpu_kernels.linear import Matrix
from benchmarks.gpu_kernels.rotary import Heads
from benchmarks.gpu_kernels.tune import (
    Target,
    Task,
    compile_candidates,
    main,
    run,
    search,
    write_tiles,
)
from benchmarks.gpu_kernels.tune_attention import (
    long_blocks,
    mean_ratio,
    short_blocks,
    short_splits,
    splits,
)
from benchmarks.gpu_kernels.tune_linear import linear_target
from benchmarks.gpu_kernels.tune_mlp import candidates, gpu_timer, product_target
from benchmarks.gpu_kernels.tune_rows import (
    norm_candidates,
    norm_target,
    rotary_candidates,
    rotary_target,
)
from kernels.runtime import HostRuntime
from kernels.triton.attention.launches import AttentionTiles
from kernels.triton.grouped_mlp.launches import (
    DOWN,
    GATE_UP,
    MlpTiles,
    Shape,
    check_tiles,
    default_tiles,
)
from kernels.triton.grouped_mlp.weights import FORMATS
from kernels.triton.linear.launches import LinearTiles
from kernels.triton.norm import NormTiles
from kernels.triton.rotary import RotaryTiles
from kernels.triton.tiles import merged, read_table

FIRST = MlpTiles(16, 64, 128, 1, 1, 4, 4)
SHAPE = Shape("plain", torch.bfloat16, 128, 2048, 768, 8, 128)


@dataclass(frozen=True)
class Sizes:
    a: int = 1
    b: int = 1


def target(
    time_of: Callable[[Sizes], float],
    *stages: Callable[[Sizes], Iterable[Sizes]],
    keep: Callable[[Sizes], None] = lambda _: None,
) -> Target:
    return Target("op", "shape", Sizes(), stages, time_of, keep)


def vary_a(best: Sizes) -> list[Sizes]:
    return [replace(best, a=a) for a in (2, 3, 4)]


def vary_b(best: Sizes) -> list[Sizes]:
    return [replace(best, b=b) for b in (2, 3)]


def always() -> bool:
    return True


def test_the_fastest_wins_and_the_next_stage_goes_on_from_it() -> None:
    kept: list[Sizes] = []
    times = {2: 3.0, 3: 1.0, 4: 2.0, 1: 2.5}
    found = search(target(lambda s: times[s.a] / s.b, vary_a, vary_b, keep=kept.append), always)
    assert found == (Sizes(3, 3), 1.0 / 3, 2.5, 5)
    assert kept == [Sizes(3, 3)]


def test_what_was_there_stays_if_nothing_is_faster() -> None:
    assert search(target(lambda _: 1.0, vary_a), always) == (Sizes(), 1.0, 1.0, 3)


@pytest.mark.parametrize("error", [TritonError("out of memory"), RuntimeError("a pass failed")])
def test_candidates_that_do_not_run_are_passed_over(error: Exception) -> None:
    def time_of(sizes: Sizes) -> float:
        if sizes.a == 4:
            raise error
        return 1.0 / sizes.a

    assert search(target(time_of, vary_a), always).tiles == Sizes(3)


def test_no_candidate_is_tried_when_the_time_is_over() -> None:
    left = iter((True, False, False))
    found = search(target(lambda s: 1.0 / s.a, vary_a, vary_b), lambda: next(left))
    assert found.tiles == Sizes(2)
    assert found.tried == 1


def test_tasks_share_the_time_and_each_is_written_at_once(tmp_path: Path) -> None:
    path, now = tmp_path / "tuned" / "gpu.json", [0.0]

    def time_of(sizes: Sizes) -> float:
        now[0] += 10.0
        return 1.0 / sizes.a

    def task(name: str, then: Callable[[], None] = lambda: None) -> Task:
        def make() -> Target:
            then()
            return replace(target(time_of, vary_a, vary_b), shape=name)

        return Task(name, make)

    def first_is_written() -> None:
        assert set(read_table.__wrapped__(path)["op"]) == {"first"}

    tasks = [task("first"), task("second", first_is_written), task("third"), task("fourth")]
    # Of 70 seconds 17.5 are the first one's: the tiles in use, and one candidate; the last one
    # has the 10 that are left.
    assert run(tasks, path, 70.0, clock=lambda: now[0]) == []
    table = read_table.__wrapped__(path)["op"]
    assert [table[task.name]["a"] for task in tasks] == [2, 2, 2, 1]
    path.unlink()
    assert run(tasks, path, 25.0, clock=lambda: now[0]) == ["fourth"]


def test_a_shape_whose_tiles_do_not_run_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Sizes) -> float:
        raise RuntimeError("out of shared memory")

    tasks = [
        Task("bad", lambda: replace(target(fails, vary_a), shape="bad")),
        Task("good", lambda: replace(target(lambda s: 1.0 / s.a, vary_a), shape="good")),
    ]
    path = tmp_path / "gpu.json"
    assert run(tasks, path, 60.0) == []
    assert set(read_table.__wrapped__(path)["op"]) == {"good"}
    assert "bad: RuntimeError: out of shared memory" in capsys.readouterr().out


def test_the_second_product_is_tuned_beside_the_first_ones_best() -> None:
    tiles = {op: default_tiles(op, SHAPE) for op in (GATE_UP, DOWN)}
    start = dict(tiles)
    wanted = {op: list(islice(candidates(op, SHAPE), 20))[-1] for op in tiles}
    seen = []

    def time_of(tried: dict[str, MlpTiles]) -> float:
        seen.append(tried)
        return float(sum(tried[op] != wanted[op] for op in tried))

    for op in (GATE_UP, DOWN):
        found = search(product_target(op, SHAPE, tiles, time_of), always)
        assert found.tiles == wanted[op]
    assert found.time == 0.0
    assert found.time_before == 1.0
    assert seen[0] == start


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 128, 8192])
def test_candidates_are_possible_and_few(weight_format: str, num_rows: int) -> None:
    shape = SHAPE._replace(weight_format=weight_format, num_rows=num_rows)
    for op in (GATE_UP, DOWN):
        tried = list(candidates(op, shape))
        assert 5 < len(set(tried)) == len(tried) < 200
        for tiles in tried:
            check_tiles(op, weight_format, tiles)
    assert {tiles.block_m for tiles in tried} == ({16} if num_rows < 8192 else {32, 64, 128})


def test_attentions_splits_take_whole_blocks() -> None:
    start = AttentionTiles(min_chunk=128)
    for best in short_blocks(start):
        tried = list(splits(best))
        assert tried
        assert all(t.min_chunk % t.short_keys == 0 for t in (best, *tried))
    assert {t.min_programs for t in short_splits(start)} >= {1, start.min_programs}
    # One kernel's blocks leave the other's alone.
    assert all(replace(t, long_rows=128, long_keys=128, long_warps=8, long_stages=3) == start
               for t in long_blocks(start))  # fmt: skip
    assert len(set(long_blocks(start))) == 36


def test_batches_count_alike_whatever_their_size() -> None:
    slow = AttentionTiles(short_keys=32)
    timers = [lambda t: 4.0 if t == slow else 2.0, lambda t: 100.0 if t == slow else 200.0]
    time_of = mean_ratio(timers, AttentionTiles())
    assert time_of(AttentionTiles()) == 1.0
    assert time_of(slow) == pytest.approx((2.0 + 0.5) / 2)


def test_attention_is_timed_with_the_tiles_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AttentionTiles | None] = []
    kernel = tune_attention.attention_call

    def spied(batch: Batch, device: torch.device) -> object:
        call, _ = kernel(batch, device, cache_bytes=1)
        return lambda idx, tiles: (seen.append(tiles), call(idx, tiles)), 1

    monkeypatch.setattr(tune_attention, "attention_call", spied)
    small = AttentionTiles(short_keys=16, min_chunk=16)
    known = {torch.bfloat16: AttentionTiles()}
    batch = Batch("decode", 1, 1, 20, Heads(4, 2, 16))
    found = search(
        tune_attention.target((batch,), [lambda _: [small]], known, torch.bfloat16, HostRuntime()),
        always,
    )
    assert found.tried == 1
    assert small in seen
    assert known[torch.bfloat16] == found.tiles


def test_norm_and_rotation_run_with_every_candidate() -> None:
    runtime = HostRuntime()
    norm = norm_target(32, runtime, num_rows=2)
    assert norm.shape == "width=32"
    assert len(set(norm_candidates(NormTiles(1)))) == 5
    assert search(replace(norm, stages=[lambda _: [NormTiles(2)]]), always).tried == 1
    rotary = rotary_target(Heads(4, 2, 16), runtime, num_rows=2)
    assert rotary.shape == "heads=4,kv_heads=2,head_dim=16"
    assert len(set(rotary_candidates(RotaryTiles()))) == 15
    assert search(replace(rotary, stages=[lambda _: [RotaryTiles(8, 1)]]), always).tried == 1


def test_a_file_keeps_what_was_tuned_for_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "nvidia_h200.json"
    other = SHAPE._replace(num_rows=1)
    for op, shape in ((DOWN, SHAPE), (DOWN, other), (GATE_UP, other)):
        write_tiles(path, op, shape.key, FIRST)
    table = read_table(path)
    default = default_tiles(DOWN, SHAPE)
    for op, shape in ((DOWN, SHAPE), (DOWN, other), (GATE_UP, other)):
        assert merged(table, op, shape.key, default, path) == FIRST
    assert merged(table, GATE_UP, SHAPE.key, default, path) == default


def test_a_product_is_torchs_unless_our_kernel_is_faster() -> None:
    runtime, matrix = HostRuntime(), Matrix("o", 32, 256)
    made = linear_target(2, matrix, "plain", runtime, cache_bytes=1)
    assert made.start.splits == 0
    ours = LinearTiles(block_m=16, block_n=32, block_k=64, splits=2)
    assert search(replace(made, stages=[lambda _: [ours]]), always).tried == 1
    tried = list(tune_linear.blocks(2, matrix, "plain", made.start))
    assert 20 < len(set(tried)) == len(tried) < 200
    assert all(tiles.splits for tiles in tried)
    assert list(tune_linear.splits(matrix, made.start)) == []
    assert [tiles.splits for tiles in tune_linear.splits(matrix, ours)] == [1, 2, 4]
    quantised = list(tune_linear.blocks(2, matrix, "int8", replace(ours, block_k=128)))
    assert {tiles.block_k for tiles in quantised} == {128}
    assert {tiles.splits for tiles in quantised} == {2}


@pytest.mark.parametrize("num_rows", [2, 40])
def test_experts_are_timed_as_a_step_runs_them(num_rows: int) -> None:
    """Few pairs are not grouped; calls go through several routings."""
    layer, runtime = Layer(4, 2, 32, 16), HostRuntime()
    shape = Shape("plain", torch.bfloat16, *layer[:1], 32, 16, 2, num_rows)
    experts = random_experts(layer, "plain", runtime.device)
    timer = gpu_timer(shape, layer, experts, runtime, cache_bytes=expert_bytes(layer, "plain"))
    assert timer({op: default_tiles(op, shape) for op in (GATE_UP, DOWN)}) > 0


def test_shares_of_candidates_are_compiled_and_what_does_not_is_passed_over() -> None:
    seen: list[Sizes] = []

    def time_of(sizes: Sizes) -> float:
        seen.append(sizes)
        raise TritonError("out of memory")

    tasks = [Task("all", lambda: target(time_of, vary_a, vary_b))]
    counts = [compile_candidates(tasks, read_share(f"{idx}/2"), 60.0) for idx in (0, 1)]
    assert counts == [3, 2]
    assert set(seen) == {*vary_a(Sizes()), *vary_b(Sizes())}
    assert len(seen) == 5
    assert compile_candidates(tasks, read_share("0/1"), -1.0) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "there is no GPU to tune for" in capsys.readouterr().err
