"""The arguments that benchmarks of servers which they start themselves have in common.

Owns the model, where results go, and the check of numbers; flags that a parser does not know are
for `topspin serve`. Knows no benchmark. Called by spec.py and retrieval.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from models.sources.hub import DEFAULT_MODEL
from topspin.errors import ConfigError


def server_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of `topspin bench NAME`, which writes NAME.json and NAME.png."""
    parser = argparse.ArgumentParser(
        prog=f"topspin bench {name}",
        description=description,
        epilog="All other flags go to topspin serve.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="name it first if flags of topspin serve follow (%(default)s)",
    )
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S")
    parser.add_argument(
        "--result-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help=f"of {name}.json, {name}.png and the servers' logs (the current)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def check_positive(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ConfigError naming the first of these arguments that is not above 0."""
    for name in names:
        if not getattr(args, name) > 0:
            shown = name.replace("_", "-")
            raise ConfigError(f"--{shown} is {getattr(args, name)}; it must be above 0")
