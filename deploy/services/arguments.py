"""The command lines of an engine's containers, and the places that these name in them.

Owns the arguments of `topspin` and the paths that are mounted. Knows no manifest.
"""

from __future__ import annotations

from typing import Final

from deploy.services.engine import HTTP_PORT, MODELS
from topspin.plan.spec import EnginePlan
from topspin.processes.listening import ALL_ADDRESSES

ROOT: Final = "/topspin"
PLAN_FILE: Final = f"{ROOT}/plan/plan.yaml"
KEYS: Final = f"{ROOT}/keys"
API_KEYS: Final = f"{ROOT}/api-keys"
API_KEY_FILE: Final = f"{API_KEYS}/api-keys"
CACHE: Final = f"{ROOT}/cache"
RUN: Final = f"{ROOT}/run"

USER: Final = 10001
"""The image's user; keys are readable by its group."""

INIT: Final = ("tini", "--")
"""Process 1 of a container, which passes signals on: the kernel keeps from process 1 every signal
that it does not handle itself, and nodes leave some to the kernel."""

SHUTDOWN_TIMEOUT_S: Final = 120
"""A gateway that is replaced lets requests in flight end within this time."""
PROBED_WITHIN_S: Final = 60.0
"""A step that stands still for less is alive, whatever the plan says."""
GRACE_S: Final = 20
"""Beside the time that a process has to end by itself."""

ENVIRONMENT: Final = {
    "TOPSPIN_CACHE": MODELS,
    "NUMBA_CACHE_DIR": f"{CACHE}/numba",
    "TRITON_CACHE_DIR": f"{CACHE}/triton",
    "HF_HOME": f"{MODELS}/huggingface",
    "HOME": CACHE,
    "TOPSPIN_LOG_FORMAT": "json",
}
"""Of all containers: models are read from one place, what is compiled goes to another."""

OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
"""Of those that serve: only `topspin pull` asks the hub."""

_PLAN: Final = ("--plan", PLAN_FILE)
_KEYS: Final = ("--keys", KEYS)
_HTTP: Final = (
    *("--host", ALL_ADDRESSES),
    *("--port", str(HTTP_PORT)),
    *("--api-key-file", API_KEY_FILE),
    *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
)


def scheduler_arguments() -> tuple[str, ...]:
    """Return the arguments of the scheduler, which listens on all of its pod's addresses."""
    bind = ("--bind", ALL_ADDRESSES)
    return ("scheduler", *_PLAN, *_KEYS, *bind, "--progress", progress_file("scheduler"))


def gateway_arguments() -> tuple[str, ...]:
    """Return the arguments of a gateway."""
    return ("gateway", *_PLAN, *_KEYS, *_HTTP)


def node_arguments(role: str, index: str, advertise: str | None) -> tuple[str, ...]:
    """Return the arguments of node `index` (N, or ordinal+N).

    Others reach it at `advertise`; None: nobody connects to it.
    """
    return (
        *("node", role, "--index", index),
        *_PLAN,
        *_KEYS,
        *(() if advertise is None else ("--advertise", advertise)),
        *("--progress", progress_file(role, index)),
    )


def whole_arguments() -> tuple[str, ...]:
    """Return the arguments of a whole engine."""
    return ("serve", *_PLAN, *_HTTP)


def pull_arguments(model: str) -> tuple[str, ...]:
    """Return the arguments that bring a model to where the others look for it."""
    return ("pull", model)


def probe_arguments(plan: EnginePlan, file: str, *, ready: bool) -> tuple[str, ...]:
    """Return the arguments of a probe of the process that writes `file`.

    A step may stand still for as long as the plan lets it before the process counts as hung.
    """
    within_s = round(max(PROBED_WITHIN_S, 2 * plan.failover.progress_deadline_s))
    return ("probe", file, *(("--ready",) if ready else ()), "--within", str(within_s))


def progress_file(role: str, index: str = "") -> str:
    """Return where a process writes how it gets on; containers of a pod share the folder."""
    number = index if index.isdigit() else ""
    return f"{RUN}/{role}{number and '-'}{number}"
