"""The router on a GPU: logits to experts and weights, and pairs grouped by local expert.

One Triton kernel chooses the experts of a block of rows. Pairs are grouped by a program per
expert; very many of them by one kernel that counts each block's pairs and a second one that
places them (if all fit one block, the first does both). No atomics: the order is always that of
`kernels.reference`, ascending in (row, choice) inside an expert. Knows no model and no node. Called
by `kernels.triton.ops` and `kernels.triton.grouped_mlp.launches`.

Of equal scores the lowest id goes first. Experts are chosen by logits, which have the order of
the probabilities: where two of these round to the same number (far below the best) the reference
takes the lower id and this the greater logit. The counts are read on the device only, and no launch
depends on data, so a CUDA graph can replay it for any rows of the same shape.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.contracts import Permutation, Routing, RoutingRule
from kernels.triton.router.grouping import group_slot
from kernels.triton.router.kernels import (
    count_block,
    local_slots_block,
    place_block,
    route_block,
)

# Elements of a block of rows times padded experts: two or three such tiles stay in registers.
BLOCK_ELEMENTS: Final = 4096
# Up to this many, one program does all rows, and one launch is saved.
SINGLE_ELEMENTS: Final = 4096
# Where pairs are not grouped, rows are independent: many small programs, since sequential
# choices are bound by latency.
ROUTE_ELEMENTS: Final = 128
# Up to this many pairs a program per slot groups them.
SPREAD_PAIRS: Final = 8192
SPREAD_BLOCK: Final = 1024
ELEMENTS_PER_WARP: Final = 512
MAX_WARPS: Final = 8
SLOTS_AT_ONCE: Final = 512


class _Grid(NamedTuple):
    """The division of rows into blocks."""

    block_rows: int
    num_blocks: int

    @property
    def is_single(self) -> bool:
        return self.num_blocks == 1


def _num_warps(grid: _Grid, width: int) -> int:
    """Return a warp per ELEMENTS_PER_WARP of a block: sums of a small block stay in one warp."""
    return min(max(grid.block_rows * width // ELEMENTS_PER_WARP, 1), MAX_WARPS)


def _cut(num_rows: int, width: int) -> _Grid:
    """Cut rows so that a tile of a block's rows times `width` columns stays in registers."""
    whole = triton.next_power_of_2(max(num_rows, 1))
    if whole * width <= SINGLE_ELEMENTS:
        return _Grid(whole, 1)
    block_rows = max(1, BLOCK_ELEMENTS // width)
    return _Grid(block_rows, triton.cdiv(num_rows, block_rows))


class _Pairs(NamedTuple):
    """Buffers for a permutation and for the histograms that it is made from."""

    groups: Permutation
    hist: Tensor

    @classmethod
    def make(cls, num_pairs: int, num_slots: int, grid: _Grid, device: torch.device) -> _Pairs:
        empty = torch.empty(2 * num_pairs, dtype=torch.int64, device=device)
        sums = torch.empty(2 * num_slots + 1, dtype=torch.int64, device=device)
        if num_pairs == 0:
            # No kernel runs to write them.
            sums.zero_()
        width = triton.next_power_of_2(num_slots)
        hist = torch.empty(
            0 if grid.is_single else grid.num_blocks * width, dtype=torch.int32, device=device
        )
        order, row_of = empty.view(2, num_pairs)
        return cls(Permutation(order, row_of, sums[:num_slots], sums[num_slots:]), hist)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        groups = self.groups
        return self.hist, groups.order, groups.row_of, groups.counts, groups.offsets


def _place(slots: Tensor, pairs: _Pairs, num_slots: int, grid: _Grid) -> None:
    num_rows, top_k = slots.shape
    width = triton.next_power_of_2(num_slots)
    place_block[(grid.num_blocks,)](
        slots,
        *pairs.arguments,
        num_rows,
        num_slots,
        grid.num_blocks,
        S_PAD=triton.next_power_of_2(num_slots),
        K=top_k,
        K_PAD=triton.next_power_of_2(top_k),
        BLOCK_R=grid.block_rows,
        CHUNK=16,
        num_warps=_num_warps(grid, width),
    )


def route(logits: Tensor, rule: RoutingRule) -> Routing:
    """Choose the experts of each row by `rule`; see `kernels.reference.route`.

    Raises ValueError for a top_k, a dtype or strides that the kernel does not support.
    """
    num_rows, num_experts = logits.shape
    top_k = rule.top_k
    if not 0 < top_k <= num_experts:
        raise ValueError(f"top_k {top_k} of {num_experts} experts")
    if rule.weights_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"routing weights are rounded to float32 or bfloat16, not {rule.weights_dtype}"
        )
    if num_experts > 1 and logits.stride(1) != 1:
        raise ValueError(f"the logits of a row must be contiguous, strides {logits.stride()}")
    experts = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    if num_rows:
        width = triton.next_power_of_2(num_experts)
        block_rows = max(ROUTE_ELEMENTS // width, 1)
        grid = _Grid(block_rows, triton.cdiv(num_rows, block_rows))
        route_block[(grid.num_blocks,)](
            logits,
            logits if rule.bias is None else rule.bias,
            experts,
            weights,
            num_rows,
            num_experts,
            logits.stride(0),
            rule.epsilon,
            rule.least_sum,
            rule.scale,
            SCORES=("softmax", "sigmoid", "logits").index(rule.scores),
            HAS_BIAS=rule.bias is not None,
            GROUPS=rule.num_groups,
            GROUP_SIZE=num_experts // rule.num_groups,
            TOP_GROUPS=rule.top_groups,
            BEST_OF_GROUP=min(rule.best_of_group, num_experts // rule.num_groups),
            RENORMALISE=rule.renormalise,
            ROUND=rule.weights_dtype == torch.bfloat16,
            E_PAD=width,
            K=top_k,
            K_PAD=triton.next_power_of_2(top_k),
            BLOCK_R=grid.block_rows,
            num_warps=_num_warps(grid, width),
        )
    return Routing(experts, weights)


def _spread(slots: Tensor, num_slots: int) -> Permutation:
    """Group pairs with one program per slot."""
    num_pairs = slots.numel()
    groups = _Pairs.make(num_pairs, num_slots, _Grid(len(slots), 1), slots.device).groups
    group_slot[(num_slots + 1,)](
        slots,
        *groups,
        num_pairs,
        num_slots,
        K=slots.shape[1],
        BLOCK=min(triton.next_power_of_2(num_pairs), SPREAD_BLOCK),
        num_warps=4,
    )
    return groups


def permute(slots: Tensor, num_experts: int) -> Permutation:
    """Group the pairs of slots i32[R, K] by local expert; see `kernels.reference.permute`.

    The caller ensures that slots are below num_experts: a check would wait for the device.
    """
    num_rows, top_k = slots.shape
    num_pairs = num_rows * top_k
    slots = slots.contiguous()
    if 0 < num_pairs <= SPREAD_PAIRS:
        return _spread(slots, num_experts)
    width = triton.next_power_of_2(num_experts)
    grid = _cut(num_rows, width)
    pairs = _Pairs.make(num_pairs, num_experts, grid, slots.device)
    if num_pairs:
        count_block[(grid.num_blocks,)](
            slots,
            *pairs.arguments,
            num_rows,
            num_experts,
            SINGLE=grid.is_single,
            S_PAD=triton.next_power_of_2(num_experts),
            K=top_k,
            K_PAD=triton.next_power_of_2(top_k),
            BLOCK_R=grid.block_rows,
            num_warps=_num_warps(grid, width),
        )
        if not grid.is_single:
            _place(slots, pairs, num_experts, grid)
    return pairs.groups


def local_slots(
    experts: Tensor,
    slot_of: Tensor,
    num_rows: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the local slot of each pair's expert on each of N nodes, i32[N, T, K], in one launch.

    experts i64[T, K], slot_of i32[N, P] by node and logical expert (negative: not there). -1
    in the result: the expert is elsewhere, or the row is padding, which starts at num_rows[0]
    (i64[1], on the device) if that is given. `out` is contiguous. Raises ValueError for tensors
    that do not fit.
    """
    (num_tokens, top_k), (num_nodes, num_experts) = experts.shape, slot_of.shape
    if out is None:
        out = torch.empty(num_nodes, num_tokens, top_k, dtype=torch.int32, device=experts.device)
    if out.shape != (num_nodes, num_tokens, top_k) or out.dtype != torch.int32:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not i32[N, T, K]")
    if not (out.is_contiguous() and experts.is_contiguous()) or slot_of.stride(1) != 1:
        raise ValueError("out, experts and the rows of slot_of must be contiguous")
    if experts.dtype != torch.int64 or slot_of.dtype != torch.int32:
        raise ValueError(f"experts are {experts.dtype}, slot_of {slot_of.dtype}")
    num_pairs = num_tokens * top_k
    if num_pairs:
        block = min(triton.next_power_of_2(num_pairs), SLOTS_AT_ONCE)
        local_slots_block[(triton.cdiv(num_pairs, block), num_nodes)](
            experts,
            slot_of,
            experts if num_rows is None else num_rows,
            out,
            num_pairs,
            num_experts,
            slot_of.stride(0),
            K=top_k,
            HAS_ROWS=num_rows is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out
