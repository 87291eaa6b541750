"""A plan that was printed on a host, changed into that of containers: threads, the model's place.

Owns what `--cpus` and `--models` of `topspin deploy render` change. Pure: reads no file. Called by
deploy.services.engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from models.sources.hub import DEFAULT_MODEL, made_model_path
from topspin.errors import ConfigError
from topspin.plan.spec import EnginePlan, NodeSpec
from topspin.plan.speculation import SELF_INT4

MODELS: Final = "/topspin/models"
"""Where all containers have the models."""


def contained(plan: EnginePlan, *, cpus: int | None, models: Path | None) -> EnginePlan:
    """Return `plan` with `cpus` threads where it has none, and its models as containers see them.

    `models` is the folder that containers have at MODELS. Raises ConfigError for a setting that
    changes nothing, and for a model that is not in the folder.
    """
    if cpus is not None:
        plan = _with_threads(plan, cpus)
    if models is not None:
        model = msgspec.structs.replace(plan.model, path=_placed(plan.model.path, models))
        plan = msgspec.structs.replace(plan, model=model)
        drafts = plan.speculation
        if drafts is not None and drafts.model not in (None, SELF_INT4):
            drafts = msgspec.structs.replace(drafts, model=_placed(drafts.model, models))
            plan = msgspec.structs.replace(plan, speculation=drafts)
    return plan


def host_path(name: str, models: Path | None) -> Path:
    """Return where this host has the model that a plan names `name`; it may not exist."""
    if name == DEFAULT_MODEL:
        return made_model_path(name, models)
    return Path(name).expanduser().resolve()


def _with_threads(plan: EnginePlan, cpus: int) -> EnginePlan:
    if not 1 <= cpus <= 1024:
        raise ConfigError(f"--cpus {cpus}: give a number between 1 and 1024")
    if not any(map(_takes_all, plan.nodes)):
        raise ConfigError(
            f"--cpus {cpus}: has no effect: the plan says how many threads or cores each node on "
            "CPUs has; leave it out, or change num_threads in the plan"
        )
    nodes = (
        msgspec.structs.replace(node, num_threads=cpus) if _takes_all(node) else node
        for node in plan.nodes
    )
    return msgspec.structs.replace(plan, nodes=tuple(nodes))


def _takes_all(node: NodeSpec) -> bool:
    """Say whether a node would use every core of its host."""
    return not node.place.is_gpu and node.num_threads is None and not node.cores


def _placed(name: str, models: Path) -> str:
    """Return the name of a model in containers. Raises ConfigError if it is not in `models`."""
    if name == DEFAULT_MODEL or name.startswith(f"{MODELS}/"):
        return name
    path, folder = host_path(name, models), models.resolve()
    if folder not in path.parents:
        raise ConfigError(
            f"--models {models}: the plan's model {name} is not below that folder; give a folder "
            "above it, or leave --models out for a hub id, which containers pull"
        )
    return f"{MODELS}/{path.relative_to(folder)}"
