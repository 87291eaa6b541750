"""The command line of a node's process, the same for all roles.

Owns what the supervisor tells a node besides its environment, and the process's run from there;
everything else comes with the scheduler's Welcome. Knows no node. Called by the roles' command
modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from topspin.channel import FAILOVER_HEARTBEAT, RELAXED_HEARTBEAT, ControlClient
from topspin.logs import start_logging
from topspin.messages import Role
from topspin.node_life import run_node
from topspin.process import follow_parent

Body = Callable[[ControlClient, argparse.Namespace], None]
"""Serves with a control connection, and `index`, `model` and `transport` of the command line."""


def run_command(
    role: Role, package: str, body: Body, *, about: str | None, transports: Sequence[str] = ()
) -> int:
    """Run one node of `role`, as `python -m package`; returns its exit status (run_node).

    `about` describes it in --help. `transports`: those it may listen on; (): it does not listen.
    """
    follow_parent()
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=about)
    parser.add_argument("--control", required=True, help="address of the scheduler")
    parser.add_argument("--index", type=int, required=True, help=f"which {role} node this is")
    parser.add_argument(
        "--model", type=Path, required=True, help="directory of the served checkpoint"
    )
    if transports:
        parser.add_argument("--transport", choices=transports, required=True)
    parser.add_argument(
        "--failover", action="store_true", help="leave soon when the scheduler is not heard"
    )
    args = parser.parse_args()
    return run_node(
        role,
        args.index,
        args.control,
        logger=start_logging(role),
        body=lambda control: body(control, args),
        heartbeat=FAILOVER_HEARTBEAT if args.failover else RELAXED_HEARTBEAT,
    )
