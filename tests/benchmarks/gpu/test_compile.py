"""Processes that compile beside each other, and launches that only compile."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_compile import CompilingRuntime, compile_beside, num_compilers, read_share
from benchmarks.gpu_timing import time_call

WRITE = """
import pathlib, sys, time
folder, seconds, _, share = sys.argv[1:]
(pathlib.Path(folder) / share.replace("/", "-")).touch()
time.sleep(float(seconds))
"""
ONLY_COMPILES = """
import torch, triton, triton.language as tl
from benchmarks.gpu_compile import only_compiling
from tests.fake_gpu import fake_gpu

@triton.jit
def kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 1.0)

with fake_gpu() as gpu:
    x = torch.empty(8, device="cuda")
    with only_compiling():
        kernel[(1,)](x, SIZE=8)
    print(len(gpu.compiled["kernel"]), gpu.launches["kernel"])
    kernel[(1,)](x, SIZE=8)
    print(len(gpu.compiled["kernel"]), gpu.launches["kernel"])
"""


def test_shares_cover_everything_once() -> None:
    places = list(range(11))
    shares = [places[read_share(f"{idx}/3")] for idx in range(3)]
    assert sorted(place for share in shares for place in share) == places
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert num_compilers(1) == 1


def test_each_process_has_its_share_and_late_ones_are_stopped(tmp_path: Path) -> None:
    compile_beside(["-c", WRITE, str(tmp_path), "0"], 2, 60.0)
    assert {path.name for path in tmp_path.iterdir()} == {"0-2", "1-2"}
    begin = time.monotonic()
    compile_beside(["-c", WRITE, str(tmp_path), "600"], 1, 0.1)
    assert time.monotonic() - begin < 300


def test_a_device_that_only_compiles_has_no_graphs() -> None:
    calls: list[int] = []
    timed = time_call(CompilingRuntime(torch.device("cpu")), calls.append)
    assert calls == [0, 1]
    assert timed.median_s >= 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
def test_launches_compile_and_run_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ONLY_COMPILES)
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, str(program)],
        env={"PYTHONPATH": str(root), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    # Compiled once, and run when it is launched again.
    assert found.stdout.split("\n")[:2] == ["1 0", "1 1"]
