"""Cuts of an attention node's layers over several devices: LLM-PQ's partition.

Owns the choice of the cuts worth trying (arXiv 2403.01136): contiguous ranges in the order of the
devices, each within its device's memory, both phases in one cost. Pure: knows bytes and seconds of
layers only. Called by deploy.placement.search.nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_CUTS = 16
"""Of a chain of devices: so many are all tried; of more, the quickest for some numbers of keys."""
KEPT_CUTS = 5

Ends = tuple[int, ...]
"""The layer before which each device's range ends; the last is the number of layers."""


class Chain(NamedTuple):
    """Devices in the order of their layers.

    `seconds[d][l]` and `sizes[d][l]`: of layer l on device d, the bytes without keys; `free[d]`:
    the bytes for both. `token_bytes`: of one token's keys in one layer.
    """

    seconds: Sequence[Sequence[float]]
    sizes: Sequence[Sequence[float]]
    free: Sequence[float]
    token_bytes: float


def num_cuts(num_layers: int, num_ranges: int) -> int:
    """Return how many ways there are to cut layers into ranges that are not empty."""
    return math.comb(num_layers - 1, num_ranges - 1)


def all_cuts(num_layers: int, num_ranges: int) -> Iterator[Ends]:
    """Yield every way to cut the layers."""
    for inner in itertools.combinations(range(1, num_layers), num_ranges - 1):
        yield (*inner, num_layers)


def some_cuts(chain: Chain, least_tokens: float) -> list[Ends]:
    """Return the quickest cuts with room for KEPT_CUTS different numbers of tokens' keys.

    They are from `least_tokens` to the most for which there is a cut; empty: there is none.
    """
    first = quickest(chain, least_tokens)
    if first is None:
        return []
    low, high = least_tokens, max(chain.free) / chain.token_bytes
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        if quickest(chain, middle) is None:
            high = middle
        else:
            low = middle
    steps = KEPT_CUTS - 1
    wanted = [least_tokens * (low / least_tokens) ** (idx / steps) for idx in range(1, steps)]
    found = [first, *(quickest(chain, tokens) for tokens in (*wanted, low))]
    return list(dict.fromkeys(ends for ends in found if ends is not None))


def quickest(chain: Chain, tokens: float) -> Ends | None:
    """Return the cut with the least sum of seconds that has room for `tokens`; None: none has.

    A step passes the ranges one after the other, so their times add up. Exact, by dynamic
    programming over the devices and the ends of their ranges.
    """
    num_layers = len(chain.sizes[0])
    keys = tokens * chain.token_bytes
    best: dict[int, tuple[float, Ends]] = {0: (0.0, ())}
    for seconds, sizes, free in zip(chain.seconds, chain.sizes, chain.free, strict=True):
        after: dict[int, tuple[float, Ends]] = {}
        for begin, (before_s, ends) in best.items():
            taken, total_s = 0.0, before_s
            for layer in range(begin, num_layers):
                taken += sizes[layer] + keys
                if taken > free:
                    break
                total_s += seconds[layer]
                end = layer + 1
                if end not in after or total_s < after[end][0]:
                    after[end] = total_s, (*ends, end)
        best = after
    return best[num_layers][1] if num_layers in best else None
