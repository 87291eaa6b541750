"""The kernels as compiled code: machine code for Hopper, made without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


KERNELS = {
    "attention": """_norm_row _rotate_and_store attend_short attend_long combine_splits
        score_segments score_keys list_slots""",
    "routed": """route_block count_block place_block gate_up_tile down_tile sum_choices
        quantise_groups count_history mask_block penalise_block survey_split settle_row tally_digit
        finish_search weigh_split invert_row""",
    "linear": "linear_tile add_splits group_slot local_slots_block _swiglu_block _add_counts",
    "m2n": "put_row await_answer combine_row await_request gather_row send_row",
}
"""By the program that compiles them."""


# The machine code of 70 variants of attention takes four minutes of one core.
@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("module", KERNELS)
def test_every_kernel_compiles_for_hopper(module: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"tests.kernels.triton.hopper.{module}"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert compiled >= set(KERNELS[module].split())
