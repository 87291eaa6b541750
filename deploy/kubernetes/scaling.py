"""The number of pods: how many may be taken away at once, and what is added by load.

Owns PodDisruptionBudgets and KEDA's ScaledObjects. Gateways follow the streams that are open.
Nodes that are optional, and engines that are whole, follow the queue and the use of the KV caches.
"""

from __future__ import annotations

from typing import Final

from deploy.kubernetes.objects import INSTANCE, Object, own
from deploy.kubernetes.pods import KIND
from deploy.kubernetes.workloads import optional_groups
from deploy.services.engine import Engine

STREAMS_PER_GATEWAY: Final = 256
QUEUED_PER_REPLICA: Final = 5
KV_USE: Final = 0.8
MOST: Final = 8
"""Times as many gateways, or whole engines, as start."""
QUIET_S: Final = 600
"""After so long of less load there are fewer pods."""
LABEL: Final = "app_kubernetes_io_instance"
"""The pods' label as the PodMonitor gives it to their metrics."""


def disruption_budgets(engine: Engine) -> list[Object]:
    """Return what evictions may take: one gateway, and one node, at a time.

    The scheduler has none: its one pod could never be moved.
    """
    kinds = ["server"] if engine.is_whole else ["server", "node"]
    return [_budget(engine, kind) for kind in kinds]


def _budget(engine: Engine, kind: str) -> Object:
    spec = {
        "maxUnavailable": 1,
        # While one node is away the others are not ready; a host can be emptied even so.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {INSTANCE: engine.name, KIND: kind}},
    }
    return own(engine, "PodDisruptionBudget", f"{kind}s", kind, spec)


def scaled_objects(engine: Engine) -> list[Object]:
    """Return what KEDA scales, and by which metrics."""
    least = engine.replicas
    if engine.is_whole:
        by_load = _by_load(engine, of="sum")
        return [_scaled(engine, "Deployment", "engine", least, MOST * least, by_load)]
    streams = (
        f"max({_metric(engine, 'num_requests_running')}) "
        f"+ max({_metric(engine, 'num_requests_waiting')})"
    )
    by_streams = [_trigger(engine, streams, STREAMS_PER_GATEWAY, "AverageValue")]
    return [
        _scaled(engine, "Deployment", "gateway", least, MOST * least, by_streams),
        *(
            _scaled(
                engine, "StatefulSet", group.name, 0, len(group.nodes), _by_load(engine, of="max")
            )
            for group in optional_groups(engine)
        ),
    ]


def _by_load(engine: Engine, *, of: str) -> list[Object]:
    """Return triggers by the queue and the KV caches.

    Each gateway of an engine reports the engine's: their maximum is its figure. Whole engines
    report their own: their sum counts.
    """
    waiting = f"{of}({_metric(engine, 'num_requests_waiting')})"
    use = f"max({_metric(engine, 'kv_cache_usage_perc')})"
    return [
        _trigger(engine, waiting, QUEUED_PER_REPLICA, "AverageValue"),
        _trigger(engine, use, KV_USE, "Value"),
    ]


def _metric(engine: Engine, name: str) -> str:
    return f'topspin_{name}{{{LABEL}="{engine.name}"}}'


def _trigger(engine: Engine, query: str, threshold: float, metric_type: str) -> Object:
    return {
        "type": "prometheus",
        "metricType": metric_type,
        "metadata": {
            "serverAddress": engine.asked.prometheus,
            "query": query,
            "threshold": str(threshold),
            # From none to one too: any use at all would do without it.
            "activationThreshold": str(threshold),
        },
    }


def _scaled(
    engine: Engine, kind: str, name: str, least: int, most: int, triggers: list[Object]
) -> Object:
    down = {"scaleDown": {"stabilizationWindowSeconds": QUIET_S}}
    spec = {
        "scaleTargetRef": {"kind": kind, "name": f"{engine.name}-{name}"},
        "minReplicaCount": least,
        "maxReplicaCount": most,
        # A node that comes or goes costs a moment of all streams; weights are read anew.
        "cooldownPeriod": QUIET_S,  # down to none; down to fewer:
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": down}},
        "triggers": triggers,
    }
    return own(engine, "ScaledObject", name, name, spec)
