"""The read bandwidth comes from another process, and leaves nothing in this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys

if __name__ == "__mp_main__":  # in the process of the probe
    import benchmarks.kernels.cpu_kernel_cases

    benchmarks.kernels.cpu_kernel_cases.cache_bytes = lambda: 1 << 16

if __name__ == "__main__":
    from benchmarks.kernels import read_rate
    from benchmarks.load import compare

    rates = read_rate.read_rates(2)
    assert len(rates) == 2, rates
    assert min(rates) > 0, rates
    assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_reads_are_timed_without_torch_in_the_load_tester(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program)]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
