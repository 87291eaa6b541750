"""A draft model's passes over trees, by Triton's kernels and by the reference's on one device.

Random weights and a tiny model, on a GPU too: its kernels at real sizes are test_kernels.py's.
Against transformers: tests/draft_nodes.
"""

from __future__ import annotations

import pytest
import torch

from attention_nodes.local_experts import ColocatedExperts
from attention_nodes.step import kv_cache
from attention_nodes.step.decoder import Decoder
from benchmarks.gpu.workload import TINY
from deploy.rig.nodes import model_of
from deploy.rig.random_weights import RandomWeights
from draft_nodes.kv_layout import KvLayout
from draft_nodes.model import DraftModel
from kernels.dispatch import select_ops
from kernels.runtime import open_runtime
from spec_decode.draft import ROOT
from spec_decode.forest import Kept, PassRows

NUM_BLOCKS = 16
PROMPT = (5, 9, 2, 60, 33)
PASSES = (
    # A tree, rows of it that follow rows in the cache, and a second text beside them.
    [PassRows(0, (7, 8, 9), (ROOT, ROOT, 0), 3)],
    [PassRows(0, (10, 11), (1, 2), 2), PassRows(1, (3, 4), (ROOT, ROOT), 2)],
    [PassRows(0, (12,), (4,), 1)],
)


def make(kernels: str, device: torch.device) -> DraftModel:
    model = model_of(TINY)
    runtime = open_runtime(str(device), kernels)
    ops = select_ops(kernels, torch.float32, frozenset(), str(device))
    cache = kv_cache.of_blocks(
        kv_cache.layer_specs(model, torch.float32), NUM_BLOCKS, block_size=4, runtime=runtime
    )
    weights = RandomWeights(model, device=runtime.device, dtype=torch.float32, seed=3)
    decoder = Decoder(model, weights.attention(), ops, cache)
    assert model.moe is not None
    packed = {
        idx: ops.pack_experts(each.gate_up, each.down) for idx, each in enumerate(weights.experts())
    }
    decoder.experts = ColocatedExperts(
        packed,
        ops,
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        device=runtime.device,
    )
    layout = KvLayout(num_blocks=NUM_BLOCKS, block_size=4)
    return DraftModel(decoder, layout, runtime, max_length=64)


@pytest.mark.parametrize("is_rehearsed", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.slow
def test_passes_over_trees(is_rehearsed: bool, device: torch.device) -> None:
    ours, theirs = make("triton", device), make("reference", device)
    if is_rehearsed:
        ours.rehearse(num_rows=2)
    for model in (ours, theirs):
        for seq_id in range(2):
            model.open(seq_id, num_prompt=len(PROMPT))
            assert model.reserve(seq_id, 16)
    chain = tuple(range(ROOT, len(PROMPT) - 1))
    feed = [
        PassRows(seq_id, PROMPT[seq_id:], chain[: len(PROMPT) - seq_id], 1) for seq_id in range(2)
    ]
    for number, rows in enumerate((feed, *PASSES)):
        torch.testing.assert_close(
            ours.log_probs(rows), theirs.log_probs(rows), rtol=1e-4, atol=1e-4
        )
        if number == 0:
            for model in (ours, theirs):
                model.keep([Kept(each.seq_id, tuple(range(len(each.tokens))), ()) for each in feed])
