"""Experts of a node of tiny checkpoints, tables of two nodes, and the counts of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expert_nodes.experts import Experts
from expert_nodes.versions import Held
from kernels.dispatch import select_ops
from m2n_comm.net import ExpertBatch
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_reader import ExpertReader
from models.checkpoints.weights import stream_expert_weights
from models.description.config import load_model_config
from tests.kernels.generators import finish
from tests.server.scheduler.engine import make_config
from tests.structs import changed
from topspin.expert_table import ExpertTable
from topspin.messages import unpack_ints
from topspin.plan.precision import Format, rules_of
from topspin.plan.spec import NodeConfig


def load(
    path: Path,
    held: Held,
    *,
    kernels: str = "cpu",
    dtype: torch.dtype = torch.float32,
    mode: Format = "none",
    device: str = "cpu",
    **options: Any,
) -> Experts:
    """Load the experts `held`, packed in a format."""
    config = load_model_config(path)
    weights = stream_expert_weights(
        Checkpoint(path), config, dtype=dtype, experts=held, device=device
    )
    ops = select_ops(kernels, dtype, [] if mode == "none" else [mode], device=device)
    return Experts(config, weights, ops, held=held, precision=rules_of(mode), **options)


def prepare(experts: Experts, version: int, held: Held, reader: ExpertReader) -> None:
    """Prepare another table, all pieces at once."""
    finish(experts.prepare(version, held, reader))


def reader_of(
    path: Path, dtype: torch.dtype = torch.float32, *, device: str = "cpu"
) -> ExpertReader:
    return ExpertReader(Checkpoint(path), load_model_config(path), dtype=dtype, device=device)


def batch_of(
    hidden: Tensor, slots: Tensor, weights: Tensor, *, layer: int, version: int = 1
) -> ExpertBatch:
    return ExpertBatch(0, layer, 0, hidden, slots.int(), weights, (len(hidden),), version)


def taken(experts: Experts) -> dict[int, list[list[int]]]:
    """Take the counts, by version, layer and slot."""
    return {
        found.version: [list(unpack_ints(layer)) for layer in found.counts]
        for found in experts.take_counts()
    }


def node_config(path: Path) -> NodeConfig:
    """Return the configuration of the first of two expert nodes."""
    plan = make_config(num_expert_nodes=2)
    return changed(plan, {"model.path": str(path)}).for_node("expert", 0)


def table_of(version: int, *nodes: Held) -> ExpertTable:
    """Return a table of 8 experts from what each node holds, layer by layer."""
    slots = tuple(zip(*nodes, strict=True))
    return ExpertTable(version=version, num_experts=8, slots=slots)
