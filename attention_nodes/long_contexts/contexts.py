"""Contexts of an attention node's sequences between its steps, however long they are.

Joins the codes of keys (retrieval.py) and, if there is a file for them, the keys and values in it
(residency.py). A node of which no sequence selects keys has plain Contexts. Knows no layers and no
plan. Called by plan_chain.py and model_runner.py before and after a step, and by the rally while
rows are with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from attention_nodes.long_contexts.host_store import HostStore
from attention_nodes.long_contexts.residency import Residency
from attention_nodes.long_contexts.retrieval import KeyIndex
from attention_nodes.long_contexts.spill_file import SpillFile
from attention_nodes.long_contexts.spill_store import SpillStore
from attention_nodes.long_contexts.spilling import check_spilled
from attention_nodes.step.decoder import Decoder, Watch
from attention_nodes.step.rally import nothing_to_do
from attention_nodes.step.sequences import IntArray, SequenceTable
from attention_nodes.step.step_inputs import Slices
from kernels.contracts import HostKeys
from kernels.runtime import Runtime
from models.description.config import ModelConfig
from topspin.errors import ConfigError
from topspin.messages import KvCounts
from topspin.plan.spec import NodeConfig
from topspin.processes.progress import Beat
from topspin.trace import Kind, Stamps
from topspin.units import format_size

LEARNING_ROWS: Final = 64
"""While fewer rows than these are with experts a codebook would be waited for."""


class PreparedSlices(NamedTuple):
    """A step's micro-batches with what their sequences attend to.

    And, by sequence id, why sequences fail; `watch` is to see the step's attention.
    """

    micro_batches: list[Slices]
    errors: dict[int, str]
    watch: Watch | None = None


class FollowedStep(NamedTuple):
    """Why sequences of a step fail, by id, and the blocks whose content was lost with it."""

    errors: dict[int, str]
    lost_blocks: IntArray


NOTHING_LOST: Final = FollowedStep({}, np.zeros(0, dtype=np.int64))


class Contexts:
    """All sequences attend to all their keys, in memory: there is nothing to do between steps."""

    def __init__(self, num_frames: int) -> None:
        """`num_frames` blocks are in memory at once."""
        self.num_frames = num_frames

    def warm_up(self, model: ModelConfig, dtype: torch.dtype) -> None:
        """Select keys once, so that the first long request finds compiled kernels."""

    def warm_up_largest(self, model: ModelConfig, config: NodeConfig) -> None:
        """Select keys as the largest step would."""

    def take_counts(self) -> KvCounts | None:
        """Return the counts since the last call; None: nothing is counted."""
        return None

    def overwrite(self, blocks: IntArray) -> None:
        """Learn that the content of these blocks changes with the next step."""

    def end(self, seq_ids: Iterable[int]) -> None:
        """Forget these sequences, which the table still has."""

    def prepare(
        self, micro_batches: list[Slices], *, may_wait: bool, trace: Stamps, beat: Beat
    ) -> PreparedSlices:
        """Decide what the sequences of a step attend to, and bring it to memory; before commit().

        `may_wait`: rows will be with experts, as in KeyIndex.code(). `trace` gets a stamp as each
        part of this ends, `beat` is called as keys are moved.
        """
        return PreparedSlices(micro_batches, {})

    def learning(self, prepared: PreparedSlices, *, num_layers: int) -> Callable[[], bool]:
        """Return what learns codebooks while rows of a step are with the experts of a layer.

        As in KeyIndex.learning().
        """
        return nothing_to_do

    def follow(self, prepared: PreparedSlices) -> FollowedStep:
        """Note what a step has committed."""
        return NOTHING_LOST._replace(errors=prepared.errors)

    def slots(self, slots: IntArray) -> IntArray:
        """Return where slots of blocks are in the cache."""
        return slots

    def close(self) -> None:
        """Give back what outlives the process's memory."""


class LongContexts(Contexts):
    """Sequences may attend to a selection of their keys, found by the codes of `index`."""

    def __init__(self, table: SequenceTable, index: KeyIndex, *, num_frames: int) -> None:
        super().__init__(num_frames)
        self._table = table
        self._index = index

    def _host_keys(self) -> HostKeys | None:
        """Return what kernels are warmed up with; None: nothing."""
        return None

    def warm_up(self, model: ModelConfig, dtype: torch.dtype) -> None:
        self._index.warm_up(model, dtype, host_keys=self._host_keys())

    def warm_up_largest(self, model: ModelConfig, config: NodeConfig) -> None:
        self._index.warm_up(
            model,
            getattr(torch, config.model.dtype),
            num_seqs=config.attention.max_num_seqs,
            max_len=config.model.max_model_len,
        )

    def take_counts(self) -> KvCounts:
        return self._index.take_counts()

    def overwrite(self, blocks: IntArray) -> None:
        self._index.overwrite(blocks.tolist())

    def end(self, seq_ids: Iterable[int]) -> None:
        self._index.end(self._rows(seq_ids))

    def prepare(
        self, micro_batches: list[Slices], *, may_wait: bool, trace: Stamps, beat: Beat
    ) -> PreparedSlices:
        self._index.code(may_wait=may_wait)
        trace.stamp(Kind.CODED)
        selecting = [
            each._replace(retrieval=self._index.retrieval_of(each)) for each in micro_batches
        ]
        placed, errors = self._place(selecting, beat)
        trace.stamp(Kind.FETCHED)
        return PreparedSlices(self._stamped(placed, trace), errors, self._index.watch(placed))

    def _place(
        self, micro_batches: list[Slices], beat: Beat
    ) -> tuple[list[Slices], dict[int, str]]:
        """Return micro-batches of which all that they attend to is in memory, and errors."""
        return micro_batches, {}

    def _stamped(self, micro_batches: Sequence[Slices], trace: Stamps) -> list[Slices]:
        """Return micro-batches whose retrievals stamp the parts of attention."""
        layers = list(self._index.codes)

        def ended(micro_batch: int, kind: Kind, number: int) -> None:
            trace.stamp(kind, layers[number], micro_batch)

        return [
            each
            if each.retrieval is None
            else each._replace(retrieval=each.retrieval._replace(ended=partial(ended, idx)))
            for idx, each in enumerate(micro_batches)
        ]

    def learning(self, prepared: PreparedSlices, *, num_layers: int) -> Callable[[], bool]:
        micro_batches = prepared.micro_batches
        num_waits = num_layers * len(micro_batches)
        if not num_waits or sum(each.num_tokens for each in micro_batches) < LEARNING_ROWS:
            return nothing_to_do
        rows = np.concatenate([each.rows for each in micro_batches])
        kept = np.setdiff1d(rows, self._rows(prepared.errors))
        return self._index.learning(kept.tolist(), num_waits) or nothing_to_do

    def _rows(self, seq_ids: Iterable[int]) -> IntArray:
        return self._table.rows_of(np.array(list(seq_ids), dtype=np.int64))

    def follow(self, prepared: PreparedSlices) -> FollowedStep:
        """Note what a step has committed: no codes of those that fail, which others may share."""
        failed = prepared.errors
        skipped = self._rows(failed)
        for each in prepared.micro_batches:
            self._index.follow(np.setdiff1d(each.rows, skipped) if failed else each.rows)
        return super().follow(prepared)


class SpilledContexts(LongContexts):
    """Of the blocks that are only searched some are in a file, or in memory of the host."""

    def __init__(
        self, table: SequenceTable, index: KeyIndex, residency: Residency, *, num_frames: int
    ) -> None:
        super().__init__(table, index, num_frames=num_frames)
        self._residency = residency
        index.frame_slots = residency.slots

    def _host_keys(self) -> HostKeys | None:
        return self._residency.no_keys()

    def take_counts(self) -> KvCounts:
        return super().take_counts() + self._residency.take_counts()

    def overwrite(self, blocks: IntArray) -> None:
        super().overwrite(blocks)
        self._residency.overwrite(blocks)

    def end(self, seq_ids: Iterable[int]) -> None:
        super().end(seq_ids)
        self._residency.end(self._rows(seq_ids))

    def _place(
        self, micro_batches: list[Slices], beat: Beat
    ) -> tuple[list[Slices], dict[int, str]]:
        return self._residency.place(micro_batches, beat)

    def follow(self, prepared: PreparedSlices) -> FollowedStep:
        failed = {**prepared.errors, **self._residency.failures()}
        super().follow(prepared._replace(errors=failed))
        return FollowedStep(failed, self._residency.take_lost())

    def slots(self, slots: IntArray) -> IntArray:
        return self._residency.slots(slots)

    def close(self) -> None:
        self._residency.close()


def contexts_of(
    model: ModelConfig,
    config: NodeConfig,
    decoder: Decoder,
    table: SequenceTable,
    *,
    num_blocks: int,
    runtime: Runtime,
) -> Contexts:
    """Return the contexts of a node with `num_blocks` blocks that may be assigned.

    Allocates the codes of the decoder's keys and opens the spill, where `config` asks for them.
    Raises ConfigError for blocks that do not fill segments, and for a spill that cannot be or is
    too small.
    """
    policy, spill, cache = config.kv_cache.retrieval, config.kv_cache.spill, decoder.kv
    if policy is None:
        return Contexts(num_blocks)
    index = KeyIndex(
        model,
        decoder.ops,
        cache,
        table,
        policy,
        num_blocks=num_blocks,
        max_num_seqs=config.attention.max_num_seqs,
        runtime=runtime,
    )
    decoder.codes = index.codes
    if spill is None:
        return LongContexts(table, index, num_frames=num_blocks)
    check_spilled(model, spill)
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
    return SpilledContexts(table, index, residency, num_frames=num_frames)
