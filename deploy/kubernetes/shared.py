"""What all revisions of an engine have together: the models, the monitor, routes to the gateways.

Owns the objects that outlive a revision. Deleting a revision leaves them.
"""

from __future__ import annotations

from typing import Final

from deploy.kubernetes.pods import (
    INSTANCE,
    KIND,
    PART_OF,
    RESTRICTED,
    USER_CONTEXT,
    Object,
    environment,
    models_mount,
)
from deploy.services.arguments import CACHE, ENVIRONMENT, INIT, pull_arguments
from deploy.services.engine import HTTP_PORT, Engine

MODELS_SIZE: Final = "200Gi"
METRICS_KEY: Final = "metrics-key"
"""The entry of the API keys' Secret with the key that the monitor shows."""


def common(engine: Engine) -> dict[str, str]:
    """Return the labels of what is no revision's."""
    return {"app.kubernetes.io/name": "topspin", PART_OF: engine.asked.name}


def models(engine: Engine) -> list[Object]:
    """Return the place of the models, and the jobs that bring them there."""
    name = f"{engine.asked.name}-models"
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": common(engine)},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": MODELS_SIZE}},
        },
    }
    return [claim, *([_pull(engine)] if engine.pulled else [])]


def _pull(engine: Engine) -> Object:
    """Return the job that brings the models; it is done at once where they are there already."""
    token = {"name": f"{engine.asked.name}-hub", "key": "token", "optional": True}
    containers = [
        {
            "name": f"pull-{number}",
            "image": engine.asked.image,
            "command": [*INIT, "topspin"],
            "args": list(pull_arguments(name)),
            "env": [
                *environment(ENVIRONMENT),
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}},
            ],
            "resources": {"requests": {"cpu": "1", "memory": "4Gi"}},
            "securityContext": RESTRICTED,
            "volumeMounts": [
                models_mount(read_only=False),
                {"name": "scratch", "mountPath": CACHE, "subPath": "cache"},
                {"name": "scratch", "mountPath": "/tmp", "subPath": "tmp"},
            ],
        }
        for number, name in enumerate(engine.pulled)
    ]
    claim = {"claimName": f"{engine.asked.name}-models"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{engine.name}-pull", "labels": common(engine)},
        "spec": {
            "backoffLimit": 4,
            "template": {
                "metadata": {"labels": common(engine) | {KIND: "job"}},
                "spec": {
                    "restartPolicy": "OnFailure",
                    "automountServiceAccountToken": False,
                    "securityContext": USER_CONTEXT,
                    "containers": containers,
                    "volumes": [
                        {"name": "models", "persistentVolumeClaim": claim},
                        {"name": "scratch", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def pod_monitor(engine: Engine) -> Object:
    """Return how Prometheus finds and asks the gateways; /metrics wants an API key."""
    name = engine.asked.name
    key = {"name": f"{name}-api-keys", "key": METRICS_KEY}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name, "labels": common(engine)},
        "spec": {
            "selector": {"matchLabels": {PART_OF: name, KIND: "server"}},
            # A job per revision: alerts and dashboard tell engines apart by it.
            "jobLabel": INSTANCE,
            "podTargetLabels": [INSTANCE],
            "podMetricsEndpoints": [
                {
                    "port": "http",
                    "path": "/metrics",
                    "authorization": {"type": "Bearer", "credentials": key},
                }
            ],
        },
    }


def inference_pool(engine: Engine) -> list[Object]:
    """Return the gateways as a pool of the Gateway API Inference Extension, and a route to it.

    The cluster has the Gateway, named as the engine, and the picker, NAME-endpoint-picker.
    """
    name = engine.asked.name
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "labels": common(engine)},
        "spec": {
            "selector": {"matchLabels": {PART_OF: name, KIND: "server"}},
            "targetPorts": [{"number": HTTP_PORT}],
            "endpointPickerRef": {
                "name": f"{name}-endpoint-picker",
                "port": {"number": 9002},
                # A picker that is away must not take the engine with it.
                "failureMode": "FailOpen",
            },
        },
    }
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name, "labels": common(engine)},
        "spec": {
            "parentRefs": [{"name": name}],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                    "backendRefs": [backend],
                    "timeouts": {"request": "0s"},
                }
            ],
        },
    }
    return [pool, route]
