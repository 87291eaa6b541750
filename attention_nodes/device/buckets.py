"""The sizes that decode steps are padded to, so that few recordings serve every batch.

Pure. A GPU node's steps are recorded per number of micro-batches and size; a batch runs as the
next larger size, with padding rows that are not read. Called by device/executor.py.

Sizes are 1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 32 beyond. A decode step's
time is that of reading weights and cache, which padding does not lengthen; each recording costs
start-up time and device memory, so not every size is recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

# (upper bound of rows, step)
_STEPS: Final = ((64, 8), (256, 16))
_LARGE_STEP: Final = 32


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Return the sizes, ascending, for micro-batches of 1 to `max_rows` rows."""
    sizes = []
    for size in _sizes():
        sizes.append(min(size, max_rows))
        if size >= max_rows:
            return tuple(sizes)
    raise AssertionError("sizes do not end")


def _sizes() -> Iterator[int]:
    yield from (1, 2, 4)
    size = 8
    while True:
        yield size
        size += next((step for limit, step in _STEPS if size < limit), _LARGE_STEP)


def bucket_of(num_rows: int, buckets: tuple[int, ...]) -> int | None:
    """Return the smallest of `buckets` that holds `num_rows`; None: all are too small."""
    idx = bisect_left(buckets, num_rows)
    return buckets[idx] if idx < len(buckets) else None
