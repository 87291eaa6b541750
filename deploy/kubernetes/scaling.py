"""The number of pods: how many may be taken away at once, and what is added by load.

Owns PodDisruptionBudgets and KEDA's ScaledObjects. Gateways follow the streams that are open.
Nodes that are optional, and engines that are whole, follow the queue and the use of the KV caches.
"""

from __future__ import annotations

from typing import Final

from deploy.kubernetes.objects import Object, own
from deploy.kubernetes.specs import spec
from deploy.kubernetes.workloads import optional_groups
from deploy.services.engine import Engine

MOST: Final = 8
"""Times as many gateways, or whole engines, as start."""


def disruption_budgets(engine: Engine) -> list[Object]:
    """Return what evictions may take: one gateway, and one node, at a time.

    The scheduler has none: its one pod could never be moved.
    """
    kinds = ["server"] if engine.is_whole else ["server", "node"]
    return [
        own(
            engine,
            "PodDisruptionBudget",
            f"{kind}s",
            kind,
            spec("disruption-budget", engine, kind=kind),
        )
        for kind in kinds
    ]


def scaled_objects(engine: Engine) -> list[Object]:
    """Return what KEDA scales, and by which metrics."""

    def scaled(by: str, kind: str, target: str, least: int, most: int, of: str = "") -> Object:
        values = {"kind": kind, "target": target, "least": least, "most": most, "of": of}
        filled = spec(f"scaled-by-{by}", engine, prometheus=engine.asked.prometheus, **values)
        return own(engine, "ScaledObject", target, target, filled)

    least = engine.replicas
    if engine.is_whole:
        return [scaled("load", "Deployment", "engine", least, MOST * least, "sum")]
    return [
        scaled("streams", "Deployment", "gateway", least, MOST * least),
        *(
            scaled("load", "StatefulSet", group.name, 0, len(group.nodes), "max")
            for group in optional_groups(engine)
        ),
    ]
