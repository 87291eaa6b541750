"""Kubernetes' objects: their versions, names and labels.

Owns how an object says what it is. Knows no kind's content.
"""

from __future__ import annotations

from typing import Any, Final

from deploy.services.engine import Engine, Location
from topspin import __version__

Object = dict[str, Any]

VERSIONS: Final = {
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "Job": "batch/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
}
"""`apiVersion` by kind."""

NAME: Final = "app.kubernetes.io/name"
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"
PART_OF: Final = "app.kubernetes.io/part-of"


def pod_host(engine: str, location: Location) -> str:
    """Return how a pod is reached: by its own name, below the headless Service's."""
    return f"{engine}-{location.pods}-{location.number}.{engine}"


def labels(engine: Engine, component: str) -> dict[str, str]:
    """Return the labels of an object of this revision; `component` is a role."""
    return {
        NAME: "topspin",
        "app.kubernetes.io/version": __version__,
        PART_OF: engine.asked.name,
        INSTANCE: engine.name,
        COMPONENT: component,
    }


def common(engine: Engine) -> dict[str, str]:
    """Return the labels of an object that all revisions share."""
    return {NAME: "topspin", PART_OF: engine.asked.name}


def selector(engine: Engine, component: str) -> dict[str, str]:
    """Return the labels that select the pods of a role, of this revision only."""
    return {INSTANCE: engine.name, COMPONENT: component}


def own(engine: Engine, kind: str, name: str, component: str, spec: Object) -> Object:
    """Return an object of this revision, called by it and `name`."""
    return named(kind, f"{engine.name}-{name}", labels(engine, component), spec)


def shared(engine: Engine, kind: str, spec: Object, *, name: str | None = None) -> Object:
    """Return an object that all revisions share, called by the engine or `name`."""
    return named(kind, name or engine.asked.name, common(engine), spec)


def named(kind: str, name: str, its_labels: dict[str, str], spec: Object) -> Object:
    """Return an object."""
    return {
        "apiVersion": VERSIONS[kind],
        "kind": kind,
        "metadata": {"name": name, "labels": its_labels},
        "spec": spec,
    }
