"""Connections of an engine's pods: the names by which they find each other, and who may connect.

Owns the headless Service and the NetworkPolicies. Only gateways can be reached from outside an
engine; within it each role reaches those that it sends to. Keys between processes hold beside that
(docs/hosts.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from deploy.kubernetes.objects import COMPONENT, INSTANCE, Object, labels, named, own, selector
from deploy.kubernetes.specs import spec
from deploy.services.engine import CONTROL_PORT, DRAFT_PORT, Engine

ROWS: Final = (
    ("attention", "stage"),
    ("stage", "stage"),
    ("attention", "expert"),
    ("stage", "expert"),
)
"""Who sends rows to whom, where they travel over the network."""


class PodConnection(NamedTuple):
    """Which pods connect to which, by component; `port` None: any, as the kernel gives it."""

    senders: Sequence[str]
    receiver: str
    port: int | None


def hosts_service(engine: Engine) -> Object:
    """Return the names of the pods."""
    hosts = spec("hosts", engine, control_port=CONTROL_PORT)
    return named("Service", engine.name, labels(engine, "hosts"), hosts)


def network_policies(engine: Engine) -> list[Object]:
    """Return a policy per component; what none allows is refused."""
    if engine.is_whole:
        return [_policy(engine, "engine", ingress=[_FROM_ANYWHERE], egress=[])]
    nodes = list(_nodes(engine))
    connections = list(_connections(nodes))
    policies = []
    for component in ("scheduler", "gateway", *nodes):
        ingress = [
            _rule("from", engine, each.senders, each.port)
            for each in connections
            if each.receiver == component
        ]
        egress = [
            _rule("to", engine, [each.receiver], each.port)
            for each in connections
            if component in each.senders
        ]
        if component == "gateway":
            ingress = [_FROM_ANYWHERE]
        policies.append(_policy(engine, component, ingress=ingress, egress=egress))
    return policies


def _nodes(engine: Engine) -> Iterator[str]:
    """Yield the kinds of pods that have nodes."""
    roles = {group.role for group in engine.groups}
    if engine.shares_memory:
        yield "nodes"
        roles &= {"draft"}
    yield from (role for role in ("attention", "stage", "expert", "draft") if role in roles)


def _connections(nodes: Sequence[str]) -> Iterator[PodConnection]:
    """Yield the connections of an engine whose pods have such nodes."""
    yield PodConnection(["gateway", *nodes], "scheduler", CONTROL_PORT)
    for sender, receiver in ROWS:
        if sender in nodes and receiver in nodes:
            yield PodConnection([sender], receiver, None)
    if "draft" in nodes:
        yield PodConnection(["nodes" if "nodes" in nodes else "attention"], "draft", DRAFT_PORT)


def _policy(
    engine: Engine, component: str, *, ingress: Sequence[Object], egress: Sequence[Object]
) -> Object:
    policy = {
        "podSelector": {"matchLabels": selector(engine, component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": list(ingress),
        "egress": [*egress, _TO_DNS],
    }
    return own(engine, "NetworkPolicy", component, component, policy)


def _rule(direction: str, engine: Engine, components: Sequence[str], port: int | None) -> Object:
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


_FROM_ANYWHERE: Final = {"ports": [{"protocol": "TCP", "port": "http"}]}
_TO_DNS: Final = {
    "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
}
