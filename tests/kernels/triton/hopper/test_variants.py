"""Values that vary between batches cause no new compilation: Triton compiles one kernel per kind.

A number is of another kind if it is 1 or divisible by 16, a pointer if it is aligned to 16 bytes.
On a GPU each compilation takes seconds, in the middle of serving.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import kernels.triton
from tests.kernels.triton.hopper.test_compiles import KERNELS

NUMBERS = {
    "R", "T", "num_pairs", "num_tiles", "num_rows", "num_seqs", "num_histories", "bucket",
    "table_head", "first_seq", "num_best", "scores_row", "segments_row", "lists_row",
}  # fmt: skip
POINTERS = {"num_rows_ptr", "slots", "seqs", "segments", "coded_end", "budgets"}


def find_kernels() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(kernels.triton.__path__, "kernels.triton."):
        found.update(vars(importlib.import_module(module.name)))
    return found


def names_of(kernel: Any, option: str) -> set[str]:
    """Return the argument names in an option of a compiled or interpreted kernel."""
    chosen = kernel.kwargs[option] if hasattr(kernel, "kwargs") else getattr(kernel, option)
    return set(chosen or ())


def test_a_batchs_numbers_and_pointers_make_no_kernel_of_their_own() -> None:
    found = find_kernels()
    for name in " ".join(KERNELS.values()).split():
        arguments = set(found[name].arg_names)
        assert arguments & NUMBERS <= names_of(found[name], "do_not_specialize"), name
        on_alignment = names_of(found[name], "do_not_specialize_on_alignment")
        assert arguments & POINTERS <= on_alignment, name
