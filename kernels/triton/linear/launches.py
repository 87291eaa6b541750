"""Products of rows with one weight on a GPU: torch's if the weight is plain, else our kernel.

A quantised weight is read once, as codes, and multiplied in the rows' dtype, so memory delivers
only codes. Few rows: tiles as small as a matrix instruction, and the inputs split among programs
until the device is busy. Many: tiles that share their loads.

Called by `kernels.triton.ops`. Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels.contracts import LinearWeight
from kernels.triton.grouped_mlp.weights import FORMATS, GROUP, GpuWeight
from kernels.triton.linear.kernels import add_splits, linear_tile

PROGRAMS: Final = 528
"""Four on each of Hopper's 132 multiprocessors: splits are made up to this many."""
SPLIT_GROUPS: Final = 4
"""The minimum groups of inputs of a split."""
MAX_SPLIT_ROWS: Final = 256
"""With more rows there are enough tiles, and the splits' sums would take long to write."""
SUM_WIDTH: Final = 1024


@dataclass(frozen=True)
class LinearTiles:
    """A tile of block_m rows by block_n outputs, and its program's settings.

    `splits` programs share the inputs of a tile. The inputs of a tile's step are one group of a
    quantised weight, and the outputs of an fp8 tile lie in one block of 128.
    """

    block_m: int = 16
    block_n: int = 64
    block_k: int = GROUP
    group_m: int = 8
    swap: int = 1
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


def default_tiles(weight: GpuWeight, dtype: torch.dtype, num_rows: int) -> LinearTiles:
    """Return the tiles of a quantised weight: chosen by reasoning for Hopper, not measured.

    (ptxas says that all sums of bf16 rows stay in registers.)
    """
    if num_rows > MAX_SPLIT_ROWS:
        if dtype == torch.float32:
            return LinearTiles(block_n=32, swap=0, num_stages=2)
        return LinearTiles(128, 128, num_warps=8, num_stages=3)
    programs = PROGRAMS
    if dtype == torch.float32:
        tiles = LinearTiles(block_n=32, swap=0, num_stages=2)
    elif num_rows <= 32:
        tiles = LinearTiles(block_m=max(triton.next_power_of_2(num_rows), 16))
    else:
        tiles, programs = LinearTiles(block_m=64, num_stages=3), PROGRAMS // 2
    row_tiles = triton.cdiv(max(num_rows, 1), tiles.block_m)
    num_tiles = row_tiles * triton.cdiv(weight.out_features, tiles.block_n)
    groups = triton.cdiv(weight.in_features, GROUP)
    splits = max(min(triton.cdiv(programs, num_tiles), groups // SPLIT_GROUPS), 1)
    return replace(tiles, splits=splits)


def linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply x [R, I] by a weight [O, I] transposed and add bias [O]; returns [R, O].

    `out` in fp32 gets the unrounded sums of bf16 products. Raises ValueError for shapes, dtypes
    or strides that do not fit a quantised weight.
    """
    assert isinstance(weight, GpuWeight)
    if weight.scales is not None:
        tiles = default_tiles(weight, x.dtype, len(x))
        return tiled_linear(x, weight, bias, out, tiles=tiles)
    if out is None:
        return F.linear(x, weight.data, bias)
    if out.dtype == x.dtype:
        if bias is None:
            return torch.mm(x, weight.data.t(), out=out)
        return torch.addmm(bias, x, weight.data.t(), out=out)
    if x.is_cuda:
        # cuBLAS has such products; torch exposes them only by this op with `out`.
        torch.ops.aten.mm.dtype_out(x, weight.data.t(), out.dtype, out=out)
    else:
        torch.mm(x.to(out.dtype), weight.data.t().to(out.dtype), out=out)
    return out if bias is None else out.add_(bias)


def tiled_linear(
    x: Tensor,
    weight: GpuWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    tiles: LinearTiles,
) -> Tensor:
    """Compute `linear` with a weight in any format, by our kernel with these tiles."""
    num_rows, num_in, num_out = len(x), weight.in_features, weight.out_features
    if out is None:
        out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _check(x, weight, bias, out)
    if num_rows == 0:
        return out
    blocks = triton.cdiv(num_in, tiles.block_k)
    split_blocks = triton.cdiv(blocks, min(tiles.splits, blocks))
    splits = triton.cdiv(blocks, split_blocks)
    target = out
    if splits > 1:
        target = torch.empty(splits * num_rows, num_out, dtype=torch.float32, device=x.device)
    some_bias = x if bias is None else bias
    num_tiles = triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(num_out, tiles.block_n)
    linear_tile[(num_tiles, splits)](
        x, weight.data, weight.data if weight.scales is None else weight.scales, some_bias,
        target, num_rows, num_out, num_in, split_blocks * tiles.block_k, x.stride(0),
        weight.data.stride(0),
        weight.scale_stride,
        target.stride(0),
        FORMAT=FORMATS.index(weight.weight_format), SWAP=bool(tiles.swap),
        EVEN=num_in % tiles.block_k == 0, HAS_BIAS=bias is not None and splits == 1,
        GROUP_M=tiles.group_m, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        add_splits[(num_rows, triton.cdiv(num_out, SUM_WIDTH))](
            target, some_bias, out, num_rows, num_out, out.stride(0), HAS_BIAS=bias is not None,
            SPLITS=splits, BLOCK=SUM_WIDTH, num_warps=4,
        )  # fmt: skip
    return out


def _check(x: Tensor, weight: GpuWeight, bias: Tensor | None, out: Tensor) -> None:
    num_in, num_out = weight.in_features, weight.out_features
    if x.ndim != 2 or x.shape[1] != num_in or x.stride(1) != 1:
        raise ValueError(f"x is {tuple(x.shape)} with strides {x.stride()}, for {num_in} inputs")
    if out.shape != (len(x), num_out) or (num_out > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out is {tuple(out.shape)} with strides {out.stride()}, for {len(x)} rows of {num_out}"
        )
    if any(each.dtype not in (torch.float32, torch.bfloat16) for each in (x, out)):
        raise ValueError(f"x is {x.dtype} and out {out.dtype}, not float32 or bfloat16")
    if weight.scales is None and weight.data.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {weight.data.dtype}")
    if bias is not None and (bias.shape != (num_out,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias.shape)} for {num_out} outputs")
