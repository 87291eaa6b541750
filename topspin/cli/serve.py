"""`topspin serve`: turns its flags into the engine configuration, and starts the engine.

All settings are checked here, before a process is started. Called by topspin.cli.main.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import msgspec

from models.config import ModelConfig, load_model_config
from models.hub import resolve_model
from models.rope import is_length_dependent
from server.gateway.requests.sampling_defaults import load_sampling_defaults
from topspin.cli.flags import given, read_config
from topspin.config import EngineConfig
from topspin.cores import LayoutChoice
from topspin.devices import TRITON
from topspin.errors import ConfigError
from topspin.launch.calibrate import choose_layout
from topspin.launch.engine import launch
from topspin.launch.gpu_check import check_gpus
from topspin.resolve import resolve

ONLY_ON_GPUS = ("cache.gpu_memory_utilization", "compute.cuda_graphs")


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Return the resolved configuration for `arguments`.

    Raises ConfigError naming the setting or the model that cannot be served, and why.
    """
    asked = read_config(arguments)
    path = resolve_model(asked.model.path)
    names = asked.model.served_names
    if not names and not Path(asked.model.path).expanduser().is_dir():
        # A hub id or the default model; the name of its cache folder says nothing.
        names = (asked.model.path,)
    model = msgspec.structs.replace(asked.model, path=str(path.resolve()), served_names=names)
    asked = msgspec.structs.replace(asked, model=model)
    facts = load_model_config(path)
    load_sampling_defaults(path, asked.gateway.generation_config)
    resolved = resolve_for(asked, facts)
    if asked.compute.layout != "auto":
        return resolved
    # All checks have passed.
    measured = choose_layout(
        asked,
        facts,
        lambda choice: resolve_for(asked, facts, measured=choice),
        emit=_to_stderr,
    )
    return resolve_for(asked, facts, measured=measured)


def resolve_for(
    config: EngineConfig, model: ModelConfig, *, measured: LayoutChoice | None = None
) -> EngineConfig:
    """Return `config` resolved for the checkpoint that `model` describes."""
    has_experts = model.moe is not None and len(model.moe_layers) > 0
    return resolve(
        config,
        checkpoint_dtype=model.dtype,
        max_position_embeddings=model.context_length,
        num_experts=model.moe.num_experts if model.moe is not None and has_experts else 0,
        # With dynamic NTK a key is rotated by its own prompt's length.
        shares_prefixes=not is_length_dependent(model.rope),
        measured=measured,
    )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(arguments: argparse.Namespace) -> int:
    """Run an engine until it is stopped; returns the exit status (see launch).

    Raises ConfigError before any process is started, EngineError if one cannot be.
    """
    config = engine_config(arguments)
    check_packages(config)
    check_gpus((*config.devices.attention, *config.devices.experts))
    for option in without_effect(arguments, config):
        _to_stderr(f"topspin: {option} has no effect: attention is not on a GPU")
    return launch(config)


def without_effect(arguments: argparse.Namespace, config: EngineConfig) -> list[str]:
    """Return the flags that were given and change nothing on the devices of `config`."""
    if config.nodes.attention.is_device:
        return []
    return [field.shown_name for field in given(arguments) if field.key in ONLY_ON_GPUS]


def check_packages(config: EngineConfig) -> None:
    """Raise ConfigError if `config` needs a package that is not installed; imports none."""
    if config.m2n.transport == "nixl" and importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            "--transport nixl: the nixl package is not installed; install it with "
            "pip install 'topspin[rdma]', or use --transport shm or tcp"
        )
    for place in config.nodes.attention, config.nodes.experts:
        if place.kernels == TRITON and importlib.util.find_spec("triton") is None:
            raise ConfigError(
                f"the {TRITON} kernels, which {place.device} needs: the triton package is not "
                "installed; torch's builds for GPUs bring it"
            )
