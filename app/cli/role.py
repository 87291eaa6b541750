"""`topspin scheduler`, `topspin gateway` and `topspin node`: one role of an engine each.

Owns the flags. All roles of an engine are given the same plan, whose `network` says where they find
each other; app.launch.role turns it into the role's process. Called by app.cli.main.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

from app.cli.flags import add_group, hide_api_key, read_gateway
from app.cli.serve import (
    asked_by_plan,
    check_host,
    check_http,
    say_ignored,
    serve_config,
    set_log_format,
)
from app.launch.commands import inherited_config
from app.launch.role import (
    become,
    find_node,
    gateway_command,
    index_of,
    one_node_command,
    scheduler_command,
)
from topspin.plan.settings import GatewaySection
from topspin.processes.progress import FILE_VARIABLE

NODE_ROLES = ("attention", "expert", "stage", "draft")


def add_scheduler(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `topspin scheduler`."""
    _add_common(parser)
    _add_progress(parser)
    parser.add_argument("--bind", metavar="HOST", help="listen there instead of at network.control")
    parser.set_defaults(run=run_scheduler)


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `topspin gateway`."""
    _add_common(parser)
    add_group(parser, "gateway")
    parser.set_defaults(run=run_gateway)


def add_node(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `topspin node`."""
    parser.add_argument("role", choices=NODE_ROLES, help="what the node is")
    _add_common(parser)
    _add_progress(parser)
    parser.add_argument(
        "--index",
        required=True,
        metavar="N",
        help="which one: N, or ordinal[+N] or worker*S[+N] by the numbers in this host's name",
    )
    parser.add_argument(
        "--advertise", metavar="HOST", help="its address for others, instead of its `host`"
    )
    parser.set_defaults(run=run_node)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", required=True, metavar="FILE", help="the engine plan, as YAML")
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help="this process's folder made by `topspin keys`"
    )


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress", type=Path, metavar="FILE", help="file for `topspin probe`, as in /dev/shm"
    )


def _set_progress(parsed: argparse.Namespace) -> None:
    if parsed.progress is not None:
        os.environ[FILE_VARIABLE] = str(parsed.progress)


def run_scheduler(parsed: argparse.Namespace) -> int:
    """Become the scheduler of the plan. Raises ConfigError."""
    _set_progress(parsed)
    asked = asked_by_plan(parsed.plan, GatewaySection())
    say_ignored(asked)
    config = serve_config(asked)
    become(scheduler_command(config, inherited_config(config), keys=parsed.keys, bind=parsed.bind))


def run_gateway(parsed: argparse.Namespace) -> int:
    """Become a gateway of the plan's engine. Raises ConfigError."""
    hide_api_key(parsed)
    gateway = read_gateway(parsed)
    check_http(gateway)
    config = serve_config(asked_by_plan(parsed.plan, gateway))
    set_log_format(gateway)
    become(gateway_command(config, inherited_config(config), keys=parsed.keys))


def run_node(parsed: argparse.Namespace) -> int:
    """Become a node of the plan. Raises ConfigError."""
    _set_progress(parsed)
    asked = asked_by_plan(parsed.plan, GatewaySection())
    plan = serve_config(asked).plan
    node = find_node(plan, parsed.role, index_of(parsed.index, socket.gethostname()))
    check_host(plan, [node])
    become(one_node_command(plan, node, keys=parsed.keys, advertise=parsed.advertise))
