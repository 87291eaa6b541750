"""The command line of a node's process, the same for all roles.

Owns what the supervisor tells a node besides its environment, and the process's run from there;
everything else comes with the scheduler's Welcome. Knows no node. Called by the roles' command
modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from topspin.errors import ConfigError
from topspin.logs import start_logging
from topspin.messages import Role
from topspin.process import CONFIG_ERROR_STATUS, follow_parent
from topspin.processes.channel import (
    FAILOVER_HEARTBEAT,
    RELAXED_HEARTBEAT,
    ControlClient,
    Heartbeat,
)
from topspin.processes.node_life import run_node
from topspin.processes.node_network import NodeNetwork, add_arguments, read_network

Body = Callable[[ControlClient, argparse.Namespace, NodeNetwork], None]
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
    add_failover_argument(parser)
    add_arguments(parser)
    args = parser.parse_args()
    logger = start_logging(role)
    try:
        network = read_network(args)
        return run_node(
            role,
            args.index,
            args.control,
            logger=logger,
            body=lambda control: body(control, args, network),
            heartbeat=heartbeat_of(args),
            keys=network.keys,
        )
    except ConfigError as error:
        logger.error("%s %d: %s", role, args.index, error)
        return CONFIG_ERROR_STATUS


def add_failover_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag of nodes whose engine goes on without lost processes."""
    parser.add_argument(
        "--failover", action="store_true", help="leave soon when the scheduler is not heard"
    )


def heartbeat_of(args: argparse.Namespace) -> Heartbeat:
    """Return the heartbeat of a node's control connection."""
    return FAILOVER_HEARTBEAT if args.failover else RELAXED_HEARTBEAT
