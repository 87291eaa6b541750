"""What differs from batch to batch makes no new kernel: Triton compiles one for each kind.

A number counts as another kind when it is 1 or divisible by 16, a pointer when 16 bytes divide
it. On a GPU each costs seconds, in the middle of serving.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

import kernels
from tests.kernels.triton.test_compiles import ATTENTION, LINEAR, M2N, ROUTED

NUMBERS = {
    "R", "T", "num_pairs", "num_tiles", "num_rows", "num_seqs", "num_histories", "bucket",
}  # fmt: skip
POINTERS = {"num_rows_ptr", "slots"}


def find_kernels() -> dict[str, Any]:
    modules = [each.name for each in pkgutil.iter_modules(kernels.__path__)]
    found = {}
    for module in modules:
        if module.startswith("triton_"):
            found.update(vars(importlib.import_module(f"kernels.{module}")))
    return found


def names_of(kernel: Any, option: str) -> set[str]:
    """What an option names, of a kernel that is compiled or interpreted."""
    chosen = kernel.kwargs[option] if hasattr(kernel, "kwargs") else getattr(kernel, option)
    return set(chosen or ())


@pytest.mark.parametrize("name", sorted(ATTENTION | ROUTED | LINEAR | M2N))
def test_a_batchs_numbers_and_pointers_make_no_kernel_of_their_own(name: str) -> None:
    kernel = find_kernels()[name]
    arguments = set(kernel.arg_names)
    assert arguments & NUMBERS <= names_of(kernel, "do_not_specialize")
    assert arguments & POINTERS <= names_of(kernel, "do_not_specialize_on_alignment")
