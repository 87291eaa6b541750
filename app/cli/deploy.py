"""`topspin deploy`: what runs an engine on a cluster, and what watches it.

Owns the sub-commands and their flags; the manifests are deploy.kubernetes' and deploy.compose's.
Called by app.cli.main.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from deploy.compose import compose_files, service_host
from deploy.kubernetes.files import kubernetes_files
from deploy.kubernetes.objects import pod_host
from deploy.observability.command import add_alerts, add_dashboard
from deploy.placement.shapes import ModelShape
from deploy.services.contained import MODELS, host_path
from deploy.services.engine import DeployOptions, Engine, engine_of
from deploy.services.memory import memory_of
from models.description.config import load_model_config
from models.sources.hub import resolve_model
from topspin import __version__
from topspin.errors import ConfigError
from topspin.plan.file import print_plan, read_plan
from topspin.plan.spec import EnginePlan

Format = Literal["kubernetes", "compose"]

MARK = ".topspin-deploy"
"""In a folder that was written here, whose files may be replaced."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    text = "Write the manifests that run a plan's engine: Kubernetes (kustomize), or Compose."
    render = commands.add_parser("render", help=text, description=text, allow_abbrev=False)
    _add_render(render)
    text = "Write a Grafana dashboard of the metrics that are served."
    add_dashboard(commands.add_parser("dashboard", help=text, description=text, allow_abbrev=False))
    text = "Write Prometheus alerts; docs/runbook.md says what to do."
    add_alerts(commands.add_parser("alerts", help=text, description=text, allow_abbrev=False))


def _add_render(parser: argparse.ArgumentParser) -> None:
    defaults = DeployOptions(image=f"topspin:{__version__}")
    parser.add_argument("--plan", required=True, metavar="FILE", help="the engine plan, as YAML")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="DIR", help="folder to write"
    )
    parser.add_argument(
        "--format", choices=("kubernetes", "compose"), default="kubernetes", help="(%(default)s)"
    )
    parser.add_argument("--name", default=defaults.name, help="of the engine (%(default)s)")
    parser.add_argument(
        "--image", default=defaults.image, help="best with its digest (%(default)s)"
    )
    parser.add_argument(
        "--gateways",
        type=int,
        default=defaults.gateways,
        metavar="N",
        help="gateways, or engines where one container is a whole engine (2; 1 engine)",
    )
    parser.add_argument(
        "--prometheus",
        default=defaults.prometheus,
        metavar="URL",
        help="where autoscalers ask for metrics (%(default)s)",
    )
    parser.add_argument(
        "--rdma-resource",
        default=defaults.rdma_resource,
        metavar="NAME",
        help="the cluster's name for RDMA devices, for transport nixl (%(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the checkpoint, of which config.json is enough: nodes on CPUs then ask for the "
        "memory that they need",
    )
    parser.add_argument(
        "--cpus",
        type=int,
        metavar="N",
        help="threads of each node on CPUs, and cores of its container, where the plan gives none",
    )
    parser.add_argument(
        "--models",
        type=Path,
        metavar="DIR",
        help="this host's folder with the plan's models, which containers have at "
        f"{MODELS}: with Compose itself, in a cluster as a copy that you make; nothing is pulled",
    )
    parser.set_defaults(run=render)


def render(parsed: argparse.Namespace) -> int:
    """Write the files of an engine. Raises ConfigError."""
    if parsed.format == "compose":
        _check_compose(parsed)
    plan = read_plan(parsed.plan)
    asked = DeployOptions(
        name=parsed.name,
        image=parsed.image,
        gateways=parsed.gateways,
        prometheus=parsed.prometheus,
        rdma_resource=parsed.rdma_resource,
        cpus=parsed.cpus,
        models=parsed.models,
    )
    shape = _shape(plan, parsed.model, parsed.models)
    engine, files = rendered(plan, asked, shape, form=parsed.format)
    _write(parsed.output, files)
    if shape is None and any(not node.place.is_gpu for node in plan.nodes):
        print(
            f"topspin deploy: {plan.model.path} is not on this host, so nodes ask for no memory; "
            "give --model DIR",
            file=sys.stderr,
        )
    print(f"{parsed.output}: {len(files)} files of engine {engine.name}")
    return 0


def _check_compose(parsed: argparse.Namespace) -> None:
    """Raise ConfigError for a setting that a Compose file has no place for."""
    for name in ("gateways", "prometheus", "rdma_resource"):
        if getattr(parsed, name) != getattr(DeployOptions(image=parsed.image), name):
            raise ConfigError(
                f"--{name.replace('_', '-')}: has no effect with --format compose, which has one "
                "gateway and no cluster; leave it out"
            )


def rendered(
    plan: EnginePlan, asked: DeployOptions, shape: ModelShape | None, *, form: Format
) -> tuple[Engine, Mapping[str, str]]:
    """Return an engine's services, and their files by path. Raises ConfigError."""
    host_of = service_host if form == "compose" else pod_host
    engine = engine_of(plan, asked, host_of=host_of, memory_of=memory_of(plan, shape))
    if form == "compose":
        return engine, compose_files(engine, print_plan(engine.plan))
    return engine, kubernetes_files(engine)


def _shape(plan: EnginePlan, directory: Path | None, models: Path | None) -> ModelShape | None:
    """Return the shape of the plan's model, if it is on this host; asks no network."""
    if directory is not None and models is not None:
        raise ConfigError(f"--model {directory}: has no effect with --models; leave one out")
    if directory is None:
        directory = host_path(plan.model.path, models)
        if models is None and not directory.exists():
            return None
    # An absolute path is no hub id.
    config = load_model_config(resolve_model(str(directory.resolve())), plan.model.hf_overrides)
    return ModelShape.from_config(config, dtype=plan.model.dtype)


def _write(directory: Path, files: Mapping[str, str]) -> None:
    """Replace what an earlier call has written; keys and other files of the user stay."""
    mark = directory / MARK
    try:
        if directory.exists() and any(directory.iterdir()) and not mark.exists():
            raise ConfigError(f"-o {directory}: is not empty, and was not written by this command")
        with contextlib.suppress(FileNotFoundError):
            for name in mark.read_text().splitlines():
                (directory / name).unlink(missing_ok=True)
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        mark.write_text("".join(f"{name}\n" for name in files))
    except OSError as error:
        raise ConfigError(f"-o {directory}: {error.strerror}") from error
