"""The draft node's command line; everything else comes with the scheduler's Welcome."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from draft_nodes.drafter import growth_of, load_draft_model
from draft_nodes.model import DraftModel
from draft_nodes.worker import DraftWorker
from spec_decode.forest import Growth
from topspin.channel import FAILOVER_HEARTBEAT, RELAXED_HEARTBEAT, ControlClient
from topspin.logs import start_logging
from topspin.node_life import run_node
from topspin.plan import NodeConfig
from topspin.process import follow_parent


def run_worker(control: ControlClient, *, index: int, model_path: Path) -> None:
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

    DraftWorker(control, index=index, load=load).serve()


def main() -> int:
    """Run one draft node; returns its exit status."""
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m draft_nodes", description=__doc__)
    parser.add_argument("--control", required=True, help="address of the scheduler")
    parser.add_argument("--index", type=int, required=True, help="which draft node this is")
    parser.add_argument(
        "--model", type=Path, required=True, help="the served checkpoint's directory"
    )
    parser.add_argument(
        "--failover", action="store_true", help="leave soon when the scheduler is not heard"
    )
    args = parser.parse_args()
    return run_node(
        "draft",
        args.index,
        args.control,
        logger=start_logging("draft"),
        body=lambda control: run_worker(control, index=args.index, model_path=args.model),
        heartbeat=FAILOVER_HEARTBEAT if args.failover else RELAXED_HEARTBEAT,
    )
