"""Network policies allow the connections that an engine makes, and no others."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deploy.kubernetes.objects import Object
from deploy.services.engine import CONTROL_PORT, DRAFT_PORT, HTTP_PORT
from tests.deploy.kubernetes.renders import (
    APART,
    objects_of,
    plan_named,
    render,
    selects,
    templates,
)

Labels = Mapping[str, str]
ROWS_PORT = 41234
"""One that the kernel might give."""
PORTS = (CONTROL_PORT, HTTP_PORT, DRAFT_PORT, ROWS_PORT)


def allows(policies: list[Object], source: Labels, target: Labels, port: int) -> bool:
    """Say whether a connection passes, as the API defines it: both ends must allow it."""
    return _allows(policies, "Egress", "to", source, target, port) and _allows(
        policies, "Ingress", "from", target, source, port
    )


def _allows(
    policies: list[Object], way: str, peers: str, own: Labels, other: Labels, port: int
) -> bool:
    specs = [each["spec"] for each in policies if selects(each["spec"]["podSelector"], own)]
    specs = [each for each in specs if way in each["policyTypes"]]
    return not specs or any(
        _rule_allows(rule, peers, other, port) for each in specs for rule in each[way.lower()]
    )


def _rule_allows(rule: Object, peers: str, other: Labels, port: int) -> bool:
    named = {"http": HTTP_PORT}
    if "ports" in rule and not any(
        each["protocol"] == "TCP" and named.get(each["port"], each["port"]) == port
        for each in rule["ports"]
    ):
        return False
    return peers not in rule or any(selects(each["podSelector"], other) for each in rule[peers])


def connections(name: str) -> set[tuple[str, str, int]]:
    """Return who may connect to whom, by component, among some ports."""
    _, files = render(name)
    objects = objects_of(files, "base/")
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    pods = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: template["metadata"][
            "labels"
        ]
        for _, template in templates(objects)
    }
    pods["stranger"] = {"app.kubernetes.io/name": "other"}
    return {
        (source, target, port)
        for source in pods
        for target in pods
        for port in PORTS
        if target != "stranger" and allows(policies, pods[source], pods[target], port)
    }


ROWS = (("attention", "expert"), ("attention", "stage"), ("stage", "stage"), ("stage", "expert"))


@pytest.mark.parametrize("name", [*APART, "drafts, gpus"])
def test_only_the_connections_of_an_engine_pass(name: str) -> None:
    plan = plan_named(name)
    roles = {node.role for node in plan.nodes}
    joined = roles - {"draft"} if plan.link.transport == "shm" else set()
    pods = {"nodes" if role in joined else role for role in roles}
    # Who asks by HTTP is not restricted, but pods of the engine may not.
    expected = {("stranger", "gateway", HTTP_PORT)}
    expected |= {(each, "scheduler", CONTROL_PORT) for each in pods | {"gateway"}}
    # Nodes that take rows listen on any port.
    expected |= {(*pair, port) for pair in ROWS if pods.issuperset(pair) for port in PORTS}
    if "draft" in pods:
        expected.add(("nodes" if joined else "attention", "draft", DRAFT_PORT))
    assert connections(name) == expected


def test_revisions_cannot_reach_each_other() -> None:
    (_, files), (_, others) = render("kubernetes"), render("stages, tcp")
    both = [*objects_of(files, "base/"), *objects_of(others, "base/")]
    policies = [each for each in both if each["kind"] == "NetworkPolicy"]
    first, second = (
        [template["metadata"]["labels"] for _, template in templates(objects_of(each, "base/"))]
        for each in (files, others)
    )
    for source, target in ((first, second), (second, first)):
        for one in source:
            for other in target:
                assert not allows(policies, one, other, CONTROL_PORT)
                assert not allows(policies, one, other, ROWS_PORT)
