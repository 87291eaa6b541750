"""The objects that all revisions of an engine share: models, monitor, routes to the gateways.

Deleting a revision leaves them.
"""

from __future__ import annotations

from typing import Final

from deploy.kubernetes.objects import INSTANCE, PART_OF, Object, common, named, shared
from deploy.kubernetes.pods import KIND, USER_CONTEXT, container, environment
from deploy.services.engine import HTTP_PORT, Engine
from deploy.services.processes import CACHE, ENVIRONMENT, PATHS, pull_arguments

MODELS_SIZE: Final = "200Gi"
METRICS_KEY: Final = "metrics-key"
"""The entry of the API keys' Secret with the key that the monitor shows."""


def models(engine: Engine) -> list[Object]:
    """Return the place of the models, and the jobs that bring them there."""
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": MODELS_SIZE}},
    }
    claim = shared(engine, "PersistentVolumeClaim", spec, name=f"{engine.asked.name}-models")
    return [claim, *([_pull(engine)] if engine.pulled else [])]


def _pull(engine: Engine) -> Object:
    """Return the job that brings the models; it is done at once where they are there already."""
    token = {"name": f"{engine.asked.name}-hub", "key": "token", "optional": True}
    containers = [
        container(
            engine,
            f"pull-{number}",
            pull_arguments(name),
            variables=[
                *environment(ENVIRONMENT),
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}},
            ],
            asked={"requests": {"cpu": "1", "memory": "4Gi"}},
            mounts=[
                {"name": "models", "mountPath": PATHS["models"]},
                {"name": "scratch", "mountPath": CACHE, "subPath": "cache"},
                {"name": "scratch", "mountPath": "/tmp", "subPath": "tmp"},
            ],
        )
        for number, name in enumerate(engine.pulled)
    ]
    claim = {"claimName": f"{engine.asked.name}-models"}
    spec = {
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
    }
    return named("Job", f"{engine.name}-pull", common(engine), spec)


def servers(engine: Engine) -> dict[str, str]:
    """Return the labels that select the pods that answer requests, of all revisions."""
    return {PART_OF: engine.asked.name, KIND: "server"}


def public_service(engine: Engine) -> Object:
    """Return the address that clients use. It has the gateways of all revisions that are ready."""
    ports = [{"name": "http", "port": HTTP_PORT, "targetPort": "http"}]
    return shared(engine, "Service", {"selector": servers(engine), "ports": ports})


def pod_monitor(engine: Engine) -> Object:
    """Return how Prometheus finds and asks the gateways; /metrics wants an API key."""
    key = {"name": f"{engine.asked.name}-api-keys", "key": METRICS_KEY}
    spec = {
        "selector": {"matchLabels": servers(engine)},
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
    }
    return shared(engine, "PodMonitor", spec)


def inference_pool(engine: Engine) -> list[Object]:
    """Return the gateways as a pool of the Gateway API Inference Extension, and a route to it.

    The cluster has the Gateway, named as the engine, and the picker, NAME-endpoint-picker.
    """
    name = engine.asked.name
    pool = {
        "selector": {"matchLabels": servers(engine)},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "name": f"{name}-endpoint-picker",
            "port": {"number": 9002},
            # A picker that is away must not take the engine with it.
            "failureMode": "FailOpen",
        },
    }
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}
    route = {
        "parentRefs": [{"name": name}],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [backend],
                "timeouts": {"request": "0s"},
            }
        ],
    }
    return [shared(engine, "InferencePool", pool), shared(engine, "HTTPRoute", route)]
