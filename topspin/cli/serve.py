"""`topspin serve`: turns its flags, or a file, into the engine plan, and starts the engine.

All settings are checked here, before a process is started. Called by topspin.cli.main.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import msgspec

from models.config import ModelConfig, load_model_config
from models.hub import resolve_model
from models.rope import is_length_dependent
from server.gateway.requests.sampling_defaults import load_sampling_defaults
from topspin.cli.flags import given, read_config
from topspin.config import EngineConfig, GatewaySection
from topspin.cores import LayoutChoice
from topspin.devices import TRITON
from topspin.errors import ConfigError
from topspin.launch.calibrate import choose_layout
from topspin.launch.engine import launch
from topspin.launch.gpu_check import check_gpus
from topspin.plan import EnginePlan, ServeConfig
from topspin.plan_file import print_plan, read_plan
from topspin.resolve import ModelFacts, check_model, resolve
from topspin.settings import check_ranges

ONLY_ON_GPUS = ("cache.gpu_memory_utilization", "compute.cuda_graphs")


def serve(arguments: argparse.Namespace) -> int:
    """Run an engine until it is stopped; returns the exit status (see launch).

    With `--print-plan`, print its plan instead. Raises ConfigError before any process is started,
    EngineError if one cannot be.
    """
    plan, gateway = asked_for(arguments)
    if arguments.print_plan:
        print(print_plan(plan), end="")
        return 0
    config = serve_config(plan, gateway)
    check_packages(plan)
    check_cores(plan)
    check_gpus([node.device for node in plan.nodes])
    return launch(config)


def asked_for(arguments: argparse.Namespace) -> tuple[EnginePlan, GatewaySection]:
    """Return the plan of the flags, or of `--plan`, and the settings of the HTTP side.

    Raises ConfigError naming what cannot be served, and why.
    """
    asked = read_config(arguments)
    if arguments.plan is None:
        plan = plan_of(asked)
        for option in without_effect(arguments, plan):
            _to_stderr(f"topspin: {option} has no effect: attention is not on a GPU")
        return plan, asked.gateway
    check_ranges(asked)
    plan = read_plan(arguments.plan)
    check_model(plan, facts_of(load_model_config(resolve_model(plan.model.path))))
    return plan, asked.gateway


def plan_of(asked: EngineConfig) -> EnginePlan:
    """Return the plan that runs the settings `asked`; measures layouts if that is wanted.

    Raises ConfigError naming the setting or the model that cannot be served, and why.
    """
    path = resolve_model(asked.model.path)
    model = load_model_config(path)
    load_sampling_defaults(path, asked.gateway.generation_config)
    plan = resolve_for(asked, model)
    if asked.compute.layout != "auto":
        return plan
    # All checks have passed.
    measured = choose_layout(
        asked,
        model,
        path,
        lambda choice: resolve_for(asked, model, measured=choice),
        emit=_to_stderr,
    )
    return resolve_for(asked, model, measured=measured)


def resolve_for(
    config: EngineConfig, model: ModelConfig, *, measured: LayoutChoice | None = None
) -> EnginePlan:
    """Return the plan of `config` for the checkpoint that `model` describes, on this host."""
    cores = sorted(os.sched_getaffinity(0))
    return resolve(config, facts_of(model), cores=cores, measured=measured)


def facts_of(model: ModelConfig) -> ModelFacts:
    """Return what a plan depends on."""
    has_experts = model.moe is not None and len(model.moe_layers) > 0
    return ModelFacts(
        dtype=model.dtype,
        max_positions=model.context_length,
        num_layers=model.num_layers,
        moe_layers=tuple(model.moe_layers),
        num_experts=model.moe.num_experts if model.moe is not None and has_experts else 0,
        # With dynamic NTK a key is rotated by its own prompt's length.
        shares_prefixes=not is_length_dependent(model.rope),
    )


def serve_config(plan: EnginePlan, gateway: GatewaySection) -> ServeConfig:
    """Return the configuration of all processes: the model is a directory, with a name.

    Without a name in `gateway` the model has its user's: a directory's last part, a hub id.
    """
    path = resolve_model(plan.model.path).resolve()
    names = gateway.served_names
    if not names:
        asked = Path(plan.model.path).expanduser()
        names = (path.name if asked.is_dir() else plan.model.path,)
    load_sampling_defaults(path, gateway.generation_config)
    model = msgspec.structs.replace(plan.model, path=str(path))
    return ServeConfig(
        plan=msgspec.structs.replace(plan, model=model),
        gateway=msgspec.structs.replace(gateway, served_names=names),
    )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def without_effect(arguments: argparse.Namespace, plan: EnginePlan) -> list[str]:
    """Return the flags that were given and change nothing on the devices of `plan`."""
    if any(node.place.is_device for node in plan.attention):
        return []
    return [field.shown_name for field in given(arguments) if field.key in ONLY_ON_GPUS]


def check_packages(plan: EnginePlan) -> None:
    """Raise ConfigError if `plan` needs a package that is not installed; imports none."""
    if plan.link.transport == "nixl" and importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            "--transport nixl: the nixl package is not installed; install it with "
            "pip install 'topspin[rdma]', or use --transport shm or tcp"
        )
    for node in plan.nodes:
        if node.kernels == TRITON and importlib.util.find_spec("triton") is None:
            raise ConfigError(
                f"the {TRITON} kernels, which {node.device} needs: the triton package is not "
                "installed; torch's builds for GPUs bring it"
            )


def check_cores(plan: EnginePlan) -> None:
    """Raise ConfigError if a node has a core that this host, or this process, does not have."""
    usable = os.sched_getaffinity(0)
    for node in plan.nodes:
        if missing := sorted(set(node.cores) - usable):
            raise ConfigError(
                f"{node}: cores {missing}: this process may use {sorted(usable)} only"
            )
