"""What an attention node does for long contexts between steps: retrieval, and its spill.

Joins the codes of keys (retrieval.py) and, if there is a file for them, the keys and values in it
(residency.py). Knows no layers and no plan. Called by model_runner.py before and after a step, and
by the rally while rows are with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from msgspec.structs import replace

from attention_nodes.long_contexts.host_store import HostStore
from attention_nodes.long_contexts.residency import Residency
from attention_nodes.long_contexts.retrieval import KeyIndex, code_bytes_of
from attention_nodes.long_contexts.spill_file import SpillFile, copies_bytes, record_bytes
from attention_nodes.long_contexts.spill_store import SpillStore
from attention_nodes.step.kv_cache import KvCache, LayerSpec, bytes_per_block
from attention_nodes.step.sequences import IntArray, SequenceTable
from attention_nodes.step.step_inputs import Slices
from kernels.runtime import Runtime
from models.description.config import ModelConfig
from topspin.errors import ConfigError
from topspin.messages import KvCounts
from topspin.plan.retrieval import SpillSpec
from topspin.plan.spec import NodeConfig
from topspin.processes.progress import Beat
from topspin.trace import Kind, Stamps
from topspin.units import format_size

LEARNING_ROWS: Final = 64
"""While fewer rows than these are with experts a codebook would be waited for."""


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


def _check_spilled(model: ModelConfig, spill: SpillSpec) -> None:
    """Raise ConfigError for a model whose keys must all be in memory."""
    windows = [layer.sliding_window for layer in model.layers if layer.sliding_window is not None]
    if windows:
        raise ConfigError(
            f"--kv-spill-dir: the model has layers with a window of {max(windows)} tokens, whose "
            "keys must be in memory"
        )
    if spill.is_in_host_memory:
        return
    # Nodes on GPUs may lack numba.
    from kernels.cpu.compiled.attention.rows import HeadShape
    from kernels.cpu.compiled.retrieval.search import HEAD_DIMS

    heads = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim)
    if model.head_dim not in HEAD_DIMS or not heads.fits:
        raise ConfigError(
            f"--kv-spill-dir: {model.num_heads // model.num_kv_heads} query heads of "
            f"{model.head_dim} numbers to a key; selected keys are read from a file for heads of "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )


class LongContexts:
    """Retrieval on one attention node, and its spill; `num_frames` blocks are in memory at once."""

    def __init__(
        self,
        table: SequenceTable,
        index: KeyIndex,
        residency: Residency | None = None,
        *,
        num_frames: int,
    ) -> None:
        """`residency` None: all blocks are in memory."""
        self._table = table
        self.index = index
        self.num_frames = num_frames
        self._residency = residency
        if residency is not None:
            index.frame_slots = residency.slots

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        config: NodeConfig,
        index: KeyIndex,
        cache: KvCache,
        table: SequenceTable,
        *,
        num_blocks: int,
        runtime: Runtime,
    ) -> LongContexts:
        """Open the spill that `config` asks for, if it does, for blocks that may be assigned.

        Raises ConfigError for a spill that cannot be, or is too small.
        """
        spill = config.kv_cache.spill
        if spill is None:
            return cls(table, index, num_frames=num_blocks)
        _check_spilled(model, spill)
        num_frames = cache.num_blocks - 1
        if num_blocks <= num_frames:
            raise ConfigError(
                f"--kv-spill-dir: {format_size(spill.size_bytes)} has room for {num_blocks} "
                f"blocks; --kv-cache-memory has for {num_frames} already"
            )
        coded = list(index.codes)
        store: SpillStore
        if spill.is_in_host_memory:
            store = HostStore(runtime, cache, num_blocks, coded_layers=coded)
        else:
            store = SpillFile(Path(spill.directory), cache, num_blocks, coded_layers=coded)
            index.has_file = True
        residency = Residency(cache, store, table, index.policy_of, num_blocks=num_blocks)
        return cls(table, index, residency, num_frames=num_frames)

    def warm_up(self, num_heads: int, dtype: torch.dtype) -> None:
        """Code keys and attend by them, so that the first long request finds compiled kernels."""
        keys = None if self._residency is None else self._residency.no_keys()
        self.index.warm_up(num_heads, dtype, host_keys=keys)

    def take_counts(self) -> KvCounts:
        """Return the counts since the last call."""
        counts = self.index.take_counts()
        return counts if self._residency is None else counts + self._residency.take_counts()

    def take_lost(self) -> IntArray:
        """Return the blocks whose content was lost since the last call."""
        if self._residency is None:
            return np.zeros(0, dtype=np.int64)
        return self._residency.take_lost()

    def overwrite(self, blocks: IntArray) -> None:
        """Learn that the content of these blocks changes with the next step."""
        self.index.overwrite(blocks.tolist())
        if self._residency is not None:
            self._residency.overwrite(blocks)

    def end(self, rows: IntArray) -> None:
        """Forget the sequences in `rows` of the table."""
        self.index.end(rows)
        if self._residency is not None:
            self._residency.end(rows)

    def prepare(
        self, micro_batches: Sequence[Slices], beat: Beat | None = None
    ) -> tuple[list[Slices], dict[int, str]]:
        """Return a step's micro-batches with what their sequences attend to; before commit().

        And, by sequence id, why sequences fail. `beat` is called as keys are moved.
        """
        prepared = [
            each._replace(retrieval=self.index.retrieval_of(each)) for each in micro_batches
        ]
        if self._residency is None:
            return prepared, {}
        return self._residency.place(prepared, beat)

    def stamped(self, micro_batches: Sequence[Slices], trace: Stamps) -> list[Slices]:
        """Return micro-batches whose retrievals stamp the parts of attention."""
        layers = list(self.index.codes)

        def ended(micro_batch: int, kind: Kind, number: int) -> None:
            trace.stamp(kind, layers[number], micro_batch)

        return [
            each
            if each.retrieval is None
            else each._replace(retrieval=each.retrieval._replace(ended=partial(ended, idx)))
            for idx, each in enumerate(micro_batches)
        ]

    def learning(
        self, micro_batches: Sequence[Slices], failed: Mapping[int, str], *, num_layers: int
    ) -> Callable[[], bool] | None:
        """Return what learns codebooks while rows of a step are with the experts of a layer.

        As in KeyIndex.learning(); `failed` are those of prepare(). None: nothing is to be learnt
        then.
        """
        num_waits = num_layers * len(micro_batches)
        if not num_waits or sum(each.num_tokens for each in micro_batches) < LEARNING_ROWS:
            return None
        skipped = self._table.rows_of(np.array(list(failed), dtype=np.int64))
        rows = np.concatenate([each.rows for each in micro_batches])
        return self.index.learning(np.setdiff1d(rows, skipped).tolist(), num_waits)

    def follow(
        self, micro_batches: Sequence[Slices], failed: Mapping[int, str]
    ) -> Mapping[int, str]:
        """Note what a step has committed; return, by sequence id, why sequences fail.

        `failed` are those of prepare(): others may share their codes, so they get none.
        """
        if self._residency is not None:
            failed = {**failed, **self._residency.failures()}
        skipped = self._table.rows_of(np.array(list(failed), dtype=np.int64))
        for each in micro_batches:
            self.index.follow(np.setdiff1d(each.rows, skipped) if failed else each.rows)
        return failed

    def slots(self, slots: IntArray) -> IntArray:
        """Return where slots of blocks are in the cache."""
        return slots if self._residency is None else self._residency.slots(slots)

    def close(self) -> None:
        """Close the file."""
        if self._residency is not None:
            self._residency.close()
