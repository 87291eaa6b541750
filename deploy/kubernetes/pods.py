"""The pods of an engine: containers, what they mount, may do and ask for, and their probes.

Owns the form of a pod. Which processes run in it is deploy.services'; how pods are started and
replaced is workloads.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.services.arguments import (
    API_KEYS,
    CACHE,
    ENVIRONMENT,
    INIT,
    KEYS,
    OFFLINE,
    PLAN_FILE,
    RUN,
    USER,
    probe_arguments,
)
from deploy.services.engine import HTTP_PORT, MODELS, SPILL, Engine, Node
from topspin import __version__

Object = dict[str, Any]

DRAIN_S: Final = 10
"""Between the signal to drain and that to end, proxies learn that a gateway is gone."""
SHARED_MEMORY: Final = "1Gi"
"""Of libraries (UCX, CUDA); rows between nodes are in memory that has no file system."""
UNREACHABLE_S: Final = 30
"""After so long on a host that has gone a pod is given up, instead of after Kubernetes' 300 s."""

INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"
PART_OF: Final = "app.kubernetes.io/part-of"
KIND: Final = "topspin/kind"
"""server: answers requests; node; scheduler; job."""


def labels(engine: Engine, component: str) -> dict[str, str]:
    """Return the labels of an object; `component` is a role."""
    return {
        "app.kubernetes.io/name": "topspin",
        "app.kubernetes.io/version": __version__,
        PART_OF: engine.asked.name,
        INSTANCE: engine.name,
        COMPONENT: component,
    }


def selector(engine: Engine, component: str) -> dict[str, str]:
    """Return the labels that select the pods of a role, of this revision only."""
    return {INSTANCE: engine.name, COMPONENT: component}


def metadata(engine: Engine, name: str, component: str) -> Object:
    """Return the metadata of an object of this revision."""
    return {"name": f"{engine.name}-{name}", "labels": labels(engine, component)}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a container asks for; `memory` (None: it is not known) and `disk` in bytes."""

    cpus: int
    memory: int | None
    disk: int = 0
    gpus: int = 0
    has_rdma: bool = False


def container(
    engine: Engine,
    name: str,
    arguments: Sequence[str],
    needs: Needs,
    *,
    mounts: Sequence[Object],
    probes: Object,
    port: tuple[str, int] | None = None,
) -> Object:
    """Return a container that runs `topspin` with `arguments`."""
    found: Object = {
        "name": name,
        "image": engine.asked.image,
        "command": [*INIT, "topspin"],
        "args": list(arguments),
        "env": environment(ENVIRONMENT | OFFLINE),
        "resources": resources(engine, needs),
        "securityContext": RESTRICTED,
        "volumeMounts": [*mounts, *_SCRATCH],
        **probes,
    }
    if any("$(POD_IP)" in each for each in arguments):
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        found["env"].append({"name": "POD_IP", "valueFrom": address})
    if port is not None:
        found["ports"] = [{"name": port[0], "containerPort": port[1]}]
    return found


def environment(variables: dict[str, str]) -> list[Object]:
    """Return variables as a container has them."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def resources(engine: Engine, needs: Needs) -> Object:
    """Return what a container asks for.

    Cores and memory have no limit: a node that loads uses more for a while, and one that is slowed
    down or ended slows down or halts all others.
    """
    requests: dict[str, Any] = {"cpu": str(needs.cpus)}
    if needs.memory is not None:
        requests["memory"] = _mebibytes(needs.memory)
    if needs.disk:
        requests["ephemeral-storage"] = _mebibytes(needs.disk)
    devices: dict[str, Any] = {}
    if needs.gpus:
        devices["nvidia.com/gpu"] = str(needs.gpus)
    if needs.has_rdma:
        devices[engine.asked.rdma_resource] = "1"
    return {"requests": requests | devices, **({"limits": devices} if devices else {})}


def _mebibytes(size: int) -> str:
    return f"{-(-size // 2**20)}Mi"


# The restricted standard, and a read-only root. A capability to lock memory, which network cards
# need, would be of no use to a user who is not root: it is the container runtime's limit.
RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def pod(
    engine: Engine,
    component: str,
    containers: Sequence[Object],
    volumes: Sequence[Object],
    *,
    grace_s: float,
    kind: str,
) -> Object:
    """Return a pod's template. Pods of a role keep to different hosts where they can."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(engine, component)},
    }
    return {
        "metadata": {"labels": labels(engine, component) | {KIND: kind}},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": USER_CONTEXT,
            "terminationGracePeriodSeconds": round(grace_s),
            "tolerations": list(_TOLERATIONS),
            "topologySpreadConstraints": [spread],
            "containers": list(containers),
            "volumes": [*volumes, *_SCRATCH_VOLUMES],
        },
    }


USER_CONTEXT: Final = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}

_TOLERATIONS: Final = tuple(
    {
        "key": f"node.kubernetes.io/{trouble}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": UNREACHABLE_S,
    }
    for trouble in ("not-ready", "unreachable")
)

_SCRATCH: Final = (
    {"name": "cache", "mountPath": CACHE},
    {"name": "tmp", "mountPath": "/tmp"},
)
_SCRATCH_VOLUMES: Final = (
    {"name": "cache", "emptyDir": {"sizeLimit": "4Gi"}},
    {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
)


def plan_mount() -> Object:
    """Return the mount of the plan."""
    return {"name": "plan", "mountPath": PLAN_FILE.rpartition("/")[0], "readOnly": True}


def models_mount(*, read_only: bool = True) -> Object:
    """Return the mount of the models; only who brings them may write there."""
    return {"name": "models", "mountPath": MODELS, **({"readOnly": True} if read_only else {})}


def keys_mount(group: str) -> Object:
    """Return the mount of the keys of a group."""
    return {"name": f"keys-{group}", "mountPath": KEYS, "readOnly": True}


def api_keys_mount() -> Object:
    """Return the mount of the API keys."""
    return {"name": "api-keys", "mountPath": API_KEYS, "readOnly": True}


def run_mount() -> Object:
    """Return the mount of the file that probes look at."""
    return {"name": "run", "mountPath": RUN}


def shared_memory_mount() -> Object:
    """Return the mount of shared memory."""
    return {"name": "shared-memory", "mountPath": "/dev/shm"}


def spill_mount() -> Object:
    """Return the mount of the files in which nodes keep keys."""
    return {"name": "spill", "mountPath": SPILL}


def volumes_of(
    engine: Engine, mounts: Sequence[Object], *, nodes: Sequence[Node] = ()
) -> list[Object]:
    """Return the volumes that mounts name, each once, of a pod of `nodes`."""
    names = dict.fromkeys(mount["name"] for mount in mounts)
    spill = {"sizeLimit": _mebibytes(engine.spill_bytes(nodes))}
    return [_volume(engine, name, spill) for name in names]


def _volume(engine: Engine, name: str, spill: Object) -> Object:
    shared = engine.asked.name
    if name.startswith("keys-"):
        source: Object = {"secret": {"secretName": f"{shared}-{name}", "defaultMode": 0o440}}
    else:
        claim = {"claimName": f"{shared}-models"}
        sources: dict[str, Object] = {
            "plan": {"configMap": {"name": f"{engine.name}-plan"}},
            "models": {"persistentVolumeClaim": claim},
            "api-keys": {"secret": {"secretName": f"{shared}-api-keys", "defaultMode": 0o440}},
            "run": {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            "shared-memory": {"emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
            "spill": {"emptyDir": spill},
        }
        source = sources[name]
    return {"name": name, **source}


def exec_probes(engine: Engine, file: str) -> Object:
    """Return the probes of a process that writes how it gets on to `file`.

    It is alive while it loads and compiles, however long the first time takes; it is ready when it
    takes work.
    """

    def ask(*, ready: bool) -> Object:
        arguments = probe_arguments(engine.plan, file, ready=ready)
        return {"exec": {"command": ["topspin", *arguments]}}

    return {
        "startupProbe": ask(ready=False) | _every(5, failures=120),
        "livenessProbe": ask(ready=False) | _every(10, failures=3),
        "readinessProbe": ask(ready=True) | _every(5, failures=1),
    }


def http_probes() -> Object:
    """Return the probes of a gateway: one that waits for its engine is alive, but not ready."""

    def ask(path: str) -> Object:
        return {"httpGet": {"path": path, "port": "http"}}

    return {
        "startupProbe": ask("/live") | _every(2, failures=300),
        "livenessProbe": ask("/live") | _every(10, failures=6),
        "readinessProbe": ask("/health") | _every(5, failures=2),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_S)]}}},
    }


def _every(seconds: int, *, failures: int) -> Object:
    return {"periodSeconds": seconds, "timeoutSeconds": 5, "failureThreshold": failures}


HTTP: Final = ("http", HTTP_PORT)
