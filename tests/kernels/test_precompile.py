"""Code that is compiled ahead is what the kernels then take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.test_numba_runtime import run_program
from topspin.code_cache import KERNELS, is_missing


def precompile(*names: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernels.precompile", *names],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(directory)},
        cwd=KERNELS.parent,
        timeout=300,
    )


def test_all_kernels_of_a_module_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = precompile("numba_layer", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["numba_layer"]
    kept = sorted(tmp_path.rglob("*.nbc"))
    names = {path.name.partition("-")[0] for path in kept}
    assert names == {f"numba_layer.{name}" for name in ("_add_norm", "_rotate_and_store", "_route")}
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not is_missing(KERNELS / "numba_layer.py")
    times = [file.stat().st_mtime_ns for file in kept]
    run_program(NUMBA_CACHE_DIR=str(tmp_path))
    assert sorted(tmp_path.rglob("*.nbc")) == kept
    assert [file.stat().st_mtime_ns for file in kept] == times, "it was compiled again"


def test_an_unknown_module_is_named(tmp_path: Path) -> None:
    done = precompile("numba_nothing", directory=tmp_path)
    assert done.returncode == 1
    assert "kernels.numba_nothing" in done.stderr
