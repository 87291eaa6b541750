"""What a GPU's kernels are timed on: per op a module of entries, at the sizes of real models.

An entry knows the bytes and operations that its call cannot do without (benchmarks.roofline)
and makes the call; who times it, and on what device with which measured roofline, is the
caller's matter. Nothing here has a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.roofline import Work

L2_BYTES: Final = 128 << 20
"""More than the last-level cache of any GPU that we know of: what is cold has more bytes."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One op at one size. `call(i)` runs it on copy i % copies of what must be cold."""

    op: str
    shape: str
    work: Work
    call: Callable[[int], object]
    copies: int = 1
    goal: float | None = None
    """The share of the roofline that the kernel is meant to reach, where there is one."""
    goal_beyond_s: float | None = None
    """Seconds beyond the least time of its bytes within which the call is meant to end."""
    product: str = "bf16"
    """The kind of product whose measured rate bounds its operations: "bf16" or "fp8"."""
    check: Callable[[], object] = lambda: None
    """Raises RuntimeError if calls, which have ended, did not do what they are timed for."""


def num_copies(cold_bytes: float, cache_bytes: float = L2_BYTES) -> int:
    """Give the fewest copies of `cold_bytes` that a cache does not hold all of."""
    return int(cache_bytes // max(cold_bytes, 1)) + 1
