"""The draft node's command line; everything else comes with the scheduler's Welcome."""

from __future__ import annotations

from pathlib import Path

import torch

from draft_nodes.drafter import growth_of, load_draft_model
from draft_nodes.model import DraftModel
from draft_nodes.worker import DraftWorker
from spec_decode.forest import Growth
from topspin.plan.spec import NodeConfig
from topspin.processes.channel import ControlClient
from topspin.processes.node_command import run_command
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork


def run_worker(
    control: ControlClient, *, index: int, model_path: Path, network: NodeNetwork = ON_ONE_HOST
) -> None:
    """Run draft node `index` for the model at `model_path`."""

    def load(config: NodeConfig) -> tuple[DraftModel, Growth]:
        if config.node.num_threads is not None:
            torch.set_num_threads(config.node.num_threads)
        speculation = config.speculation
        assert speculation is not None, "a plan with draft nodes has a draft model"
        model = load_draft_model(
            config, speculation, model_path, num_slots=config.draft.kv_cache_tokens
        )
        return model, growth_of(speculation)

    DraftWorker(control, index=index, load=load, network=network).serve()


def main() -> int:
    """Run one draft node; returns its exit status."""
    return run_command(
        "draft",
        "draft_nodes",
        lambda control, args, network: run_worker(
            control, index=args.index, model_path=args.model, network=network
        ),
        about=__doc__,
    )
