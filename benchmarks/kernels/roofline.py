"""The minimum work of an op in bytes and operations, and the time that a machine needs for it.

Owns the formulas of bytes and floating-point operations of each op, and the roofline: with a memory
of b bytes/s and arithmetic of f operations/s, no op of B bytes and F operations ends before
max(B / b, F / f) (Williams, Waterman, Patterson, CACM 2009). Bytes are counted once for every
number that must be read or written, even if a kernel accesses it more often; small data that stays
in the cache (norms' weights, tables of rotations) is counted too. Knows no kernel and no clock.
Called by benchmarks.kernels.cpu_kernels.

Dimensions: R rows, H hidden, I inputs, O outputs, F ffn size, E experts, K experts per row,
N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topspin.plan.precision import MXFP4_BITS

BF16 = 2
FP32 = 4
I64 = 8
# Weights in 4 or 8 bits have groups of so many inputs, each with a step and a minimum.
QUANTISED_GROUP = 32
QUANTISED_GROUP_EXTRA = 2 * BF16


@dataclass(frozen=True)
class OpWork:
    """The minimum work of one call: bytes to move, and floating-point operations."""

    num_bytes: float
    flops: float


@dataclass(frozen=True)
class Roofline:
    """The limits of a machine: bytes read per second, operations per second."""

    bytes_per_s: float
    flops_per_s: float

    def least_s(self, work: OpWork) -> float:
        """Return the least possible time of `work`, in seconds."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def fraction(self, work: OpWork, measured_s: float) -> float:
        """Return the share of the roofline that `measured_s` reaches; 1 is the limit."""
        return self.least_s(work) / measured_s

    def bound(self, work: OpWork) -> str:
        """Return the limit of `work`: "memory" or "compute"."""
        by_memory = work.num_bytes / self.bytes_per_s >= work.flops / self.flops_per_s
        return "memory" if by_memory else "compute"


def ceiling(samples: Sequence[float]) -> float:
    """Return a machine's limit: the 99th percentile of the rates in `samples`.

    Disturbances that slow a probe are not the limit; the maximum may be an accident.
    """
    return float(np.percentile(samples, 99))


def weight_bytes(num_out: int, num_in: int, bits: int) -> int:
    """Return the size of a weight [O, I]: 16 bits a number, or 8 or 4 in groups of inputs.

    MXFP4_BITS: 4 bits and groups with a scale of one byte.
    """
    if bits == 16:
        return num_out * num_in * BF16
    groups = -(-num_in // QUANTISED_GROUP)
    if bits == MXFP4_BITS:
        return num_out * groups * (QUANTISED_GROUP // 2 + 1)
    return num_out * groups * (QUANTISED_GROUP * bits // 8 + QUANTISED_GROUP_EXTRA)


def linear(
    num_rows: int, num_in: int, num_out: int, *, bits: int = 16, out_bytes: int = BF16
) -> OpWork:
    """[R, I] times a transposed weight [O, I], to numbers of `out_bytes` bytes."""
    rows = num_rows * (num_in * BF16 + num_out * out_bytes)
    return OpWork(weight_bytes(num_out, num_in, bits) + rows, 2 * num_rows * num_in * num_out)


def grouped_mlp(
    hidden: int, ffn: int, *, num_rows: int, num_pairs: int, num_touched: float, bits: int = 16
) -> OpWork:
    """Gated MLPs of `num_pairs` (row, expert) pairs that use `num_touched` different experts."""
    expert = weight_bytes(2 * ffn, hidden, bits) + weight_bytes(hidden, ffn, bits)
    return OpWork(num_touched * expert + 2 * num_rows * hidden * BF16, 6 * num_pairs * hidden * ffn)


def paged_attention(
    new_rows: Sequence[int],
    contexts: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    number_bytes: int = BF16,
    rank: int | None = None,
) -> OpWork:
    """Causal attention: sequence s has contexts[s] keys, and its last new_rows[s] rows are queries.

    The j-th of n new rows of a context c sees c - n + j keys (j from 1); each takes D multiply-adds
    for its score and D for its value, per query head. With a `rank` a key's first so many numbers
    are its value too.
    """
    pair = head_dim + (head_dim if rank is None else rank)
    cached = pair if rank is None else head_dim
    keys = sum(contexts) * num_kv_heads * cached * number_bytes
    rows = sum(new_rows) * num_heads * pair * number_bytes
    seen = sum(n * (c - n) + n * (n + 1) // 2 for n, c in zip(new_rows, contexts, strict=True))
    return OpWork(keys + rows, 2 * seen * num_heads * pair)


def rms_norm(num_rows: int, hidden: int) -> OpWork:
    """Read [R, H] and the weight [H], write [R, H]: square, add, scale twice."""
    return OpWork((2 * num_rows * hidden + hidden) * BF16, 4 * num_rows * hidden)


def add_rms_norm(num_rows: int, hidden: int) -> OpWork:
    """Like rms_norm, with a residual [R, H] that is read, added to and written."""
    return OpWork((4 * num_rows * hidden + hidden) * BF16, 5 * num_rows * hidden)


def rotate_and_store(
    num_rows: int, *, num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool
) -> OpWork:
    """Norm and rotate q and k, store k and v: q, k, v, cos, sin are read, q and the cache written.

    A rotated number takes two multiplications and an addition, a normed one four operations.
    """
    q, kv = num_rows * num_heads * head_dim, num_rows * num_kv_heads * head_dim
    tables = num_rows * head_dim * FP32
    flops = (7 if has_norms else 3) * (q + kv)
    return OpWork((2 * q + 4 * kv) * BF16 + tables + num_rows * I64, flops)


def route(num_rows: int, num_experts: int, top_k: int) -> OpWork:
    """Softmax of logits [R, E] and its K greatest values: writes ids i64 and weights f32."""
    written = num_rows * top_k * (I64 + FP32)
    return OpWork(num_rows * num_experts * BF16 + written, 5 * num_rows * num_experts)


def permute(num_rows: int, num_experts: int, top_k: int) -> OpWork:
    """Group R * K slots i32 by expert: writes order, rows, counts and offsets as i64."""
    pairs = num_rows * top_k
    return OpWork(pairs * 4 + (2 * pairs + 2 * num_experts + 1) * I64, 0)


def sample(num_rows: int, vocabulary: int, *, draws: bool) -> OpWork:
    """Choose from logits f32[R, V]: one read, a comparison, and for a draw exp and sum."""
    num_logits = num_rows * vocabulary
    return OpWork(num_logits * FP32 + num_rows * I64, (4 if draws else 1) * num_logits)
