"""An expert node with quantised weights: loading, and other tables while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expert_nodes.experts import Experts
from kernels.dispatch import select_ops
from m2n_comm.net import ExpertBatch
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_reader import ExpertReader
from models.checkpoints.weights import stream_expert_weights
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from topspin.plan.precision import Format, rules_of

Held = tuple[tuple[int, ...], ...]
FIRST: Held = ((0, 1, 2), (0, 1, 2))
SECOND: Held = ((2, 7, 0), (0, 1, 2))
THIRD: Held = ((4,), (1, 3, 5, 7))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def load(path: Path, held: Held, mode: Format) -> Experts:
    config, dtype = load_model_config(path), torch.bfloat16
    weights = stream_expert_weights(Checkpoint(path), config, dtype=dtype, experts=held)
    ops = select_ops("cpu", dtype, [mode])
    return Experts(config, weights, ops, held=held, precision=rules_of(mode))


def outputs(experts: Experts, held: Held, version: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    results = []
    for layer, ids in enumerate(held):
        hidden = torch.randn(9, 64, generator=generator).bfloat16()
        slots = torch.stack([torch.arange(9) % len(ids), torch.full((9,), -1)], 1).int()
        weights = torch.rand(9, 2, generator=generator)
        batch = ExpertBatch(0, layer, 0, hidden, slots, weights, (9,), version)
        results.append(experts.compute(batch).clone())
    return results


@pytest.mark.parametrize("mode", ["int4", "int8"])
@pytest.mark.parametrize("variant", ["mixtral", "olmoe"])
def test_a_prepared_table_computes_as_if_loaded_at_start(
    tmp_path: Path, variant: str, mode: Format
) -> None:
    path = make_checkpoint(tmp_path, variant)
    reader = ExpertReader(Checkpoint(path), load_model_config(path), dtype=torch.bfloat16)
    experts = load(path, FIRST, mode)
    before = outputs(experts, FIRST, 1)
    for version, held in ((2, SECOND), (3, THIRD)):
        for _ in experts.prepare(version, held, reader):
            pass
        if version == 2:  # the table in use still works
            assert all(map(torch.equal, outputs(experts, FIRST, 1), before))
        fresh = outputs(load(path, held, mode), held, 1)
        assert all(map(torch.equal, outputs(experts, held, version), fresh))


def test_nothing_of_the_original_matrices_stays(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral", hidden_size=256, intermediate_size=128)
    held: Held = (tuple(range(8)),) * 2
    layers = load(path, held, "int4")._versions.newest.layers
    kept = sum(w.data.nbytes for layer in layers for w in (*layer.gate_up, *layer.down))
    assert kept == 2 * 8 * 3 * 256 * 128 * 5 // 8
