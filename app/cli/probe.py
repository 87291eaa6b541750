"""`topspin probe`: is the role of this host that writes a progress file alive, is it ready?

Owns the flags and the exit status; the file is topspin.processes.progress's. For exec probes
of Kubernetes and for supervisors; a gateway has /health as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from topspin.errors import ConfigError
from topspin.processes.progress import read_progress, trouble


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the role's --progress FILE")
    parser.add_argument("--ready", action="store_true", help="ask whether it can take work too")
    parser.add_argument(
        "--within",
        type=float,
        default=60.0,
        metavar="S",
        help="how long a step may make no progress (%(default)s)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the command; returns 0 if the answer is yes, 1 if it is no. Raises ConfigError."""
    if not 0 < parsed.within < float("inf"):
        raise ConfigError(f"--within {parsed.within}: give a number of seconds above 0")
    found = read_progress(parsed.file)
    problem = trouble(found, ready=parsed.ready, within_s=parsed.within)
    print(problem or f"process {found.pid} is {found.state}")
    return 0 if problem is None else 1
