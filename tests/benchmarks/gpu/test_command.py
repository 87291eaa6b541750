"""`make gpu` as a whole: refused flags, no device, and every part interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import PARTS
from benchmarks.gpu_records import Deadline

ROOT = Path(__file__).parents[3]


def run_gpu(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def result_in(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("gpu-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cpu"], "add --quick"),
        (["--device", "cpu", "--quick"], "say --output"),
        (["--only", "tests,speed"], "no part speed"),
    ],
)
def test_refused_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        gpu.main(flags)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_runs_without_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "is_installed", lambda package: package == "numpy")
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert "torch is missing (for tensors, cuBLAS and CUDA graphs)" in said
    assert "nothing runs without torch" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = run_gpu("--output", str(tmp_path))
    assert done.returncode == 2
    assert "make gpu: error: device cuda" in done.stderr
    assert not list(tmp_path.iterdir())


def test_kernels_interpreted(tmp_path: Path) -> None:
    done = run_gpu("--device", "cpu", "--quick", "--only", "rooflines", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = result_in(tmp_path)
    assert found["interpreted"]
    assert found["verdicts"] == []
    assert set(found["parts"]) == {"rooflines"}
    names = {figure["op"] for figure in found["figures"] if figure["of"] == "kernel"}
    assert {"m2n dispatch + combine", "m2n gather + reply"} <= names
    assert {"grouped_mlp plain", "sample greedy"} <= names
    assert "no speeds" in done.stdout
    assert "Kernels\n" not in done.stdout


@pytest.mark.slow
def test_every_part_interpreted(tmp_path: Path) -> None:
    done = run_gpu("--device", "cpu", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = result_in(tmp_path)
    assert set(found["parts"]) == {part.name for part in PARTS}
    assert all(not part["problems"] for part in found["parts"].values())
    assert {figure["of"] for figure in found["figures"]} == {
        *("tests", "ceiling", "kernel", "decode", "prefill"),
    }
    engines = {figure["engine"] for figure in found["figures"] if figure["of"] == "decode"}
    assert engines == {"topspin", "transformers"}


def test_what_was_found_is_saved_after_each_part() -> None:
    saved: list[list[str]] = []
    limits: list[float] = []

    class FakeSession:
        def __init__(self) -> None:
            self.ran: list[str] = []

        def run(self, name: str, module: str, seconds: float) -> None:
            self.ran.append(name)
            limits.append(seconds)

    session = FakeSession()
    deadline = Deadline(460.0, clock=lambda: 0.0)
    gpu.run_parts(session, PARTS, deadline, lambda: saved.append(list(session.ran)))
    names = [part.name for part in PARTS]
    assert saved == [names[: count + 1] for count in range(len(names))]
    # Nothing takes time here, so that the last one may take all of it.
    assert limits == sorted(limits)
    assert limits[-1] == 460.0


def test_parts_that_lack_a_package_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "is_installed", lambda package: package not in ("msgspec", "numba"))
    assert gpu.find_left_out(PARTS) == {"decode": "msgspec is missing"}
