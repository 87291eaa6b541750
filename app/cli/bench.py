"""`topspin bench NAME`: calls main(flags) of a module of benchmarks.

Owns the names of the benchmarks; each has flags of its own. Loaded by app.cli.main.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence

BENCHMARKS = {
    "compare": "load.compare",
    "cost-model": "engine.cost_model",
    "cpu-kernels": "kernels.cpu_kernels",
    "disaggregation": "engine.disaggregation",
    "gateway": "gateway.command",
    "local-layers": "engine.local_layers",
    "m2n": "transport.m2n",
    "payload": "quality.payload",
    "pingpong": "transport.pingpong",
    "placement": "engine.placement",
    "plan-search": "engine.plan_search",
    "published": "engine.published",
    "quantization": "quality.quantization",
    "retrieval": "retrieval.command",
    "sensitivity": "quality.sensitivity",
    "serve": "load.serve",
    "served": "engine.served",
    "spec": "speculation.command",
    "startup": "engine.startup",
    "step": "kernels.step",
    "sweep": "load.sweep",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    names = ", ".join(BENCHMARKS)
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=names)
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="...", help="its own flags (NAME --help)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the benchmark; returns its exit status."""
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[parsed.name]}")
    main: Callable[[Sequence[str]], int] = module.main
    return main(parsed.flags)
