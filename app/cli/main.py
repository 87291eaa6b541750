"""The `topspin` command: serve, pull, chat, plan, quantize and others.

Owns the commands, the check that the installation is sound, and the messages and exit statuses for
errors (2: the request is invalid, 1: it failed). Loads a command's module only when that command is
run, and never torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import topspin
from app.cli.parser import CommandParser
from topspin.errors import ConfigError, TopspinError
from topspin.process import open_standard_streams

# Folders whose names others use too: `kernels` is a package on PyPI, and `models` and
# `server` are likely names of a directory that somebody starts Topspin in.
SHARED_NAMES = ("kernels", "models", "server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's); returns the exit status."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        check_installation()
        parsed, unknown = _parser(arguments).parse_known_args(arguments)
        if unknown:
            parsed.parser.refuse(unknown)
    except ConfigError as error:
        return _fail("topspin", error, status=2)
    command: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return command(parsed)
    except ConfigError as error:
        return _fail(f"topspin {parsed.command}", error, status=2)
    except TopspinError as error:
        return _fail(f"topspin {parsed.command}", error, status=1)
    except KeyboardInterrupt:
        return 130


def _fail(program: str, error: Exception, *, status: int) -> int:
    print(f"{program}: error: {error}", file=sys.stderr)
    return status


def check_installation() -> None:
    """Raise ConfigError if one of Topspin's folders would be imported from elsewhere.

    Looks only at where the import system would find them; imports none.
    """
    ours = Path(topspin.__file__).resolve().parent.parent
    for name in SHARED_NAMES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ConfigError(f"Topspin's folder {name} is not installed beside {ours / 'topspin'}")
        found = Path(spec.origin).resolve().parent if spec.origin else None
        if found != ours / name:
            places = [str(found)] if found else list(spec.submodule_search_locations or ())
            raise ConfigError(
                f"`import {name}` finds {', '.join(places)} and not Topspin's own {ours / name}. "
                "Install Topspin in an environment of its own (python3 -m venv, pip install), "
                f"without another package called {name} (pip uninstall {name}), and start it as "
                "`topspin`, which takes no packages from the current directory"
            )


def _parser(argv: Sequence[str]) -> CommandParser:
    """Build the parser; only the command in `argv` has its flags, and its module, loaded."""
    parser = CommandParser(
        prog="topspin",
        description="Serves Mixture-of-Experts language models, attention and experts apart.",
    )
    parser.add_argument("--version", action="version", version=f"topspin {topspin.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, (summary, place) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == wanted:
            _add(place, command)
    return parser


def _add(place: str, parser: argparse.ArgumentParser) -> None:
    """Load a command's module; add its flags, by which its run() is called if they name no other.

    `place` is the module, perhaps with `:` and the function that adds the flags.
    """
    name, _, function = place.partition(":")
    module = importlib.import_module(name)
    if hasattr(module, "run"):
        parser.set_defaults(run=module.run)
    getattr(module, function or "add_arguments")(parser)


_COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("Start an engine and its OpenAI-compatible HTTP API.", "app.cli.serve"),
    "pull": ("Bring a model onto this machine.", "app.cli.pull"),
    "models": ("List the model families, or the facts of one model.", "app.cli.models"),
    "chat": ("Talk to a running server in the terminal.", "app.cli.chat"),
    "bench": ("Measure a part of Topspin; prints a table and writes JSON.", "app.cli.bench"),
    "plan": ("Plan an engine for a cluster, a model and a workload.", "deploy.placement.command"),
    "profile": ("Measure this device for topspin plan.", "deploy.profiling.command"),
    "quantize": (
        "Write a quantised checkpoint and measure its quality.",
        "deploy.quantisation.command",
    ),
    "sensitivity": (
        "Predict what each layer loses in each precision.",
        "deploy.quantisation.sensitivity_command",
    ),
    "scheduler": (
        "Start the scheduler of an engine on several hosts.",
        "app.cli.role:add_scheduler",
    ),
    "gateway": ("Start a gateway of an engine on several hosts.", "app.cli.role:add_gateway"),
    "node": ("Start one node of an engine on several hosts.", "app.cli.role:add_node"),
    "deploy": ("Write what runs an engine on a cluster.", "app.cli.deploy"),
    "probe": ("Say whether a role of this host is alive, or ready.", "app.cli.probe"),
    "keys": (
        "Make the key files of an engine on several hosts, or rotate them.",
        "app.cli.keys",
    ),
    "trace": ("Show what every node of a running server did lately.", "app.cli.trace.command"),
    "collect-env": ("Print versions and machine facts for a bug report.", "app.cli.collect_env"),
}
