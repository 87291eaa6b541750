"""Finds the expert and pairs of a program of the grouped MLP, on the device.

Pairs that were grouped by expert are found from the offsets of the groups: the grid is an upper
bound, and programs beyond the last tile return. If pairs are few, each program searches the
slots for its pairs, which saves the launch that groups them. Called by the kernels of
`kernels.triton.grouped_mlp.kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(
    num_tiles: tl.tensor, num_blocks: tl.tensor, GROUP_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return this program's tile of pairs and block of outputs.

    GROUP_M consecutive tiles of pairs use the same block of outputs, whose weights are then in
    the cache.
    """
    pid = tl.program_id(0)
    first = pid // (GROUP_M * num_blocks) * GROUP_M
    width = tl.minimum(num_tiles - first, GROUP_M)
    return first + pid % (GROUP_M * num_blocks) % width, pid % (GROUP_M * num_blocks) // width


@triton.jit
def find_tile(
    offsets_ptr: tl.tensor,
    E: tl.tensor,
    tile: tl.tensor,
    BLOCK_M: tl.constexpr,
    E_PAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a tile of grouped pairs: expert (>= E: none), first pair, and the expert's last."""
    experts = tl.arange(0, E_PAD)
    begins = tl.load(offsets_ptr + experts, mask=experts < E, other=0).to(tl.int32)
    ends = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0).to(tl.int32)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    tile -= tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    begin = tl.sum(tl.where(experts == expert, begins, 0), axis=0) + tile * BLOCK_M
    end = tl.sum(tl.where(experts == expert, ends, 0), axis=0)
    return expert, begin, end


@triton.jit
def find_few(
    slots_ptr: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.tensor,
    tile: tl.tensor,
    BLOCK_M: tl.constexpr,
    P_PAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a tile's expert (>= E: none), its pairs [BLOCK_M] and which are real, ungrouped.

    There is a tile per pair; the tile of every BLOCK_M-th pair of an expert handles that pair and
    the next ones of the expert, the other tiles nothing.
    """
    places = tl.arange(0, P_PAD)
    slots = tl.load(slots_ptr + places, mask=places < num_pairs, other=-1)
    slot = tl.load(slots_ptr + tile)
    is_same = slots == slot
    before = tl.sum((is_same & (places < tile)).to(tl.int32), axis=0)
    ranks = tl.cumsum(is_same.to(tl.int32), axis=0) - 1
    wanted = before + tl.arange(0, BLOCK_M)
    is_taken = is_same[None, :] & (ranks[None, :] == wanted[:, None])
    is_real = tl.sum(is_taken.to(tl.int32), axis=1) > 0
    pairs = tl.where(is_real, tl.sum(tl.where(is_taken, places[None, :], 0), axis=1), tile)
    expert = tl.where((slot >= 0) & (before % BLOCK_M == 0), slot, E)
    return expert, pairs, is_real


@triton.jit
def count_few(
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_pairs: tl.tensor,
    E: tl.tensor,
    E_PAD: tl.constexpr,
    P_PAD: tl.constexpr,
) -> None:
    """Write the pairs of each expert."""
    experts, places = tl.arange(0, E_PAD), tl.arange(0, P_PAD)
    slots = tl.load(slots_ptr + places, mask=places < num_pairs, other=-1)
    counts = tl.sum((slots[:, None] == experts[None, :]).to(tl.int64), axis=0)
    tl.store(counts_ptr + experts, counts, mask=experts < E)
