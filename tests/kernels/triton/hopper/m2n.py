"""Compiles the kernels of M2N for Hopper, as attention.py does."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from kernels.triton.m2n.attention_kernels import await_answer, combine_row, put_row
from kernels.triton.m2n.expert_kernels import await_request, gather_row, send_row
from tests.kernels.triton.hopper.attention import NAMES, compile_kernel

TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
WORDS = {
    "table_ptr": "*i64", "step_ptr": "*i64", "failed_ptr": "*i32", "control_ptr": "*i64",
}  # fmt: skip


def compile_attention(
    hidden: torch.dtype, wire: torch.dtype, *, has_rows: bool, **ones: int
) -> None:
    """Compile dispatch and combine; Triton makes constants of arguments that are 1."""

    def compile_(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> None:
        present = {name: one for name, one in ones.items() if name in kernel.arg_names}
        compile_kernel(kernel, pointers, {**constants, **present}, num_warps=4)

    rows = {
        **WORDS, "hidden_ptr": NAMES[hidden], "experts_ptr": "*i64", "weights_ptr": "*fp32",
        "columns_ptr": "*i32", "num_rows_ptr": "*i64", "identity_ptr": "*i64",
        "places_ptr": "*i32", "sent_ptr": "*i64", "done_ptr": "*i32", "sequences_ptr": "*i64",
    }  # fmt: skip
    constants = {
        "HAS_ROWS": has_rows, "WIRE": TYPES.get(wire, tl.float8e4nv),
        "COMPRESSED": wire not in TYPES, "K": 8, "K_PAD": 8, "H_PAD": 8192, "CHUNK": 64,
    }  # fmt: skip
    compile_(put_row, rows, constants)
    compile_(await_answer, {**WORDS, "sent_ptr": "*i64", "ready_ptr": "*i32"}, {})
    sums = {**WORDS, "places_ptr": "*i32", "ready_ptr": "*i32", "out_ptr": "*fp32"}
    del sums["control_ptr"]
    compile_(combine_row, sums, {"ANSWER": TYPES[hidden], "BLOCK": 1024})


def compile_expert(compute: torch.dtype, wire: torch.dtype, **ones: int) -> None:
    """Compile gather and reply."""
    windows = {**WORDS, "consumed_ptr": "*i64", "headers_ptr": "*i64"}
    compile_kernel(await_request, {**windows, "incarnations_ptr": "*i64"}, ones, num_warps=4)
    rows = {
        **WORDS, "headers_ptr": "*i64", "limits_ptr": "*i64", "hidden_ptr": NAMES[compute],
        "slots_ptr": "*i32", "weights_ptr": "*fp32",
    }  # fmt: skip
    constants = {
        "WIRE": TYPES.get(wire, tl.float8e4nv), "COMPUTE": TYPES[compute],
        "COMPRESSED": wire not in TYPES, "K": 8, "K_PAD": 8, "H_PAD": 8192, **ones,
    }  # fmt: skip
    compile_kernel(gather_row, rows, constants, num_warps=4)
    partial = {
        **windows, "identity_ptr": "*i64", "done_ptr": "*i32", "partial_ptr": NAMES[compute],
    }  # fmt: skip
    del partial["control_ptr"]
    compile_kernel(send_row, partial, {"ANSWER": TYPES[compute], "H_PAD": 8192, **ones},
                   num_warps=4)  # fmt: skip


def main() -> None:
    compile_attention(torch.bfloat16, torch.float8_e4m3fn, has_rows=True)
    compile_attention(torch.bfloat16, torch.bfloat16, has_rows=False, N=1, variants=1)
    compile_expert(torch.bfloat16, torch.float8_e4m3fn)
    compile_expert(torch.float32, torch.float32, num_micro_batches=1)


if __name__ == "__main__":
    main()
