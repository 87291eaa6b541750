"""The tuner's search with made-up times, and the file that it writes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from triton.errors import TritonError

from benchmarks.gpu_kernels.tune import candidates, search, tune, write_tiles
from kernels.tiles import merged, read_table
from kernels.triton_grouped_mlp import DOWN, GATE_UP, MlpTiles, Shape, check_tiles, default_tiles
from kernels.triton_grouped_mlp_weights import FORMATS

FIRST = MlpTiles(16, 64, 128, 1, 1, 4, 4)
SHAPE = Shape("plain", torch.bfloat16, 128, 2048, 768, 8, 128)


def always() -> bool:
    return True


def test_the_fastest_wins() -> None:
    tried = [replace(FIRST, num_stages=n) for n in (2, 3, 5)]
    times = {2: 3.0, 3: 1.0, 4: 2.0, 5: 1.5}
    found = search(
        GATE_UP,
        tried,
        {GATE_UP: FIRST, DOWN: FIRST},
        lambda t: times[t[GATE_UP].num_stages],
        always,
    )
    assert found == (tried[1], 1.0, 2.0)


def test_what_was_there_stays_if_nothing_is_faster() -> None:
    slower = replace(FIRST, num_stages=2)
    tiles = {GATE_UP: FIRST, DOWN: FIRST}
    found = search(DOWN, [slower], tiles, lambda t: 1.0 + (t[DOWN] == slower), always)
    assert found == (FIRST, 1.0, 1.0)


def test_candidates_that_do_not_run_are_passed_over() -> None:
    def time_of(tiles: dict[str, MlpTiles]) -> float:
        if tiles[DOWN].num_stages == 5:
            raise TritonError("out of shared memory")
        return 1.0 / tiles[DOWN].num_stages

    tried = [replace(FIRST, num_stages=n) for n in (5, 6)]
    found = search(DOWN, tried, {GATE_UP: FIRST, DOWN: FIRST}, time_of, always)
    assert found.tiles == tried[1]


def test_no_candidate_is_tried_when_the_time_is_over() -> None:
    tried = [replace(FIRST, num_stages=n) for n in (1, 2, 3)]
    left = iter((True, False))
    found = search(
        DOWN,
        tried,
        {GATE_UP: FIRST, DOWN: FIRST},
        lambda t: float(t[DOWN].num_stages),
        lambda: next(left),
    )
    assert found.tiles == tried[0]


def test_the_second_product_is_tuned_beside_the_first_ones_best() -> None:
    tiles = {op: default_tiles(op, SHAPE) for op in (GATE_UP, DOWN)}
    wanted = {op: list(islice(candidates(op, SHAPE), 20))[-1] for op in tiles}
    seen = []

    def time_of(tiles: dict[str, MlpTiles]) -> float:
        seen.append(tiles)
        return float(sum(tiles[op] != wanted[op] for op in tiles))

    found = tune(SHAPE, tiles, time_of, always)
    assert {op: best.tiles for op, best in found.items()} == wanted
    assert found[DOWN].time == 0.0
    assert found[DOWN].time_before == 1.0
    assert seen[0] == tiles


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


def test_a_file_keeps_what_was_tuned_for_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "nvidia_h200.json"
    other = SHAPE._replace(num_rows=1)
    found = search(DOWN, [], {DOWN: FIRST}, lambda _: 1.0, always)
    write_tiles(path, SHAPE, {DOWN: found})
    write_tiles(path, other, {DOWN: found, GATE_UP: found})
    table = read_table(path)
    default = default_tiles(DOWN, SHAPE)
    for op, shape in ((DOWN, SHAPE), (DOWN, other), (GATE_UP, other)):
        assert merged(table, op, shape.key, default, path) == FIRST
    assert merged(table, GATE_UP, SHAPE.key, default, path) == default
