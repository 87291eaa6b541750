"""Who finds whom, and who may speak to whom.

Owns Services and NetworkPolicies. Only gateways can be reached from outside an engine; within it
each role reaches those that it sends to. Keys between processes hold beside that (docs/hosts.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from deploy.kubernetes.pods import (
    COMPONENT,
    INSTANCE,
    KIND,
    PART_OF,
    Object,
    labels,
    metadata,
    selector,
)
from deploy.services.engine import CONTROL_PORT, DRAFT_PORT, HTTP_PORT, Engine

ANY_PORT: Final = None
"""Nodes listen for rows where the kernel gives them a port."""

RECEIVES_FROM: Final[dict[str, dict[str, int | None]]] = {
    "expert": {"attention": ANY_PORT, "stage": ANY_PORT},
    "stage": {"attention": ANY_PORT, "stage": ANY_PORT},
    "draft": {"attention": DRAFT_PORT},
}
"""Who sends rows, or asks for drafts, to whom."""

NODES: Final = ("attention", "stage", "expert", "draft")


def hosts_service(engine: Engine) -> Object:
    """Return the names of the pods; nodes must find each other before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": engine.name, "labels": labels(engine, "hosts")},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {INSTANCE: engine.name},
            "ports": [{"name": "control", "port": CONTROL_PORT}],
        },
    }


def public_service(engine: Engine) -> Object:
    """Return the address that clients use. It has the gateways of all revisions that are ready."""
    name = engine.asked.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "topspin", PART_OF: name}},
        "spec": {
            "selector": {PART_OF: name, KIND: "server"},
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http"}],
        },
    }


def network_policies(engine: Engine) -> list[Object]:
    """Return a policy per role; what none allows is refused."""
    if engine.is_whole:
        return [_policy(engine, "engine", ingress=[_from_anywhere()], egress=[])]
    roles = [role for role in NODES if any(group.role == role for group in engine.groups)]
    components = _components(engine, roles)
    callers = ["gateway", *components]
    policies = [
        _policy(
            engine, "scheduler", ingress=[_peers("from", engine, callers, CONTROL_PORT)], egress=[]
        ),
        _policy(engine, "gateway", ingress=[_from_anywhere()], egress=[_to_scheduler(engine)]),
    ]
    for component in components:
        senders = _senders(engine, component, components)
        receivers = {
            other: _senders(engine, other, components)[component]
            for other in components
            if component in _senders(engine, other, components)
        }
        policies.append(
            _policy(
                engine,
                component,
                ingress=[_peers("from", engine, [each], port) for each, port in senders.items()],
                egress=[
                    _to_scheduler(engine),
                    *(_peers("to", engine, [each], port) for each, port in receivers.items()),
                ],
            )
        )
    return policies


def _components(engine: Engine, roles: Sequence[str]) -> list[str]:
    """Return the kinds of pods that have nodes."""
    if not engine.shares_memory:
        return list(roles)
    return ["nodes", *(role for role in roles if role == "draft")]


def _senders(engine: Engine, component: str, components: Sequence[str]) -> dict[str, int | None]:
    """Return the pods that send to those of `component`, and the port (None: any)."""
    attention = "nodes" if engine.shares_memory else "attention"
    if component == "draft":
        return {attention: DRAFT_PORT}
    senders = {} if component == "nodes" else RECEIVES_FROM.get(component, {})
    return {role: port for role, port in senders.items() if role in components}


def _policy(
    engine: Engine, component: str, *, ingress: Sequence[Object], egress: Sequence[Object]
) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(engine, component, component),
        "spec": {
            "podSelector": {"matchLabels": selector(engine, component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": list(ingress),
            "egress": [*egress, _TO_DNS],
        },
    }


def _peers(direction: str, engine: Engine, components: Sequence[str], port: int | None) -> Object:
    chosen = {
        "matchLabels": {INSTANCE: engine.name},
        "matchExpressions": [
            {"key": COMPONENT, "operator": "In", "values": list(components)},
        ],
    }
    rule: Object = {direction: [{"podSelector": chosen}]}
    if port is not None:
        rule["ports"] = [{"protocol": "TCP", "port": port}]
    return rule


def _to_scheduler(engine: Engine) -> Object:
    return _peers("to", engine, ["scheduler"], CONTROL_PORT)


def _from_anywhere() -> Object:
    return {"ports": [{"protocol": "TCP", "port": "http"}]}


_TO_DNS: Final = {
    "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
}
