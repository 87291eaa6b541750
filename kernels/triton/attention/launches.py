"""Paged attention on a GPU: the choice of kernel per sequence, and of tiles.

Short slices (decode, verification of draft trees) go to a kernel that splits their keys
among programs and one that combines the splits; long ones (chunks of prompts) to a kernel
whose programs read all keys of a tile of rows. Both are launched if a batch may hold both, and
each program reads from device memory whether its kernel handles the sequence: nothing is copied
to the host, and a launch depends only on shapes and on the bounds in AttentionMeta, so that a
CUDA graph of a bucket can be replayed for any batch inside it. Called by attention nodes
whose device is a GPU. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.contracts import AttentionMeta, KeyCodes, is_latent
from kernels.triton.attention.kernels import attend_long, attend_short, combine_splits
from kernels.triton.retrieval.fetch import fetch_selected
from kernels.triton.retrieval.launches import others_of, select_slots
from topspin.plan.kv_cache import MAX_GPU_DIM, gpu_misfit

CACHE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
# Rows of a product's tile on a tensor core.
MIN_ROWS: Final = 16
# The sums of short_rows rows need the registers of more warps.
SHORT_ROWS_WARPS: Final = 8
# Numbers of a sum that one program combines: more splits of more numbers need too many registers.
COMBINED: Final = 256


@dataclass(frozen=True)
class AttentionTiles:
    """Block sizes, all powers of two; the defaults are for Hopper and were not measured."""

    max_short_len: int = 64
    """A batch goes completely to the split kernel if its slices are not longer."""
    mixed_splits: int = 8
    """Splits of short slices in batches with long ones; a constant, see plan_attention."""
    short_rows: int = 64
    """The maximum (query, head) pairs of one tile in the split kernel: those of a warp group."""
    short_keys: int = 64
    """Keys of one block in the split kernel."""
    short_warps: int = 4
    short_stages: int = 3
    min_chunk: int = 256
    """The minimum keys of a split; a multiple of short_keys."""
    min_programs: int = 132
    """With fewer programs splits may be proportionally shorter: most of the device is idle."""
    max_splits: int = 64
    programs: int = 1056
    """The number of programs that keeps the device busy: splits are made up to it."""
    long_rows: int = 128
    """(query, head) pairs of one tile in the kernel for long slices."""
    long_keys: int = 128
    long_warps: int = 8
    long_stages: int = 3

    def warps_of(self, rows: int) -> int:
        """Return the warps of the split kernel for tiles of `rows`."""
        return max(self.short_warps, SHORT_ROWS_WARPS if rows == self.short_rows else 0)

    def stages_of(self, *, has_tree: bool) -> int:
        """Return the stages of the long kernel: a tree's mask takes the shared memory of one."""
        return min(self.long_stages, 2) if has_tree else self.long_stages


def attention_tiles(value_dim: int, cache_dtype: torch.dtype) -> AttentionTiles:
    """Return the tiles of a shape: smaller ones for wider rows.

    Those of latents of 512 + 64 numbers take up to 152 KiB of shared memory, as compiled for Hopper
    (227 KiB) and Ampere (163 KiB).
    """
    row_bytes = triton.next_power_of_2(value_dim) * max(cache_dtype.itemsize, 2)
    if value_dim > MAX_GPU_DIM:
        # Queries that are converted for keys in fp8 stay in registers, where fewer fit.
        rows = 64 if cache_dtype == torch.bfloat16 else 32
        keys = 32 if row_bytes <= 1024 else 16
        # One or two programs fit on a multiprocessor, and each split writes wide partial sums.
        return AttentionTiles(
            short_rows=rows, short_keys=keys, short_stages=2, mixed_splits=4, programs=264,
            long_rows=rows, long_keys=keys, long_stages=2,
        )  # fmt: skip
    if row_bytes > 512:
        return AttentionTiles(short_keys=16, long_rows=32, long_keys=16, long_stages=2)
    if row_bytes > 256:
        return AttentionTiles(short_keys=32, long_rows=64, long_keys=32, long_stages=2)
    return AttentionTiles()


class Plan(NamedTuple):
    """The launches for a batch, determined by its shapes and bounds alone."""

    short_len: int
    """The split kernel handles sequences of 1 .. short_len rows; a power of two."""
    short_rows: int
    """Rows of its tiles."""
    splits: int
    """Programs that share the keys of one tile; a power of two."""
    min_chunk: int
    """The minimum keys of a split."""
    has_long: bool
    """Whether there may be a longer sequence."""


def plan_attention(
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    max_query_len: int,
    max_context_len: int,
    window: int | None,
    tiles: AttentionTiles,
) -> Plan:
    """Cut a batch of S sequences into launches.

    In a batch with prompts a slice is short if its rows fill at most the smallest tile of a
    product; in a batch without slices over max_short_len all are. A kernel is compiled, in
    seconds, for each pair of short_len and splits. Decode steps have one short_len and splits by
    batch, since they are recorded before the first request. All others have one of two lengths,
    with one number of splits each: the node's rehearsal compiles both.
    """
    mixed_len = _mixed_len(group)
    short_len = mixed_len
    if max_query_len <= 1:
        short_len = 1
    elif mixed_len < max_query_len <= tiles.max_short_len:
        short_len = tiles.max_short_len
    pairs = short_len * group
    short_rows = min(max(triton.next_power_of_2(pairs), MIN_ROWS), tiles.short_rows)
    has_long = max_query_len > short_len
    if max_query_len > 1:
        # Partial sums of many rows would take much memory, and many rows fill the device.
        splits = min(tiles.mixed_splits, tiles.max_splits) if short_len == mixed_len else 1
        return Plan(short_len, short_rows, splits, tiles.min_chunk, has_long)
    programs = max(num_seqs * num_kv_heads * triton.cdiv(pairs, short_rows), 1)
    span = max_context_len if window is None else min(max_context_len, window + short_len)
    min_chunk = tiles.min_chunk
    # One split is not divided further, which would cost another launch.
    if span > min_chunk:
        share = triton.cdiv(min_chunk * programs, tiles.min_programs)
        whole_blocks = triton.cdiv(share, tiles.short_keys) * tiles.short_keys
        min_chunk = min(whole_blocks, min_chunk)
    wanted = min(triton.cdiv(tiles.programs, programs), triton.cdiv(span, min_chunk))
    splits = min(triton.next_power_of_2(max(wanted, 1)), tiles.max_splits)
    return Plan(short_len, short_rows, splits, min_chunk, has_long)


def _mixed_len(group: int) -> int:
    """Return the length of slices that are short in a batch with prompts."""
    length: int = triton.next_power_of_2(max(MIN_ROWS // group, 1))
    return length


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, sinks: Tensor | None) -> None:
    num_heads, head_dim = q.shape[1:]
    wanted = (*q.shape[:2], v_cache.shape[3])
    if q.stride(2) != 1 or out.stride(2) != 1 or out.shape != wanted or out.dtype != q.dtype:
        raise ValueError(f"q {tuple(q.shape)} {q.stride()}, out {tuple(out.shape)} {out.stride()}")
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.stride() != v_cache.stride():
        raise ValueError(f"caches differ: {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"caches are {k_cache.dtype}, {v_cache.dtype}")
    if k_cache.shape[3] != head_dim or k_cache.stride(3) != 1:
        raise ValueError(f"caches {tuple(k_cache.shape)} for heads of {head_dim}")
    misfit = gpu_misfit(head_dim, v_cache.shape[3] if is_latent(k_cache, v_cache) else None)
    if misfit is not None:
        raise ValueError(misfit)
    if num_heads % k_cache.shape[2] != 0:
        raise ValueError(f"{num_heads} query heads for {k_cache.shape[2]} key/value heads")
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks {tuple(sinks.shape)} for {num_heads} heads")


def _check_meta(meta: AttentionMeta, num_rows: int) -> None:
    num_seqs = len(meta.context_lens)
    if len(meta.query_start) != num_seqs + 1 or len(meta.block_tables) != num_seqs:
        raise ValueError(f"{len(meta.query_start)} starts, {len(meta.block_tables)} tables")
    tables = (meta.query_start, meta.context_lens, meta.block_tables)
    if any(x.dtype != torch.int32 or x.stride(-1) != 1 for x in tables):
        raise ValueError("query_start, context_lens and block_tables must be contiguous int32")
    tree = meta.tree_mask
    if tree is not None:
        fits = len(tree) == num_rows and tree.shape[1] >= meta.max_query_len
        if not fits or tree.dtype != torch.bool or tree.stride(1) != 1:
            raise ValueError(f"tree_mask {tree.dtype} {tuple(tree.shape)} for {num_rows} rows")
    lens = meta.tree_lens
    if lens is not None and (
        lens.shape != (num_seqs,) or lens.dtype != torch.int32 or lens.stride(0) != 1
    ):
        raise ValueError(f"tree_lens {lens.dtype} {tuple(lens.shape)} for {num_seqs} sequences")


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    codes: KeyCodes | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implement `kernels.reference.paged_attention`; `attend` takes tiles too.

    A retrieval needs its bounds, and contiguous caches.
    """
    if codes is None or meta.retrieval is None:
        return attend(
            q, k_cache, v_cache, meta,
            scale=scale, sliding_window=sliding_window, sinks=sinks, out=out,
        )  # fmt: skip
    if sliding_window is not None:
        raise ValueError("layers with a sliding window have no codes")
    _check_meta(meta, len(q))
    out = q.new_empty(*q.shape[:2], v_cache.shape[3]) if out is None else out
    if len(q) == 0:
        return out
    group = q.shape[1] // k_cache.shape[2]
    others = others_of(meta)
    if others is not None:
        others = _splitting(others, group)
        attend(q, k_cache, v_cache, others, scale=scale, sinks=sinks, out=out)
    selecting = select_slots(q, k_cache.shape[1], codes, meta)
    fetch_selected(k_cache, v_cache, codes, meta, selecting)
    keys, values = (x.view(-1, 1, *x.shape[2:]) for x in (k_cache, v_cache))
    selecting = _splitting(selecting, group)
    return attend(q, keys, values, selecting, scale=scale, sinks=sinks, out=out)


def _splitting(meta: AttentionMeta, group: int) -> AttentionMeta:
    """Return `meta` with a bound of rows for which plan_attention has one number of splits.

    Steps of one row per sequence would be cut into splits by the size of the batch, and such steps
    are not recorded here: a kernel would be compiled while requests wait.
    """
    return replace(meta, max_query_len=max(meta.max_query_len, min(_mixed_len(group), 2)))


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """Attend q [T, N, D] to cached keys and values [B, block_size, G, D]; returns [T, N, D].

    Values may be latents, as in `kernels.reference.paged_attention`.
    Scores, softmax and sums are fp32; weights are rounded to q's dtype before they multiply
    values. `sinks` [N] are logits, one per head, that take part in the softmax but have no
    value (gpt-oss). With a float8_e4m3fn cache and bf16 queries products are in fp16, which
    represents all of the cache's numbers. Raises ValueError for tensors that do not fit together.
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[3]) if out is None else out
    _check(q, k_cache, v_cache, out, sinks)
    _check_meta(meta, len(q))
    if scale <= 0.0:
        raise ValueError(f"scores are scaled by {scale}, which is not positive")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"a sliding window of {sliding_window} sees nothing")
    num_rows, num_heads, head_dim = q.shape
    value_dim = v_cache.shape[3]
    if num_rows == 0:
        return out
    num_seqs, num_kv_heads = len(meta.context_lens), k_cache.shape[2]
    group = num_heads // num_kv_heads
    if tiles is None:
        tiles = attention_tiles(value_dim, k_cache.dtype)
    plan = plan_attention(
        num_seqs, num_kv_heads, group, meta.max_query_len, meta.max_context_len,
        sliding_window, tiles,
    )  # fmt: skip
    tree = meta.query_start if meta.tree_mask is None else meta.tree_mask.view(torch.uint8)
    tree_lens = meta.query_start if meta.tree_lens is None else meta.tree_lens
    table_head = 0 if meta.block_tables.ndim == 2 else meta.block_tables.stride(1)
    batch = _Batch(
        q=q, k_cache=k_cache, v_cache=v_cache, out=out, meta=meta, tree=tree,
        tree_lens=tree_lens, sinks=q if sinks is None else sinks, window=sliding_window or 0,
        scale=scale * math.log2(math.e),
        strides=(
            *q.stride()[:2], *out.stride()[:2], meta.block_tables.stride(0), table_head,
            tree.stride(0),
            *k_cache.stride()[:3],
        ),
        shape={
            "SHORT_LEN": plan.short_len, "GROUP": group, **head_blocks(head_dim, value_dim),
            "BLOCK_SIZE": k_cache.shape[1], "WINDOW": sliding_window is not None,
            "TREE": meta.tree_mask is not None,
            "TREE_LENS": meta.tree_mask is not None and meta.tree_lens is not None,
            "SINKS": sinks is not None,
        },
    )  # fmt: skip
    _launch_short(batch, plan, tiles)
    if plan.has_long:
        _launch_long(batch, tiles)
    return out


def head_blocks(head_dim: int, value_dim: int) -> dict[str, int]:
    """Return the kernels' constants for keys of `head_dim` numbers and values of `value_dim`."""
    tail = head_dim - value_dim
    return {
        "DIM": head_dim,
        "VALUES": value_dim,
        "BLOCK_D": max(triton.next_power_of_2(value_dim), 16),
        "BLOCK_T": max(triton.next_power_of_2(tail), 16) if tail else 0,
    }


class _Batch(NamedTuple):
    """The arguments of both kernels."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    meta: AttentionMeta
    tree: Tensor
    tree_lens: Tensor
    sinks: Tensor
    window: int
    scale: float
    strides: tuple[int, ...]
    shape: dict[str, int | bool]


def _launch_short(batch: _Batch, plan: Plan, tiles: AttentionTiles) -> None:
    q, meta, shape = batch.q, batch.meta, batch.shape
    num_rows, num_heads, value_dim = batch.out.shape
    num_seqs, short_len = len(meta.context_lens), plan.short_len
    partial = scores = q
    if plan.splits > 1:
        rows = (num_seqs * short_len, num_heads, plan.splits)
        partial = torch.empty(*rows, value_dim, dtype=torch.float32, device=q.device)
        scores = torch.empty(rows, dtype=torch.float32, device=q.device)
    seq_tiles = triton.cdiv(short_len * shape["GROUP"], plan.short_rows)
    grid = (batch.k_cache.shape[2], num_seqs * seq_tiles + 1, plan.splits)
    attend_short[grid](
        q, batch.k_cache, batch.v_cache, batch.out, partial, scores, meta.query_start,
        meta.context_lens, meta.block_tables, batch.tree, batch.tree_lens, batch.sinks,
        num_rows, num_seqs, num_heads, batch.window, batch.scale, plan.min_chunk, *batch.strides,
        **shape, SPLITS=plan.splits, BLOCK_M=plan.short_rows, BLOCK_N=tiles.short_keys,
        num_warps=tiles.warps_of(plan.short_rows), num_stages=tiles.short_stages,
    )  # fmt: skip
    if plan.splits > 1:
        width = min(shape["BLOCK_D"], COMBINED)
        combine_splits[(num_seqs * short_len, num_heads, triton.cdiv(value_dim, width))](
            partial, scores, batch.out, meta.query_start, meta.context_lens, batch.tree_lens,
            num_heads, batch.window, plan.min_chunk, *batch.out.stride()[:2],
            SHORT_LEN=short_len, SPLITS=plan.splits, VALUES=value_dim, BLOCK_N=tiles.short_keys,
            BLOCK_D=width, WINDOW=shape["WINDOW"], TREE_LENS=shape["TREE_LENS"],
            num_warps=4,
        )  # fmt: skip


def _launch_long(batch: _Batch, tiles: AttentionTiles) -> None:
    meta, num_seqs = batch.meta, len(batch.meta.context_lens)
    num_tiles = len(batch.q) * batch.shape["GROUP"] // tiles.long_rows + num_seqs
    attend_long[(batch.k_cache.shape[2], num_tiles)](
        batch.q, batch.k_cache, batch.v_cache, batch.out, meta.query_start, meta.context_lens,
        meta.block_tables, batch.tree, batch.tree_lens, batch.sinks, num_seqs, batch.window,
        batch.scale, *batch.strides, **batch.shape, BLOCK_M=tiles.long_rows,
        BLOCK_N=tiles.long_keys, num_warps=tiles.long_warps,
        num_stages=tiles.stages_of(has_tree=bool(batch.shape["TREE"])),
    )  # fmt: skip
