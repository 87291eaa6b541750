"""Compiles kernels to machine code for Hopper (latents for Ampere too) without a GPU; a program.

The interpreter runs Python, so only this finds code that the compiler refuses (a global, a type, a
shape) or that does not fit into shared memory. Triton must not be in interpreter mode, hence a
process of its own: see test_compiles.py. Prints a line per kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.contracts import NUM_CENTROIDS, NUM_SUBSPACES, SEGMENT_KEYS
from kernels.triton.attention.kernels import attend_long, attend_short, combine_splits
from kernels.triton.attention.launches import (
    COMBINED,
    AttentionTiles,
    attention_tiles,
    head_blocks,
)
from kernels.triton.norm import _norm_row
from kernels.triton.retrieval.kernels import list_slots, score_keys, score_segments
from kernels.triton.retrieval.launches import KEYS, ROWS, SEGMENTS, SLOTS
from kernels.triton.rotary import _rotate_and_store

HOPPER, AMPERE = 90, 80
SHARED_BYTES = {HOPPER: 227 * 1024, AMPERE: 163 * 1024}
"""Limits of one program: on an H100 or H200, and on an A100."""
triton.knobs.nvidia.dump_ptxas_log = True

NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv"}
FLOATS = ("scale", "eps", "epsilon")
SIZES = (
    "H", "F", "V", "num_in", "num_out", "split_size", "x_stride", "weight_stride", "scale_stride",
    "hidden_stride", "row_stride", "out_stride",
)  # fmt: skip
ALIGNED = ("_row", "_head", "_block", "_slot")


def compile_kernel(
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    device: int = HOPPER,
    most_spilled: int | None = None,
    **options: int,
) -> str:
    """Compile a kernel whose other arguments are numbers, as an aligned call would.

    `most_spilled`: so many bytes of a thread's registers may be kept in memory, None: any number.
    Returns its PTX.
    """
    signature = dict.fromkeys(kernel.arg_names, "i32")
    signature.update({name: "fp32" for name in FLOATS if name in signature})
    signature.update(pointers)
    signature.update(dict.fromkeys(constants, "constexpr"))
    assert set(signature) == set(kernel.arg_names), set(signature) ^ set(kernel.arg_names)
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and (name in pointers or name.endswith(ALIGNED) or name in SIZES)
    }
    source = ASTSource(kernel, signature=signature, constexprs=dict(constants), attrs=attributes)
    log = StringIO()
    with redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget("cuda", device, 32), options=options)
    shared = compiled.metadata.shared
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", log.getvalue())), default=0)
    print(
        f"{kernel.__name__}: {len(compiled.asm['cubin'])} bytes of code for {device}, "
        f"{shared} shared, {spilled} spilled, {dict(constants)}"
    )
    assert shared <= SHARED_BYTES[device], f"{shared} bytes shared"
    assert most_spilled is None or spilled <= most_spilled, f"{spilled} bytes spilled"
    ptx: str = compiled.asm["ptx"]
    return ptx


def compile_norms() -> None:
    for add in (False, True):
        pointers = {
            "x": "*fp32", "residual": "*bf16", "weight": "*bf16", "out": "*bf16",
        }  # fmt: skip
        compile_kernel(_norm_row, pointers, {"ADD": add, "BLOCK": 2048}, num_warps=4)


def compile_rotary(
    cache: torch.dtype, *, norm: bool, head_dim: int = 128, values: int = 128
) -> None:
    pointers = dict.fromkeys(("q", "k", "v", "q_norm", "k_norm"), "*bf16")
    pointers |= {"cos": "*fp32", "sin": "*fp32", "slots": "*i64"}
    pointers |= dict.fromkeys(("k_cache", "v_cache"), NAMES[cache])
    constants = {
        "Q_NORM": norm, "K_NORM": norm, "BLOCK_SIZE": 16, "HEADS": 4,
        "HALF": head_dim // 2, "VALUES": values,
    }  # fmt: skip
    compile_kernel(_rotate_and_store, pointers, constants, num_warps=1)


def compile_attention(
    q: torch.dtype,
    cache: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    block_size: int = 16,
    extras: bool = False,
    tree: bool = False,
    device: int = HOPPER,
    most_spilled: int | None = None,
) -> None:
    """Compile the three kernels with default tiles; `extras`: window, tree and sinks at once."""
    tree = tree or extras
    limits: dict[str, Any] = {"device": device, "most_spilled": most_spilled}
    blocks = head_blocks(head_dim, value_dim or head_dim)
    tiles: AttentionTiles = attention_tiles(blocks["VALUES"], cache)
    tables = dict.fromkeys(("query_start", "context_lens", "tree_lens"), "*i32")
    pointers = {
        "q": NAMES[q], "out": NAMES[q], "k_cache": NAMES[cache], "v_cache": NAMES[cache],
        "tree": "*u8", "sinks": "*fp32", "block_tables": "*i32", **tables,
    }  # fmt: skip
    partials = {"partial": "*fp32", "scores": "*fp32"}
    shape: dict[str, Any] = {"WINDOW": extras, "TREE_LENS": tree}
    shared = {
        "GROUP": 8, "BLOCK_SIZE": block_size, "TREE": tree, "SINKS": extras, **shape, **blocks,
    }  # fmt: skip
    for splits, rows, length in ((1, 16, 2), (8, tiles.short_rows, 8)):
        constants = {"SHORT_LEN": length, "SPLITS": splits, "BLOCK_N": tiles.short_keys}
        compile_kernel(
            attend_short, pointers | partials, {**shared, **constants, "BLOCK_M": rows},
            num_warps=tiles.warps_of(rows), num_stages=tiles.short_stages, **limits,
        )  # fmt: skip
    shape |= {"VALUES": blocks["VALUES"], "BLOCK_D": min(blocks["BLOCK_D"], COMBINED)}
    constants["SPLITS"] = tiles.max_splits
    outs = {"out": NAMES[q], **tables, **partials}
    compile_kernel(combine_splits, outs, {**shape, **constants}, num_warps=4, **limits)
    constants = {"SHORT_LEN": 2, "BLOCK_M": tiles.long_rows, "BLOCK_N": tiles.long_keys}
    compile_kernel(
        attend_long, pointers, {**shared, **constants},
        num_warps=tiles.long_warps, num_stages=tiles.stages_of(has_tree=tree), **limits,
    )  # fmt: skip


def compile_retrieval(q: torch.dtype, head_dim: int) -> None:
    tables = ("query_start", "seqs", "segments", "coded_end", "budgets", "summarised",
              "context_lens", "block_tables")  # fmt: skip
    pointers = {
        "q": NAMES[q], "centroids": "*bf16", "codes": "*u8", "summaries": "*bf16",
        "scores": "*fp32", "best": "*i64", "searched": "*i64", "lists": "*i32",
        **dict.fromkeys(tables, "*i32"),
    }  # fmt: skip
    wide = triton.next_power_of_2(head_dim)
    shared = {
        "GROUP": 8, "DIM": head_dim, "SEGMENT": SEGMENT_KEYS, "BLOCK_M": ROWS, "BLOCK_D": wide,
    }  # fmt: skip
    shape = {"SUBSPACES": NUM_SUBSPACES, "CENTROIDS": NUM_CENTROIDS, "BLOCK_N": KEYS}
    for kernel, own in (
        (score_segments, {**shared, "BLOCK_N": SEGMENTS}),
        (score_keys, {**shared, **shape}),
        (list_slots, {"SEGMENT": SEGMENT_KEYS, "BLOCK_SIZE": 16, "BLOCK": SLOTS}),
    ):
        needed = {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
        compile_kernel(kernel, needed, own, num_warps=4)


def main() -> None:
    bf16, fp32, fp8 = NAMES
    compile_norms()
    for cache, norm in ((bf16, False), (bf16, True), (fp8, True), (fp32, True)):
        compile_rotary(cache, norm=norm)
    compile_rotary(bf16, norm=False, head_dim=64, values=512)
    compile_attention(bf16, bf16, 128)
    compile_attention(bf16, bf16, 128, extras=True)
    compile_attention(bf16, bf16, 128, tree=True)
    compile_attention(bf16, bf16, 80, block_size=128)
    compile_attention(bf16, bf16, 256)
    compile_attention(bf16, fp8, 128)
    compile_attention(fp32, fp32, 64, extras=True)
    compile_attention(bf16, bf16, 128, block_size=1)
    for device in (HOPPER, AMPERE):
        for rank in (512, 256):
            shape: dict[str, Any] = {"value_dim": rank, "device": device, "most_spilled": 256}
            compile_attention(bf16, bf16, rank + 64, **shape)
    compile_attention(bf16, bf16, 576, value_dim=512, extras=True)
    compile_attention(bf16, fp8, 576, value_dim=512, most_spilled=256)
    compile_attention(fp32, fp32, 576, value_dim=512)
    compile_retrieval(bf16, 128)
    compile_retrieval(fp32, 80)


if __name__ == "__main__":
    main()
