"""The way to a node's process from other hosts, and those that it lets in.

Owns the part of a role's command line that says so. On one host all of it has its default. Knows no
socket; called by topspin.processes.node_command and by app.launch.commands.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:  # engines of one host have no keys, and may lack the package that reads them
    from topspin.processes.keys import KeyDirectory


class NodeNetwork(NamedTuple):
    """Where a process listens for rows (None: on this host only), and its keys, if it has some.

    `peers`: the key groups of those with whom it exchanges rows, or drafts (None: all that `keys`
    accepts).
    `trusted_network`: rows may travel between hosts without authentication (nixl).
    """

    host: str | None = None
    keys: KeyDirectory | None = None
    peers: tuple[str, ...] | None = None
    trusted_network: bool = False


ON_ONE_HOST: Final = NodeNetwork()
"""Of a process whose engine is all on its host."""


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a process that has keys."""
    parser.add_argument("--keys", type=Path, metavar="DIR", help="folder made by `topspin keys`")
    parser.add_argument("--group", metavar="GROUP", help="the group in --keys that it belongs to")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a node on one of several hosts."""
    add_key_arguments(parser)
    parser.add_argument("--host", metavar="HOST", help="address at which others send it rows")
    parser.add_argument("--peers", nargs="+", metavar="GROUP", help="groups it exchanges rows with")
    parser.add_argument(
        "--trusted-network", action="store_true", help="rows need no authentication"
    )


def argv_of(network: NodeNetwork, *, keys: Path | None, group: str) -> Sequence[str]:
    """Return the flags that read_network() turns into `network`, with the keys of a `group`."""
    argv = [] if keys is None else ["--keys", str(keys), "--group", group]
    argv += [] if network.host is None else ["--host", network.host]
    argv += [] if network.peers is None else ["--peers", *network.peers]
    return argv + ["--trusted-network"] * network.trusted_network


def read_keys_of(args: argparse.Namespace) -> KeyDirectory | None:
    """Return the keys that the flags name. Raises ConfigError for a file that cannot be used."""
    if args.keys is None:
        return None
    from topspin.processes.keys import KeyDirectory

    return KeyDirectory(args.keys, args.group)


def read_network(args: argparse.Namespace) -> NodeNetwork:
    """Return what the flags say. Raises ConfigError as read_keys_of()."""
    peers = None if args.peers is None else tuple(args.peers)
    return NodeNetwork(args.host, read_keys_of(args), peers, args.trusted_network)
