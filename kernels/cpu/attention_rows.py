"""The query rows that are computed one by one, and the cutting of their keys into pieces.

Pure. `kernels.cpu.attention` chooses the rows once per micro-batch,
`kernels.cpu.compiled.attention` computes them in every layer. Knows no caches and no heads.
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
    """One query row: it sees the keys of positions key_start <= p < key_end of its sequence."""

    row: int
    seq_idx: int
    key_start: int
    key_end: int


class Work(NamedTuple):
    """The tasks of one launch; the same for all layers with the same window."""

    pieces: Tensor
    """i64[*, 5]: row, seq_idx, key_start, key_end, and the part to write (-1: the output)."""
    merges: Tensor
    """i64[*, 3]: row, its first part, how many."""
    num_parts: int


def plan_work(rows: Sequence[Row]) -> Work:
    """Cut rows into pieces of at most SPLIT_KEYS keys: pairs of them, nearly equal.

    So two threads have as much to do, whatever the number of heads.
    """
    pieces, merges, num_parts = [], [], 0
    for row, seq_idx, key_start, key_end in rows:
        size = _piece_keys(key_end - key_start)
        starts = range(key_start, key_end, size)
        if len(starts) == 1:
            pieces.append((row, seq_idx, key_start, key_end, -1))
            continue
        merges.append((row, num_parts, len(starts)))
        for start in starts:
            pieces.append((row, seq_idx, start, min(start + size, key_end), num_parts))
            num_parts += 1
    # The longest first, so that the last tasks are short and threads end together.
    pieces.sort(key=lambda piece: piece[2] - piece[3])
    return Work(
        torch.from_numpy(np.array(pieces, dtype=np.int64).reshape(-1, 5)),
        torch.from_numpy(np.array(merges, dtype=np.int64).reshape(-1, 3)),
        num_parts,
    )


def _piece_keys(num_keys: int) -> int:
    """Return the number of keys of each piece of a row but the last."""
    if num_keys <= _MIN_SPLIT_KEYS:
        return max(num_keys, 1)
    count = 2 * -(-num_keys // (2 * SPLIT_KEYS))
    return -(-num_keys // (count * _KEY_MULTIPLE)) * _KEY_MULTIPLE
