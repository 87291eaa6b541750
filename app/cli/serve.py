"""`topspin serve`: turns its flags, or a file, into the engine plan, and starts the engine.

All settings are checked here, before a process is started. Called by app.cli.main.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from app.cli import flags
from app.cli.flags import hide_api_key, read_engine, read_gateway
from app.launch.calibrate import choose_layout
from app.launch.display import write_line
from app.launch.engine import launch
from app.launch.gpu_check import check_gpus
from models.description.config import ModelConfig, load_model_config
from models.description.facts import facts_of
from models.sources.hub import resolve_model
from server.gateway.bodies.sampling_defaults import load_sampling_defaults, unapplied_defaults
from topspin.cores import LayoutChoice
from topspin.devices import TRITON
from topspin.errors import ConfigError
from topspin.logs import FORMAT_VARIABLE
from topspin.plan.file import print_plan, read_plan
from topspin.plan.from_flags import resolve
from topspin.plan.rules.checks import check_model
from topspin.plan.setting import AUTO
from topspin.plan.settings import GatewaySection
from topspin.plan.spec import EnginePlan, NodeSpec, ServeConfig
from topspin.plan.speculation import SELF_INT4
from topspin.processes.listening import bind


class AskedEngine(NamedTuple):
    """The engine that a user asked for: its plan, its HTTP side, and the model's directory."""

    plan: EnginePlan
    gateway: GatewaySection
    path: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run an engine until it is stopped; returns the exit status (see launch).

    With `--print-plan`, print its plan instead. Raises ConfigError before any process is started,
    EngineError if one cannot be.
    """
    hide_api_key(arguments)
    asked = asked_for(arguments)
    say_ignored(asked)
    plan = asked.plan
    if arguments.print_plan:
        print(print_plan(plan), end="")
        return 0
    if plan.network is not None:
        raise ConfigError(
            f"--plan {arguments.plan}: `network` says that its processes are on several hosts: "
            "start each with `topspin scheduler`, `topspin gateway` and `topspin node`"
        )
    check_host(plan, plan.nodes)
    set_log_format(asked.gateway)
    return launch(serve_config(asked))


def say_ignored(asked: AskedEngine) -> None:
    """Name on stderr what the checkpoint says and is not followed; once for an engine."""
    plan, gateway, path = asked
    model = load_model_config(path, plan.model.hf_overrides)
    for note in (*model.notes, *unapplied_defaults(path, gateway.generation_config)):
        _to_stderr(f"topspin: {note}")
    if model.dtype == "float16" and plan.model.dtype == "bfloat16":
        _to_stderr(
            f"topspin: {path}: its float16 weights are rounded to bfloat16, which has 8 bits of "
            "precision instead of 11; --dtype float32 keeps them"
        )


def check_http(gateway: GatewaySection) -> None:
    """Raise ConfigError for keys, certificates or a collector that cannot be used."""
    # Only now: other commands need no HTTP server.
    from server.gateway.http.auth import keys_of
    from server.gateway.http.listener import check_tls
    from server.gateway.operations.otlp import check_endpoint

    keys_of(gateway)
    check_tls(gateway)
    check_endpoint(gateway.otlp_traces_endpoint)


def check_text(path: Path, gateway: GatewaySection) -> None:
    """Raise ConfigError if the gateway could not read or write the model's text.

    A model without a chat template is served, but not to chats, which is said.
    """
    from models.text.chat_template import ChatTemplate, has_template
    from models.text.tokenizer_names import RANK_FILE, TOKENIZER_FILE, has_tokenizer

    if not has_tokenizer(path):
        raise ConfigError(
            f"{path}: has no tokenizer (neither {TOKENIZER_FILE} nor {RANK_FILE}); copy it from "
            "the model that this one was made of"
        )
    if gateway.chat_template is not None:
        ChatTemplate.from_file(path, gateway.chat_template)
    elif not has_template(path):
        _to_stderr(
            f"topspin: {path} has no chat template: only /v1/completions is served; "
            "--chat-template FILE gives one"
        )


def check_defaults(path: Path, gateway: GatewaySection) -> None:
    """Raise ConfigError for defaults of sampling parameters that cannot be used."""
    load_sampling_defaults(path, gateway.generation_config, gateway.override_generation_config)


def set_log_format(gateway: GatewaySection) -> None:
    """Have this process's roles write their logs in the format that was asked for."""
    if gateway.log_format is not None:
        os.environ[FORMAT_VARIABLE] = gateway.log_format


def check_host(plan: EnginePlan, nodes: Sequence[NodeSpec]) -> None:
    """Raise ConfigError if this host lacks what `nodes` of `plan` need, before they start."""
    check_packages(plan, nodes)
    check_cores(nodes)
    check_gpus([node.device for node in nodes])


def asked_for(arguments: argparse.Namespace) -> AskedEngine:
    """Return the plan of the flags, or of `--plan`, and the settings of the HTTP side.

    Raises ConfigError naming what cannot be served, and why.
    """
    asked, gateway = read_engine(arguments), read_gateway(arguments)
    if not arguments.print_plan:
        check_http(gateway)  # before layouts are measured
    if arguments.plan is not None:
        planned = asked_by_plan(arguments.plan, gateway)
        if not arguments.print_plan:
            check_text(planned.path, gateway)
        return planned
    path = resolve_model(asked["path"])
    check_defaults(path, gateway)
    if not arguments.print_plan:
        check_text(path, gateway)
        if asked.get("layout", AUTO) == AUTO:
            bind(gateway).close()  # launch() comes after the measurement
    plan = measured_plan(asked, path)
    on_device = any(node.place.is_device for node in plan.attention)
    if "gpu_memory_utilization" in asked and not on_device:
        _to_stderr("topspin: --gpu-memory-utilization has no effect: attention is not on a GPU")
    return AskedEngine(plan, gateway, path)


def asked_by_plan(file: str, gateway: GatewaySection) -> AskedEngine:
    """Return the plan in `file`, checked against its model. Raises ConfigError."""
    plan = read_plan(file)
    path = resolve_model(plan.model.path)
    model = load_model_config(path, plan.model.hf_overrides)
    check_model(plan, facts_of(model, path))
    check_draft_model(plan, model)
    check_defaults(path, gateway)
    return AskedEngine(plan, gateway, path)


def measured_plan(asked: Mapping[str, Any], path: Path) -> EnginePlan:
    """Return the plan of the settings `asked` for; measures layouts if that is wanted.

    `path` is the model's directory. Raises ConfigError naming the setting that the model cannot be
    served with, and why.
    """
    plan = plan_of(path, **asked)
    model = load_model_config(path, plan.model.hf_overrides)
    check_draft_model(plan, model)
    if asked.get("layout", AUTO) != AUTO:
        return plan
    # All checks have passed.
    measured = choose_layout(
        asked,
        model,
        path,
        lambda choice: plan_of(path, measured=choice, **asked),
        emit=_to_stderr,
    )
    return plan_of(path, measured=measured, **asked)


def plan_of(
    checkpoint: Path, /, *, measured: LayoutChoice | None = None, **asked: Any
) -> EnginePlan:
    """Return the plan of the settings `asked` for and the model in `checkpoint`, on this host.

    The settings' names are those of topspin.plan.flags; `path` is the model's (by default that of
    its directory).
    """
    model = load_model_config(checkpoint, asked.get("hf_overrides"))
    cores = sorted(os.sched_getaffinity(0))
    asked = {"path": str(checkpoint)} | asked
    return resolve(facts_of(model, checkpoint), cores=cores, measured=measured, **asked)


def check_draft_model(plan: EnginePlan, model: ModelConfig) -> None:
    """Raise ConfigError if the draft model of `plan` cannot draft for `model`, and why."""
    speculation = plan.speculation
    if speculation is None or speculation.model is None:
        return
    flag = f"--speculative-config: the draft model {speculation.model}"
    if speculation.model == SELF_INT4:
        return
    try:
        draft = load_model_config(resolve_model(speculation.model))
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{flag} has a vocabulary of {draft.vocab_size} tokens, {plan.model.path} one of "
            f"{model.vocab_size}: they must have the same tokens"
        )


def serve_config(asked: AskedEngine) -> ServeConfig:
    """Return the configuration of all processes: the model is a directory, with a name.

    Without a name in its settings the model has its user's: the last part of a directory's or a
    file's name, a hub id.
    """
    plan, gateway, path = asked
    path = path.resolve()
    names = gateway.served_names
    if not names:
        is_path = Path(plan.model.path).expanduser().exists()
        names = (path.name if is_path else plan.model.path,)
    model = msgspec.structs.replace(plan.model, path=str(path))
    speculation = plan.speculation
    if speculation is not None and speculation.model not in (None, SELF_INT4):
        draft = str(resolve_model(speculation.model).resolve())
        speculation = msgspec.structs.replace(speculation, model=draft)
    return ServeConfig(
        plan=msgspec.structs.replace(plan, model=model, speculation=speculation),
        gateway=msgspec.structs.replace(gateway, served_names=names),
    )


def _to_stderr(line: str) -> None:
    write_line(sys.stderr, line)


def check_packages(plan: EnginePlan, nodes: Sequence[NodeSpec]) -> None:
    """Raise ConfigError if `nodes` need a package that is not installed; imports none."""
    if plan.link.transport == "nixl" and importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            "--transport nixl: the nixl package is not installed; install it with "
            "pip install -e '.[rdma]', or use --transport shm or tcp"
        )
    for node in nodes:
        if node.kernels == TRITON and importlib.util.find_spec("triton") is None:
            raise ConfigError(
                f"the {TRITON} kernels, which {node.device} needs: the triton package is not "
                "installed; torch's builds for GPUs bring it"
            )


def check_cores(nodes: Sequence[NodeSpec]) -> None:
    """Raise ConfigError if a node has a core that this host, or this process, does not have."""
    usable = os.sched_getaffinity(0)
    for node in nodes:
        if missing := sorted(set(node.cores) - usable):
            raise ConfigError(
                f"{node}: cores {missing}: this process may use {sorted(usable)} only"
            )
