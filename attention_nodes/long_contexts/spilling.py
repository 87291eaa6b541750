"""The settings of a spill: what a model and a node need for one, and the memory beside the cache.

Owns the sizes that are known before anything is allocated, and the refusals. Knows no step. Called
by loading.py and contexts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from attention_nodes.long_contexts.retrieval import code_bytes_of
from attention_nodes.long_contexts.spill_file import copies_bytes, record_bytes
from attention_nodes.step.kv_cache import LayerSpec, bytes_per_block
from models.description.config import ModelConfig
from topspin.errors import ConfigError
from topspin.plan.retrieval import SpillSpec
from topspin.plan.spec import NodeConfig


def spilled_blocks(config: NodeConfig, layers: Sequence[LayerSpec]) -> int | None:
    """Return how many blocks the scheduler may assign, most of which are in the file.

    None: as many as the cache has.
    """
    spill = config.kv_cache.spill
    if spill is None:
        return None
    size_of = bytes_per_block if spill.is_in_host_memory else record_bytes
    return spill.size_bytes // size_of(layers, block_size=config.kv_cache.block_size)


def bytes_beside(
    model: ModelConfig, config: NodeConfig, layers: Sequence[LayerSpec]
) -> Callable[[int], int] | None:
    """Return the bytes of --kv-cache-memory that no cache block has, by the number of these.

    Codes, and what a file's copies need. None: there are none.
    """
    num_blocks, size = spilled_blocks(config, layers), config.kv_cache.block_size
    codes, spill = code_bytes_of(model, config, num_blocks=num_blocks), config.kv_cache.spill
    if codes is None or num_blocks is None or spill is None or spill.is_in_host_memory:
        return codes
    return lambda cached: codes(cached) + copies_bytes(layers, num_blocks * size, cached * size)


def without_spill(config: NodeConfig) -> NodeConfig:
    """Return the configuration of a dry run, whose cache holds little and spills nothing."""
    return replace(config, kv_cache=replace(config.kv_cache, spill=None))


def check_spilled(model: ModelConfig, spill: SpillSpec) -> None:
    """Raise ConfigError for a model whose selected keys are not read from a file."""
    if spill.is_in_host_memory:
        return
    # Nodes on GPUs may lack numba.
    from kernels.cpu.compiled.attention.rows import HeadShape
    from kernels.cpu.compiled.retrieval.search import HEAD_DIMS

    heads = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim)
    if model.head_dim not in HEAD_DIMS or heads.num_tiles > 1:
        raise ConfigError(
            f"--kv-spill-dir: {model.num_heads // model.num_kv_heads} query heads of "
            f"{model.head_dim} numbers to a key; selected keys are read from a file for heads of "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
