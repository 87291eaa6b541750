"""The form of cached keys and values, and the groups of layers that share tables of blocks.

Owns the settings of the paged KV cache, for all layers and for single ones (a layer's follow from
the layer alone: all attention nodes agree); the division of layers into groups by their windows;
and the arithmetic of the most blocks that a sequence has at once. A block of the cache has room for
the layers of any one group, so that one pool serves all; those of a group with a window are free
again behind it. Knows no pool and no tensors. Part of topspin.plan.spec; read by the scheduler,
which gives out blocks, and by attention nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from topspin.plan.retrieval import RetrievalPolicy, SpillSpec, parse_spill
from topspin.plan.setting import AUTO, Setting
from topspin.plan.settings import KvDtype, Section

MAX_GPU_DIM: Final = 256
"""The most numbers of a head, key and value, that kernels on GPUs attend to."""
MAX_GPU_LATENT: Final = (512, 64)
"""The same of latents, and of the keys behind them."""


def gpu_misfit(head_dim: int, latent_rank: int | None) -> str | None:
    """Return why kernels on GPUs do not attend to keys of `head_dim` numbers; None: they do.

    The first `latent_rank` numbers are the value too; None: a head has values of its own.
    """
    if latent_rank is None:
        fits, most, asked = head_dim <= MAX_GPU_DIM, str(MAX_GPU_DIM), str(head_dim)
    else:
        sizes = (latent_rank, head_dim - latent_rank)
        fits = all(size <= limit for size, limit in zip(sizes, MAX_GPU_LATENT, strict=True))
        most, asked = ("latents of {} + {}".format(*each) for each in (MAX_GPU_LATENT, sizes))
    return None if fits else f"attention on GPUs takes heads of {most} numbers, not of {asked}"


class KvLayerRule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Settings of single layers, which count from 0; what is None is as for all layers.

    `retrieval` false: tokens attend to their whole context in these layers.
    """

    layers: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    dtype: KvDtype | None = None
    retrieval: bool | None = None


class KvCacheSpec(Section, frozen=True, kw_only=True):
    """The paged KV cache, the same on all attention nodes.

    `dtype` auto: the model's. `retrieval` null: every token attends to its whole context. `spill`
    null: all keys and values are in memory. The last of the `layers` that sets something for a
    layer decides it.
    """

    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    dtype: Annotated[
        KvDtype,
        Setting(
            "type of cached keys and values; auto: the model's; fp8, which is fp8_e4m3: half the "
            "memory of bf16, with some loss of quality; only on the CPU",
            flag="--kv-cache-dtype",
            name="kv_cache_dtype",
        ),
    ] = "auto"
    retrieval: RetrievalPolicy | None = None
    spill: Annotated[
        SpillSpec | None,
        Setting(
            "directory and size of an unlinked file for all keys and values of an attention node, "
            "--kv-cache-memory of which are in memory, for example /var/tmp:8GiB; host:8GiB beside "
            "a GPU: memory of the host; needs --kv-retrieval-tokens; auto: none",
            flag="--kv-spill-dir DIR:SIZE",
            parse=parse_spill,
            unset=AUTO,
            name="kv_spill",
        ),
    ] = None
    layers: tuple[KvLayerRule, ...] = ()

    def dtype_of(self, layer: int) -> KvDtype:
        """Return how keys and values of a layer are kept."""
        asked = [rule.dtype for rule in self.layers if layer in rule.layers]
        return next((each for each in reversed(asked) if each is not None), self.dtype)

    def retrieves(self, layer: int) -> bool:
        """Return whether tokens may attend to a selection of a layer's keys."""
        asked = [rule.retrieval for rule in self.layers if layer in rule.layers]
        default = self.retrieval is not None
        return next((each for each in reversed(asked) if each is not None), default)

    @property
    def fp8_setting(self) -> str | None:
        """Return a setting by which some layer is kept in fp8 (e4m3), for people; None: none."""
        if self.dtype != "auto":
            return f"kv_cache.dtype (--kv-cache-dtype) {self.dtype}"
        for idx, rule in enumerate(self.layers):
            if rule.dtype not in (None, "auto"):
                return f"kv_cache.layers[{idx}].dtype {rule.dtype}"
        return None


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


def block_needs(
    windows: Sequence[int | None], kept: KvCacheSpec, *, max_len: int, max_step_tokens: int
) -> BlockNeeds:
    """Return what sequences of a model need whose layers have these `windows`; see kv_groups."""
    groups = kv_groups(windows, kept, max_len=max_len)
    return BlockNeeds(groups.windows, block_size=kept.block_size, max_step_tokens=max_step_tokens)
