"""The kernels as the compiler sees them: machine code for Hopper, made without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.kernels.triton.hopper"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert compiled >= {
        "_norm_row",
        "_rotate_and_store",
        "attend_short",
        "attend_long",
        "combine_splits",
    }
