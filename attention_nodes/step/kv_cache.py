"""The paged KV cache's memory.

Owns how each layer's keys and values are kept, the tensors, and the arithmetic of their size. In
fp8 (e4m3, without a scale: keys and values are of moderate size) every number is rounded as it is
stored, and attention of the same step reads it so, in a prompt too. The scheduler assigns blocks to
sequences; decoder.py writes the cache; memory_budget.py measures how much memory a GPU has for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.contracts import MAX_FP8_DIM
from kernels.runtime import HostRuntime, Runtime
from models.description.config import ModelConfig
from topspin.errors import ConfigError
from topspin.plan.kv_cache import BlockNeeds, KvCacheSpec, kv_groups
from topspin.process import available_bytes
from topspin.units import format_size

MIN_BLOCKS: Final = 2
"""The minimum for one sequence that is one token longer than a block."""


class LayerSpec(NamedTuple):
    """How the keys and values of one layer are kept."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype
    has_codes: bool = False
    """Whether its keys are coded too, for retrieval (retrieval.py owns the codes)."""
    group: int = 0
    """The layers of a group share block tables (topspin.plan.kv_cache)."""
    latent_rank: int | None = None
    """So many first numbers of a token's key are its value (None: it has one of its own)."""

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of the keys and values in a block."""
        size = block_size * self.num_heads * self.head_dim * self.dtype.itemsize
        return 2 * size if self.latent_rank is None else size


AS_THE_MODEL: Final = KvCacheSpec()


def layer_specs(
    config: ModelConfig,
    dtype: torch.dtype,
    kept: KvCacheSpec = AS_THE_MODEL,
    *,
    max_len: int | None = None,
) -> tuple[LayerSpec, ...]:
    """Return the spec of each layer of a model that computes in `dtype`.

    `max_len` is the longest context; None: all layers are one group, which keeps all keys,
    whatever their windows. Raises ConfigError for heads that are not kept as `kept` says.
    """
    if kept.fp8_setting is not None and config.head_dim > MAX_FP8_DIM:
        raise ConfigError(
            f"{kept.fp8_setting}: heads of {config.head_dim} numbers; at most {MAX_FP8_DIM} are "
            "kept in fp8"
        )
    coded = coded_layers(config, kept)
    groups = kv_groups(config.windows, kept, max_len=0 if max_len is None else max_len)
    return tuple(
        LayerSpec(
            num_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype if kept.dtype_of(layer) == "auto" else torch.float8_e4m3fn,
            has_codes=layer in coded,
            group=groups.of_layer[layer],
            latent_rank=None if config.latent is None else config.latent.rank,
        )
        for layer in range(config.num_layers)
    )


def coded_layers(config: ModelConfig, kept: KvCacheSpec) -> tuple[int, ...]:
    """Return the layers whose keys are coded, ascending: those that retrieve and have no window."""
    return tuple(
        idx
        for idx, layer in enumerate(config.layers)
        if layer.sliding_window is None and kept.retrieves(idx)
    )


@dataclass(frozen=True, eq=False)
class KvCache:
    """Per layer, keys and values [num_blocks, block_size, kv heads, head_dim].

    A block is one group's: layers of several groups have the same tensors. Values of latents are
    the first numbers of the keys' tensors.
    """

    layers: tuple[LayerSpec, ...]
    keys: list[Tensor]
    values: list[Tensor]
    block_size: int
    num_blocks: int
    num_groups: int = 1
    """How many block tables a sequence has: those of all the model's layers, not only of these."""

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots of all layers, as if all at once.

        From `sources` to `targets`, i64[groups, n].
        """
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            for cache in (keys, values) if layer.latent_rank is None else (keys,):
                slots = cache.flatten(0, 1)
                if slots.dtype == torch.float8_e4m3fn:
                    slots = slots.view(torch.uint8)  # torch copies these
                moved = slots.index_select(0, sources[layer.group])
                slots.index_copy_(0, targets[layer.group], moved)


def _places(layers: Iterable[LayerSpec]) -> list[int]:
    """Return the place of each layer among those of its group."""
    seen: Counter[int] = Counter()
    places = []
    for layer in layers:
        places.append(seen[layer.group])
        seen[layer.group] += 1
    return places


def _distinct(layers: Sequence[LayerSpec]) -> dict[int, LayerSpec]:
    """Return a layer for each place: those of all groups there are alike."""
    return dict(zip(_places(layers), layers, strict=True))


def bytes_per_block(layers: Sequence[LayerSpec], *, block_size: int) -> int:
    """Return the bytes of a block, keys and values of all layers of any one group."""
    return sum(layer.bytes_per_block(block_size) for layer in _distinct(layers).values())


def allocate(
    layers: Sequence[LayerSpec],
    *,
    needs: BlockNeeds,
    size_bytes: int | None,
    max_len: int,
    runtime: Runtime | None = None,
    code_bytes: Callable[[int], int] | None = None,
) -> KvCache:
    """Allocate as many blocks as fit in `size_bytes`, on `runtime`'s device (None: the host).

    `needs` are those of a sequence. `size_bytes` None (not known yet): the MIN_BLOCKS of each group
    that a step needs. `code_bytes` of the size are left for the codes of so many blocks (None:
    nothing is coded). Raises ConfigError with the numbers when fewer than MIN_BLOCKS of each group
    fit, or the device has less memory free; a cache smaller
    than `max_len` is allowed (requests are then shorter).
    """
    block_size, num_groups = needs.block_size, len(needs.windows)
    if size_bytes is None:
        num_blocks = needs.of(MIN_BLOCKS)
        return of_blocks(
            layers, num_blocks, block_size=block_size, runtime=runtime, num_groups=num_groups
        )
    available_bytes, what = _available(runtime or HostRuntime())
    if size_bytes > available_bytes:
        raise ConfigError(
            f"--kv-cache-memory {format_size(size_bytes)}: {what} has "
            f"{format_size(available_bytes)} free, before weights and buffers"
        )
    block_bytes = bytes_per_block(layers, block_size=block_size)

    num_blocks = blocks_within(size_bytes, block_bytes, code_bytes)
    if num_blocks < (least := needs.of(MIN_BLOCKS)):
        codes = ""
        if code_bytes is not None:
            codes = f" with {format_size(code_bytes(least))} of codes for --kv-retrieval-tokens"
        raise ConfigError(
            f"--kv-cache-memory {format_size(size_bytes)} holds {num_blocks} blocks of "
            f"{block_size} tokens ({format_size(block_bytes)} each){codes}; at least {least} "
            f"are needed, and {needs.of(-(-max_len // block_size))} for one sequence of "
            f"--max-model-len {max_len}"
        )
    return of_blocks(
        layers, num_blocks, block_size=block_size, runtime=runtime, num_groups=num_groups
    )


def blocks_within(
    size_bytes: int, block_bytes: int, code_bytes: Callable[[int], int] | None = None
) -> int:
    """Return how many blocks fit beside their codes, `code_bytes` of the number (None: none)."""

    def bytes_of(num_blocks: int) -> int:
        codes = 0 if code_bytes is None else code_bytes(num_blocks)
        return num_blocks * block_bytes + codes

    sizes = range(max(0, size_bytes) // block_bytes + 1)
    return max(0, bisect_right(sizes, size_bytes, key=bytes_of) - 1)


def of_blocks(
    layers: Sequence[LayerSpec],
    num_blocks: int,
    *,
    block_size: int,
    runtime: Runtime | None = None,
    num_groups: int = 1,
) -> KvCache:
    """Allocate `num_blocks` blocks on `runtime`'s device (None: the host).

    A sequence of the model has blocks in `num_groups` groups of layers.
    """
    device = torch.device("cpu") if runtime is None else runtime.device

    def empty(layer: LayerSpec) -> Tensor:
        shape = (num_blocks, block_size, layer.num_heads, layer.head_dim)
        return torch.zeros(shape, dtype=layer.dtype, device=device)

    distinct, places = _distinct(layers), _places(layers)
    keys = {place: empty(layer) for place, layer in distinct.items()}
    values = {
        place: empty(layer) if layer.latent_rank is None else keys[place][..., : layer.latent_rank]
        for place, layer in distinct.items()
    }
    return KvCache(
        layers=tuple(layers),
        keys=[keys[place] for place in places],
        values=[values[place] for place in places],
        block_size=block_size,
        num_blocks=num_blocks,
        num_groups=num_groups,
    )


def _available(runtime: Runtime) -> tuple[int, str]:
    """Return the bytes that can be allocated (on the host: without swapping), and their name."""
    if runtime.device.type != "cpu":
        return runtime.memory().free, f"device {runtime.device}"
    return available_bytes(), "this machine"
