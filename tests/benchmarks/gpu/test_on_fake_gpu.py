"""The parts of `make gpu` on a GPU that is none: what runs on GPUs alone runs, and waits nowhere.

In processes of their own, where Triton's kernels are not interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Run modules; give the records of each one, and of what happened on the device by then."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.gpu.on_fake_gpu", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    records: list[dict[str, Any]] = []
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            continue
        records.append(json.loads(line))
        if "module" in records[-1]:
            found[records[-1]["module"].removeprefix("benchmarks.")] = records
            records = []
    assert not [each for part in found.values() for each in part if each.get("kind") == "problem"]
    assert all(part[-1]["status"] == 0 for part in found.values())
    return found


def figures(records: list[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    return [each for each in records if each.get("kind") == "figure" and each["of"] == of]


def test_every_part_on_a_gpu() -> None:
    found = run(
        "benchmarks.gpu_device",
        "benchmarks.gpu_decode --quick",
        "benchmarks.gpu_rooflines --quick",
        "benchmarks.gpu_transformers --quick",
        "benchmarks.gpu_kernels.tune --ops rms_norm --share 1/2",
        "benchmarks.gpu_kernels.tune --ops rms_norm",
    )
    [device, _] = found["gpu_device"]
    assert (device["name"], device["capability"]) == ("NVIDIA H200", "9.0")

    decode = found["gpu_decode"]
    assert len(figures(decode, "decode")) == 3
    assert len(figures(decode, "prefill")) == 1
    # An engine's tables are copied as it is built; each of its steps waits for nothing.
    waits = decode[-1]["waits"]
    copies = {what: n for what, n in waits.items() if what.startswith("aten._to_copy")}
    assert max(copies.values()) <= 2 * 3 < decode[-1]["replayed"]
    assert set(waits) - set(copies) == {"synchronize", "aten._unique2.default"}

    kernels = figures(found["gpu_rooflines"], "kernel")
    assert len({each["op"] for each in kernels}) >= 12
    assert {each["timed_by"] for each in kernels} == {"graph"}
    ceilings = {each["name"] for each in figures(found["gpu_rooflines"], "ceiling")}
    assert ceilings == {"copy", "bf16", "fp8"}

    peers = figures(found["gpu_transformers"], "decode")
    assert [each["variant"] for each in peers] == ["grouped_mm", "batched_mm", "eager"]

    before, *tuned = (part[-1]["launches"].get("_norm_row", 0) for part in list(found.values())[3:])
    assert tuned[0] > before


@pytest.mark.slow
def test_every_kernel_at_its_full_sizes_compiles_and_can_be_recorded() -> None:
    found = run("--compile", "benchmarks.gpu_rooflines")["gpu_rooflines"]
    kernels = figures(found, "kernel")
    assert len(kernels) > 100
    assert {each["timed_by"] for each in kernels} == {"graph"}
