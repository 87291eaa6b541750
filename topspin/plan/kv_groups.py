"""The groups of layers whose keys and values share a table of blocks, and what a sequence holds.

Owns the division of layers into groups by their windows, and the arithmetic of the most blocks
that a sequence has at once. A block of the cache has room for the layers of any one group, so that
one pool serves all; those of a group with a window are free again behind it. Knows no pool and no
tensors. Used by the scheduler, which gives out blocks, and by attention nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from topspin.plan.kv_cache import KvCacheSpec

NO_BLOCK: Final = -1
"""In a table of blocks: no query sees these positions any more."""

# Every group has a table per sequence; more of them would cost more than padding saves.
_MAX_GROUPS: Final = 8


class KvGroups(NamedTuple):
    """`windows[g]`: the keys that a query sees in the layers of group g; None: all before it.

    `of_layer[i]`: the group of decoder layer i.
    """

    windows: tuple[int | None, ...]
    of_layer: tuple[int, ...]

    @property
    def has_windows(self) -> bool:
        """Return whether blocks are freed while their sequence runs."""
        return any(window is not None for window in self.windows)


ONE_GROUP: Final = KvGroups((None,), ())
"""All layers keep all keys."""


def kv_groups(windows: Sequence[int | None], kept: KvCacheSpec, *, max_len: int) -> KvGroups:
    """Return the groups of layers with these `windows`, None: none, in a context of `max_len`.

    Groups have equally many layers, some perhaps one less: those of a kind alternate between its
    groups, so that the layers of a stage have as many of each. All layers are one group that keeps
    all keys where these are retrieved from or kept in several forms, since the tables of codes and
    of files name one block for all layers.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(None if window is None or window >= max_len else window, []).append(layer)
    if kept.retrieval is not None or kept.layers or list(kinds) in ([], [None]):
        return KvGroups((None,), (0,) * len(windows))
    size = max(min(map(len, kinds.values())), -(-len(windows) // _MAX_GROUPS))
    of_layer = [0] * len(windows)
    group_windows: list[int | None] = []
    for window in sorted(kinds, key=lambda each: (each is not None, each)):
        num_groups = -(-len(kinds[window]) // size)
        for idx, layer in enumerate(kinds[window]):
            of_layer[layer] = len(group_windows) + idx % num_groups
        group_windows += [window] * num_groups
    return KvGroups(tuple(group_windows), tuple(of_layer))


class BlockNeeds:
    """The most blocks that a sequence holds at once, which is less than all behind windows.

    A column is what holds `block_size` positions: one block of each group. `most[g]`: of group g,
    None: as many as there are columns.
    """

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        *,
        block_size: int,
        max_step_tokens: int,
    ) -> None:
        """A step feeds a sequence `max_step_tokens` at most; two of them are under way."""
        self.windows = tuple(windows)
        self.block_size = block_size
        self.most = tuple(
            None if window is None else self.behind(window) + -(-2 * max_step_tokens // block_size)
            for window in windows
        )

    def behind(self, window: int) -> int:
        """Return in how many columns the keys are that the next query may see, and its own."""
        # The positions of an interval are in at most one column more than would hold them.
        return -(-(window - 1) // self.block_size) + 1

    def of(self, num_columns: int) -> int:
        """Return the most blocks of all groups for so many columns."""
        return sum(num_columns if most is None else min(most, num_columns) for most in self.most)

    def columns_within(self, num_blocks: int, limit: int) -> int:
        """Return the most columns, up to `limit`, for which `num_blocks` suffice."""
        return bisect_right(range(limit + 1), num_blocks, key=self.of) - 1
