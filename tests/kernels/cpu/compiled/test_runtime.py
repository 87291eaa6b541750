"""Launches on torch's threads, and the directory of machine code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from kernels.cpu.compiled import runtime, sampling
from kernels.cpu.compiled.retrieval import codebooks
from kernels.cpu.compiled.retrieval import search as retrieval
from kernels.cpu.compiled.runtime import (
    Kernel,
    float_word,
    launch,
    offsets,
)
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

DATA, COUNT, SCALE = offsets(3)


@Kernel
def _scale_then_sum(block: int) -> None:
    """Multiply COUNT rows of sixteen by SCALE; then one task writes their sum behind them."""
    data, count = simd.read_i64(block + DATA), simd.read_i64(block + COUNT)
    factor = vectors.splat(simd.read_f32(block + SCALE))
    row = claim_task(block, 0)
    while row < count:
        vectors.store_f32(data + 64 * row, vectors.mul(vectors.load_f32(data + 64 * row), factor))
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, count)
    if claim_task(block, 1) == 0:
        total = vectors.load_f32(data)
        for other in range(1, count):
            total = vectors.add(total, vectors.load_f32(data + 64 * other))
        vectors.store_f32(data + 64 * count, total)
        finish_task(block, 1)
    wait_for_tasks(block, 1, 1)


def check_launch(num_threads: int) -> None:
    data = torch.randn(41, 16, generator=torch.Generator().manual_seed(num_threads))
    wanted = data[:40] * 0.5
    launch(_scale_then_sum, (data.data_ptr(), 40, float_word(0.5)), num_threads=num_threads)
    assert torch.equal(data[:40], wanted)
    torch.testing.assert_close(data[40], wanted.sum(0))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_is_done_once_and_the_team_waits(num_threads: int) -> None:
    for _ in range(20):
        check_launch(num_threads)


def test_several_threads_may_launch_at_once() -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for num_threads in (2, 1, 3, 2):
                check_launch(num_threads)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


PROGRAM = """
import json, logging, os, sys, torch
from kernels.cpu.compiled.layer import add_norm
for environment in sys.stdin:
    child = os.fork()
    if not child:
        os.environ.update(json.loads(environment))
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        x = torch.ones(1, 16).bfloat16()
        assert torch.equal(add_norm(None, x, x[0], eps=0.0), x)
        sys.stdout.flush()
        os._exit(0)
    print(ENDED, os.waitpid(child, 0)[1], flush=True)
"""
ENDED = "ended with status"


@pytest.fixture(scope="module")
def run_program() -> Iterator[Callable[..., str]]:
    """Run a kernel in a process with other variables; return what it logs.

    The processes are forks of one that has imported the kernels, which takes longer than compiling
    one of them.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("ENDED", repr(ENDED))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[4],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(**environment: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(environment), file=process.stdin, flush=True)
            lines: list[str] = []
            for line in process.stdout:
                if line.startswith(ENDED):
                    assert line == f"{ENDED} 0\n", lines
                    return "".join(lines)
                lines.append(line)
            raise AssertionError(f"the process has ended: {lines}")

        yield run


@pytest.mark.slow
def test_code_is_kept_where_the_user_says(tmp_path: Path, run_program: Callable[..., str]) -> None:
    said, kept_in = "compiled kernel add_norm for this processor", tmp_path / "kept"
    assert said in run_program(NUMBA_CACHE_DIR=str(kept_in))
    kept = sorted(kept_in.rglob("*.nbc"))
    assert kept
    times = [file.stat().st_mtime_ns for file in kept]
    assert said not in run_program(NUMBA_CACHE_DIR=str(kept_in))
    assert sorted(kept_in.rglob("*.nbc")) == kept
    assert [file.stat().st_mtime_ns for file in kept] == times, "it was compiled again"
    # An image has code that was compiled before, which nobody may change.
    other = tmp_path / "other"
    prepared = {runtime.PREPARED_VARIABLE: str(kept_in)}
    assert said not in run_program(NUMBA_CACHE_DIR=str(other), **prepared)
    assert [each.name for each in sorted(other.rglob("*.nbc"))] == [each.name for each in kept]
    # So it is where there is no place for a copy but a temporary one.
    blocked = tmp_path / "file"
    blocked.touch()
    assert said not in run_program(NUMBA_CACHE_DIR=str(blocked), **prepared)


@pytest.mark.parametrize(
    ("module", "name", "kernel", "changed"),
    [
        (codebooks, "NUM_CENTROIDS", codebooks._code, 32),  # of kernels.contracts
        (retrieval, "SEGMENT_KEYS", retrieval._search, 512),  # of topspin.plan.retrieval
        (sampling, "_COLDEST", sampling.choose, np.float32(0.01)),  # of kernels.sampling
        (retrieval, "_scratch_tables", retrieval._search, simd.stack(64)),
    ],
)
def test_code_has_another_place_when_a_constant_in_it_changes(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, kernel: Kernel, changed: Any
) -> None:
    def place() -> str:
        return runtime._digest(runtime._sources(kernel._function))

    before, other = place(), runtime._digest(runtime._sources(_scale_then_sum._function))
    assert place() == before
    monkeypatch.setattr(module, name, changed)
    assert place() != before
    assert runtime._digest(runtime._sources(_scale_then_sum._function)) == other


def test_code_in_a_place_that_cannot_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a root that is read-only, which permissions do not make for the superuser."""
    sources = runtime._sources(_scale_then_sum._function)
    kept = tmp_path / runtime._digest(sources)
    kept.mkdir()
    (kept / "code").touch()
    make = tempfile.TemporaryFile

    def refused(*, dir: Path) -> Any:
        if dir.is_relative_to(tmp_path):
            raise OSError(errno.EROFS, "read-only")
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    with runtime._code_cache(sources) as keeps:
        used = Path(numba.config.CACHE_DIR)
        assert keeps
        assert (used / "code").exists()
        assert used != kept
    assert not used.exists()


@pytest.mark.slow
def test_without_a_place_for_code_it_is_compiled_each_time(
    tmp_path: Path, run_program: Callable[..., str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    run_program(NUMBA_CACHE_DIR=str(blocked))
    assert blocked.read_text() == "not a directory"
