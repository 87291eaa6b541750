"""The kernels' tests again, with the forms for processors without wide instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.simd.lanes import PORTABLE_VARIABLE

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        "cpu/simd/test_fp8.py",
        "cpu/compiled/test_codebooks.py",
        "cpu/compiled/test_attention.py",
        "cpu/test_quantised.py",
        "cpu/compiled/test_retrieval.py",
        "test_ops.py",
    ],
)
def test_kernels_of_other_processors(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", "-m", "not slow"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(HERE.parent / tests)],
        env=os.environ | {PORTABLE_VARIABLE: "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
