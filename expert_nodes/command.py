"""The expert node's command line; everything else comes with the scheduler's Welcome."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from expert_nodes.worker import ExpertWorker
from m2n_comm.open import Between
from topspin.channel import FAILOVER_HEARTBEAT, RELAXED_HEARTBEAT
from topspin.cores import take_cores
from topspin.node_life import run_node
from topspin.process import follow_parent, start_logging


def main() -> int:
    """Run one expert node; returns its exit status."""
    follow_parent()
    take_cores()
    parser = argparse.ArgumentParser(prog="python -m expert_nodes", description=__doc__)
    parser.add_argument("--control", required=True, help="address of the scheduler")
    parser.add_argument("--index", type=int, required=True, help="which expert node this is")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--transport", choices=get_args(Between), required=True)
    parser.add_argument(
        "--failover", action="store_true", help="leave soon when the scheduler is not heard"
    )
    args = parser.parse_args()
    return run_node(
        "expert",
        args.index,
        args.control,
        logger=start_logging("expert"),
        body=lambda control: ExpertWorker(control, index=args.index, model_path=args.model).run(
            args.transport
        ),
        heartbeat=FAILOVER_HEARTBEAT if args.failover else RELAXED_HEARTBEAT,
    )
