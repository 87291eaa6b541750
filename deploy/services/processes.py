"""The processes of an engine, each with its container: arguments, keys, places, how it ends.

Owns the arguments of `topspin`, and the places that containers have: paths, and who needs which.
Knows no manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from deploy.services.contained import MODELS
from deploy.services.engine import CONTROL_PORT, HTTP_PORT, SPILL, Engine, Node
from topspin.plan.spec import EnginePlan
from topspin.processes.listening import ALL_ADDRESSES

ROOT: Final = "/topspin"
PLAN_FILE: Final = f"{ROOT}/plan/plan.yaml"
KEYS: Final = f"{ROOT}/keys"
API_KEYS: Final = f"{ROOT}/api-keys"
API_KEY_FILE: Final = f"{API_KEYS}/api-keys"
CACHE: Final = f"{ROOT}/cache"
RUN: Final = f"{ROOT}/run"

Place = Literal["plan", "models", "keys", "api-keys", "run", "shared-memory", "spill"]
PATHS: Final[dict[Place, str]] = {
    "plan": PLAN_FILE.rpartition("/")[0],
    "models": MODELS,
    "keys": KEYS,
    "api-keys": API_KEYS,
    "run": RUN,
    "shared-memory": "/dev/shm",
    "spill": SPILL,
}
"""Where containers have what they are given, and where they may write beside their scratch."""

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


class ServicePort(NamedTuple):
    """A port that a process listens on, which others know."""

    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of an engine, and what its container gives it.

    `keys`: the group whose keys it has; None: nothing travels. `nodes` are those that it runs.
    `progress`: the file to which it writes how it gets on; None: it answers HTTP. `ends_in_s`: the
    time that it has to end by itself.
    """

    name: str
    arguments: tuple[str, ...]
    keys: str | None = None
    nodes: tuple[Node, ...] = ()
    port: ServicePort | None = None
    progress: str | None = None
    ends_in_s: float = 0.0

    def places(self, engine: Engine) -> list[Place]:
        """Return what its container has, in the order of PATHS."""
        has: dict[Place, bool] = {
            "plan": True,
            "models": True,
            "keys": self.keys is not None,
            "api-keys": self.progress is None,
            "run": self.progress is not None,
            "shared-memory": bool(self.nodes),
            "spill": engine.spill_bytes(self.nodes) > 0,
        }
        return [place for place in PATHS if has[place]]


def scheduler_process() -> Process:
    """Return the scheduler, which listens on all of its pod's addresses."""
    file = progress_file("scheduler")
    bind = ("--bind", ALL_ADDRESSES)
    return Process(
        name="scheduler",
        arguments=("scheduler", *_PLAN, *_KEYS, *bind, "--progress", file),
        keys="scheduler",
        port=ServicePort("control", CONTROL_PORT),
        progress=file,
    )


def gateway_process() -> Process:
    """Return a gateway."""
    return Process(
        name="gateway",
        arguments=("gateway", *_PLAN, *_KEYS, *_HTTP),
        keys="gateway",
        port=ServicePort("http", HTTP_PORT),
        ends_in_s=SHUTDOWN_TIMEOUT_S,
    )


def whole_process(engine: Engine) -> Process:
    """Return a whole engine."""
    return Process(
        name="engine",
        arguments=("serve", *_PLAN, *_HTTP),
        nodes=engine.plan.nodes,
        port=ServicePort("http", HTTP_PORT),
        ends_in_s=SHUTDOWN_TIMEOUT_S,
    )


def node_process(engine: Engine, node: Node, *, name: str, index: str, address: str) -> Process:
    """Return node `index` (N, or ordinal+N), which others reach at `address`, if they connect."""
    file = progress_file(node.role, index)
    advertise = ("--advertise", address) if engine.listens(node) else ()
    return Process(
        name=name,
        arguments=(
            *("node", node.role, "--index", index),
            *_PLAN,
            *_KEYS,
            *advertise,
            *("--progress", file),
        ),
        keys=node.key_group,
        nodes=(node,),
        progress=file,
        ends_in_s=engine.plan.failover.halt_deadline_s,
    )


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
