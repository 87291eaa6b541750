"""The objects that all revisions of an engine share: models, monitor, routes to the gateways.

Deleting a revision leaves them.
"""

from __future__ import annotations

from typing import Final

from deploy.kubernetes.objects import Object, common, named, shared
from deploy.kubernetes.pods import KIND, container, environment
from deploy.kubernetes.specs import spec
from deploy.services.engine import HTTP_PORT, Engine
from deploy.services.processes import CACHE, ENVIRONMENT, PATHS, USER, pull_arguments

METRICS_KEY: Final = "metrics-key"
"""The entry of the API keys' Secret with the key that the monitor shows."""


def models(engine: Engine) -> list[Object]:
    """Return the place of the models, and the jobs that bring them there."""
    name = f"{engine.asked.name}-models"
    claim = shared(engine, "PersistentVolumeClaim", spec("models", engine), name=name)
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
    template = {
        "metadata": {"labels": common(engine) | {KIND: "job"}},
        "spec": spec("job-pod", engine, user=USER) | {"containers": containers},
    }
    job = {"backoffLimit": 4, "template": template}
    return named("Job", f"{engine.name}-pull", common(engine), job)


def public_service(engine: Engine) -> Object:
    """Return the address that clients use."""
    return shared(engine, "Service", spec("service", engine, http_port=HTTP_PORT))


def pod_monitor(engine: Engine) -> Object:
    """Return how Prometheus finds and asks the gateways."""
    return shared(engine, "PodMonitor", spec("pod-monitor", engine, metrics_key=METRICS_KEY))


def inference_pool(engine: Engine) -> list[Object]:
    """Return the gateways as a pool of the Gateway API Inference Extension, and a route to it."""
    pool = spec("inference-pool", engine, http_port=HTTP_PORT)
    route = spec("http-route", engine)
    return [shared(engine, "InferencePool", pool), shared(engine, "HTTPRoute", route)]
