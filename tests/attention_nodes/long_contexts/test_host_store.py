"""Blocks of a device's cache in memory of the host: contents, and what kernels are told."""

from __future__ import annotations

import numpy as np
import torch

from attention_nodes.long_contexts.host_store import HostStore
from kernels.contracts import Retrieval
from kernels.runtime import HostRuntime
from tests.attention_nodes.long_contexts.test_spill_file import NUM_LAYERS, blocks, cache


def retrieval_of(num_seqs: int) -> Retrieval:
    some = torch.arange(num_seqs, dtype=torch.int32)
    return Retrieval(
        seqs=some,
        segments=some[:, None],
        coded_end=some,
        budgets=some + 1,
        summarised=0 * some,
        kept=0 * some,
        num_sinks=0,
    )


def test_blocks_come_back_to_other_frames_on_a_device() -> None:
    """More of them than are moved at once, in runs and one by one."""
    kept = cache(150)
    before = [each.clone() for each in (*kept.keys, *kept.values)]
    store = HostStore(HostRuntime(), kept, 400, coded_layers=range(NUM_LAYERS))
    order = np.random.default_rng(3).permutation(100)
    numbers, frames = np.concatenate([np.arange(300, 350), 2 * order[:50]]), np.arange(20, 120)
    assert not len(store.save(numbers, frames))
    targets = np.arange(149, 49, -1)
    beats: list[None] = []
    assert not len(store.load(numbers, targets, lambda: beats.append(None)))
    for found, wanted in zip((*kept.keys, *kept.values), before, strict=True):
        assert torch.equal(found[targets], wanted[frames])
    assert len(beats) > 1


def test_kernels_are_told_of_sequences_that_have_slots() -> None:
    store = HostStore(HostRuntime(), cache(4), 60, coded_layers=[1])
    retrieval = retrieval_of(3)
    assert store.told(retrieval, [None, None, None]) is retrieval
    store.lend(7, blocks(5, 6, 8), 10)
    store.lend(9, blocks(1, 2), 10)
    found = store.told(retrieval, [(9, blocks(50, 3)), None, (7, blocks(4, 40, 41))]).host_keys
    assert found is not None
    assert found.cache_layers == (1,)
    assert found.records.tolist() == [[50, 3, 0], [0, 0, 0], [4, 40, 41]]
    assert found.slots.tolist() == [[1, 2, 0], [0, 0, 0], [5, 6, 8]]
    assert torch.equal(found.memory, store.records)
    store.forget(7)
    again = store.told(retrieval, [None, (9, blocks(3)), None]).host_keys
    assert again is not None
    assert again.records.tolist() == [[0], [3], [0]]
