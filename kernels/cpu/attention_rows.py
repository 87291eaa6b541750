"""The query rows that are computed one by one, and the cutting of their keys into pieces.

Pure. `kernels.cpu.attention` chooses the rows once per micro-batch,
`kernels.cpu.compiled.attention.rows` computes them in every layer. Knows no caches and no heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

SPLIT_KEYS: Final = 512
"""The most keys of a piece."""
# Fewer are not cut: joining two parts takes longer than a thread is spared.
_MIN_SPLIT_KEYS: Final = 64
_KEY_MULTIPLE: Final = 16


class Row(NamedTuple):
    """One query row: of the keys along its branch it sees key_start <= k < key_end.

    Key k is at position k of its sequence, but for the last ones, which are at the positions
    `branch`, ascending: where trees branch, a row's ancestors do not lie one behind the other.
    """

    row: int
    seq_idx: int
    key_start: int
    key_end: int
    branch: tuple[int, ...] = ()


class Work(NamedTuple):
    """The tasks of one launch; the same for all layers with the same window."""

    pieces: Tensor
    """i64[*, 7]: row, seq_idx, key_start, key_end, the part to write (-1: the output), b and i.

    From key b on, which may be beyond the last, key k is at position branches[i + k].
    """
    merges: Tensor
    """i64[*, 3]: row, its first part, how many."""
    num_parts: int
    branches: Tensor
    """i64[*], the positions of all branches."""


def plan_work(rows: Sequence[Row]) -> Work:
    """Cut rows into pieces of at most SPLIT_KEYS keys: pairs of them, nearly equal.

    So two threads have as much to do, whatever the number of heads.
    """
    pieces, merges, num_parts = [], [], 0
    branches: list[int] = []
    for row, seq_idx, key_start, key_end, branch in rows:
        size = _piece_keys(key_end - key_start)
        starts = range(key_start, key_end, size)
        first = key_end - len(branch)
        listed = (first, len(branches) - first)
        branches += branch
        if len(starts) == 1:
            pieces.append((row, seq_idx, key_start, key_end, -1, *listed))
            continue
        merges.append((row, num_parts, len(starts)))
        for start in starts:
            pieces.append((row, seq_idx, start, min(start + size, key_end), num_parts, *listed))
            num_parts += 1
    # The longest first, so that the last tasks are short and threads end together.
    pieces.sort(key=lambda piece: piece[2] - piece[3])
    return Work(
        torch.from_numpy(np.array(pieces, dtype=np.int64).reshape(-1, 7)),
        torch.from_numpy(np.array(merges, dtype=np.int64).reshape(-1, 3)),
        num_parts,
        torch.from_numpy(np.array(branches, dtype=np.int64)),
    )


def _piece_keys(num_keys: int) -> int:
    """Return the number of keys of each piece of a row but the last."""
    if num_keys <= _MIN_SPLIT_KEYS:
        return max(num_keys, 1)
    count = 2 * -(-num_keys // (2 * SPLIT_KEYS))
    return -(-num_keys // (count * _KEY_MULTIPLE)) * _KEY_MULTIPLE
