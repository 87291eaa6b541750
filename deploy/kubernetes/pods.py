"""The pods of an engine: containers, what they mount, may do and ask for, and their probes.

Owns the form of a pod. Which processes there are is deploy.services'; how pods are started and
replaced is workloads.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from deploy.kubernetes.needs import Needs, mebibytes, needs_of, resources
from deploy.kubernetes.objects import Object, labels
from deploy.kubernetes.specs import spec
from deploy.services.engine import Engine
from deploy.services.processes import (
    CACHE,
    ENVIRONMENT,
    GRACE_S,
    INIT,
    OFFLINE,
    PATHS,
    USER,
    Place,
    Process,
    probe_arguments,
)

DRAIN_S: Final = 10
"""Between the signal to drain and that to end, proxies learn that a gateway is gone."""
SHARED_MEMORY: Final = "1Gi"
"""Of libraries (UCX, CUDA); rows between nodes are in memory that has no file system."""

KIND: Final = "topspin/kind"
"""server: answers requests; node; scheduler; job."""

PRODUCT: Final = "nvidia.com/gpu.product"
"""The label of hosts that NVIDIA's GPU feature discovery writes, of a name without blanks."""

READ_ONLY: Final[frozenset[Place]] = frozenset(("plan", "models", "keys", "api-keys"))


def container(
    engine: Engine,
    name: str,
    arguments: Sequence[str],
    *,
    variables: Sequence[Object],
    asked: Object,
    mounts: Sequence[Object],
) -> Object:
    """Return a container that runs `topspin` with `arguments`."""
    return {
        "name": name,
        "image": engine.asked.image,
        "command": [*INIT, "topspin"],
        "args": list(arguments),
        "env": list(variables),
        "resources": asked,
        "securityContext": _RESTRICTED,
        "volumeMounts": list(mounts),
    }


def environment(variables: dict[str, str]) -> list[Object]:
    """Return variables as a container has them."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def _container_of(engine: Engine, process: Process, needs: Needs) -> Object:
    variables = environment(ENVIRONMENT | OFFLINE)
    if any("$(POD_IP)" in each for each in process.arguments):
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        variables.append({"name": "POD_IP", "valueFrom": address})
    mounts = [
        {
            "name": _volume_name(process, place),
            "mountPath": PATHS[place],
            **({"readOnly": True} if place in READ_ONLY else {}),
        }
        for place in process.places(engine)
    ]
    found = container(
        engine,
        process.name,
        process.arguments,
        variables=variables,
        asked=resources(engine, needs),
        mounts=[*mounts, *_SCRATCH],
    )
    if process.progress is None:
        found |= spec("gateway-probes", engine, drain_s=str(DRAIN_S))
    else:
        found |= _exec_probes(engine, process.progress)
    if process.port is not None:
        found["ports"] = [{"name": process.port.name, "containerPort": process.port.number}]
    return found


# The restricted standard, and a read-only root. A capability to lock memory, which network cards
# need, would be of no use to a user who is not root: it is the container runtime's limit.
_RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def pod(
    engine: Engine,
    component: str,
    processes: Sequence[Process],
    *,
    kind: str,
    needs: Needs | None = None,
    more_labels: dict[str, str] | None = None,
    product: str | None = None,
) -> Object:
    """Return the template of a pod with a container for each process.

    Each asks for what it needs, or for `needs`. `product`: the GPU that its host must have.
    """
    drains_s = max(DRAIN_S * (each.progress is None) for each in processes)
    grace_s = max(each.ends_in_s for each in processes) + drains_s + GRACE_S
    common = spec("pod", engine, component=component, user=USER, grace_s=round(grace_s))
    containers = [
        _container_of(engine, each, needs or needs_of(engine, each)) for each in processes
    ]
    return {
        "metadata": {"labels": labels(engine, component) | {KIND: kind} | (more_labels or {})},
        "spec": {
            **common,
            **({} if product is None else {"nodeSelector": {PRODUCT: product.replace(" ", "-")}}),
            "containers": containers,
            "volumes": [*_volumes(engine, processes), *_SCRATCH_VOLUMES],
        },
    }


_SCRATCH: Final = (
    {"name": "cache", "mountPath": CACHE},
    {"name": "tmp", "mountPath": "/tmp"},
)
_SCRATCH_VOLUMES: Final = (
    {"name": "cache", "emptyDir": {"sizeLimit": "4Gi"}},
    {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
)


def _volume_name(process: Process, place: Place) -> str:
    """Return the name of a place's volume: processes of one pod may have keys of several groups."""
    return f"keys-{process.keys}" if place == "keys" else place


def _volumes(engine: Engine, processes: Sequence[Process]) -> list[Object]:
    """Return the volumes that the containers of a pod mount, each once."""
    shared = engine.asked.name
    spilled = engine.spill_bytes([node for each in processes for node in each.nodes])
    sources: dict[str, Object] = {
        "plan": {"configMap": {"name": f"{engine.name}-plan"}},
        "models": {"persistentVolumeClaim": {"claimName": f"{shared}-models"}},
        "run": {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        "shared-memory": {"emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
        "spill": {"emptyDir": {"sizeLimit": mebibytes(spilled)}},
    }
    names = (_volume_name(each, place) for each in processes for place in each.places(engine))
    return [
        {
            "name": name,
            **sources.get(
                name, {"secret": {"secretName": f"{shared}-{name}", "defaultMode": 0o440}}
            ),
        }
        for name in dict.fromkeys(names)
    ]


def _exec_probes(engine: Engine, file: str) -> Object:
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


def _every(seconds: int, *, failures: int) -> Object:
    return {"periodSeconds": seconds, "timeoutSeconds": 5, "failureThreshold": failures}
