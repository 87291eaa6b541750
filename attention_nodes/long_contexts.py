"""What an attention node does for long contexts between steps: retrieval, and its spill.

Joins the codes of keys (retrieval.py) and, if there is a file for them, the keys and values in it
(residency.py). Knows no layers and no plan. Called by model_runner.py, once before and once after
a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attention_nodes.kv_cache import KvCache
from attention_nodes.residency import Residency
from attention_nodes.retrieval import KeyIndex
from attention_nodes.sequences import IntArray, SequenceTable
from attention_nodes.spill_file import SpillFile, record_bytes
from attention_nodes.step_inputs import Slices
from kernels.contracts import KeyCodes
from kernels.dispatch import Ops
from models.config import ModelConfig
from topspin.errors import ConfigError
from topspin.messages import KvCounts
from topspin.plan import NodeConfig
from topspin.units import format_size


def spilled_blocks(config: NodeConfig, block_bytes: int) -> int | None:
    """Return how many blocks the scheduler may assign, most of which are in the file.

    None: as many as the cache has.
    """
    spill = config.kv_cache.spill
    return None if spill is None else spill.size_bytes // record_bytes(block_bytes)


class LongContexts:
    """Retrieval on one attention node; `num_blocks` are those that the scheduler may assign."""

    def __init__(
        self,
        model: ModelConfig,
        ops: Ops,
        cache: KvCache,
        table: SequenceTable,
        config: NodeConfig,
        *,
        num_blocks: int,
    ) -> None:
        """Raises ConfigError for a model whose keys are not coded, or a file that cannot be."""
        policy, spill = config.kv_cache.retrieval, config.kv_cache.spill
        assert policy is not None
        self.index = KeyIndex(
            model,
            ops,
            cache,
            table,
            policy,
            num_blocks=num_blocks,
            max_num_seqs=config.attention.max_num_seqs,
        )
        self._residency: Residency | None = None
        self.num_frames = num_blocks
        if spill is not None:
            self.num_frames = cache.num_blocks - 1
            if num_blocks <= self.num_frames:
                raise ConfigError(
                    f"--kv-spill-dir: {format_size(spill.size_bytes)} has room for {num_blocks} "
                    f"blocks; --kv-cache-memory has for {self.num_frames} already"
                )
            self._residency = Residency(
                cache,
                SpillFile(Path(spill.directory), cache, num_blocks),
                table,
                self.index.policy_of,
                num_blocks=num_blocks,
                coded_layers=list(self.index.codes),
            )
            self.index.frame_slots = self._residency.slots

    @property
    def codes(self) -> dict[int, KeyCodes]:
        """Return the codes of each layer that has some."""
        return self.index.codes

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

    def prepare(self, micro_batches: Sequence[Slices]) -> tuple[list[Slices], dict[int, str]]:
        """Return a step's micro-batches with what their sequences attend to; before commit().

        And, by sequence id, why sequences fail.
        """
        prepared = [
            each._replace(retrieval=self.index.retrieval_of(each)) for each in micro_batches
        ]
        if self._residency is None:
            return prepared, {}
        return self._residency.place(prepared)

    def follow(self, micro_batches: Sequence[Slices]) -> dict[int, str]:
        """Code what a step has committed; return, by sequence id, why sequences fail."""
        for each in micro_batches:
            self.index.follow(each.rows)
        return {} if self._residency is None else self._residency.failures()

    def slots(self, slots: IntArray) -> IntArray:
        """Return where slots of blocks are in the cache."""
        return slots if self._residency is None else self._residency.slots(slots)

    def close(self) -> None:
        """Close the file."""
        if self._residency is not None:
            self._residency.close()
