"""The kernels' tests again, with the forms for other processors than this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kernels.cpu.simd.lanes import ALL_FEATURES, HIDDEN_VARIABLE

HERE = Path(__file__).parent

WITHOUT_BF16: Final = "amx-bf16,amx-int8,amx-tile,avx512bf16"
WITHOUT_AVX512: Final = f"{WITHOUT_BF16},avx512bw,avx512f,avx512vbmi,avx512vnni"

# By the features that are hidden.
TESTS: Final = {
    ALL_FEATURES: [
        "cpu/simd/test_fp8.py",
        "cpu/compiled/test_codebooks.py",
        "cpu/compiled/test_attention.py",
        "cpu/test_quantised.py",
        "cpu/compiled/test_retrieval.py",
        "test_ops.py",
    ],
    WITHOUT_BF16: [
        "cpu/test_matmul.py",
        "cpu/compiled/test_matmul.py",
        "cpu/compiled/test_prompts.py",
        "../identity/layouts/test_local_layers.py",
    ],
    WITHOUT_AVX512: [
        "cpu/test_matmul.py",
        "cpu/test_quantised.py",
        "cpu/compiled/test_matmul.py",
        "cpu/compiled/test_prompts.py",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "tests"), [(hidden, tests) for hidden, each in TESTS.items() for tests in each]
)
def test_kernels_of_other_processors(hidden: str, tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", "-m", "not slow"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(HERE.parent / tests)],
        env=os.environ | {HIDDEN_VARIABLE: hidden, "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
