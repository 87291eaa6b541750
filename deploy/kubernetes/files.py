"""The folders of manifests, each a kustomization.

Owns which object is in which file, and the text. `base` is one revision of an engine and can be
deleted whole; what all revisions share is beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from deploy.kubernetes.leader_worker import leader_groups, leader_worker_set, replaced
from deploy.kubernetes.network import hosts_service, network_policies
from deploy.kubernetes.objects import Object
from deploy.kubernetes.scaling import disruption_budgets, scaled_objects
from deploy.kubernetes.shared import (
    METRICS_KEY,
    inference_pool,
    models,
    pod_monitor,
    public_service,
)
from deploy.kubernetes.workloads import optional_groups, workloads
from deploy.observability.files import dashboard, prometheus_rule
from deploy.services.engine import Engine
from deploy.yaml_text import yaml_text
from topspin.plan.file import print_plan
from topspin.processes.keys import PUBLIC, SECRET

Files = dict[str, str]
"""Texts by their path."""


def kubernetes_files(engine: Engine) -> Files:
    """Return all files of an engine's manifests."""
    return {
        **_base(engine),
        **_kustomization("service", {"service": [public_service(engine)]}),
        **_kustomization("models", {"models": models(engine)}),
        **_secrets(engine),
        **_monitoring(engine),
        **_kustomization("inference-gateway", {"inference-pool": inference_pool(engine)}),
        **_autoscaling(engine),
        **_leader_worker_sets(engine),
    }


def _base(engine: Engine) -> Files:
    files: dict[str, list[Object]] = dict(workloads(engine))
    if not engine.is_whole:
        files["hosts"] = [hosts_service(engine)]
    files["network-policies"] = network_policies(engine)
    files["disruption-budgets"] = disruption_budgets(engine)
    plan = {"name": f"{engine.name}-plan", "files": ["plan.yaml"], "options": {"immutable": True}}
    return {
        "base/plan.yaml": print_plan(engine.plan),
        **_kustomization("base", files, configMapGenerator=[plan], generatorOptions=_AS_NAMED),
    }


def _secrets(engine: Engine) -> Files:
    """Return the folder whose key files are made by `topspin keys`, and by hand."""
    groups = engine.key_groups
    publics = [f"{group}{PUBLIC}" for group in groups]
    secrets = [
        {
            "name": f"{engine.asked.name}-keys-{group}",
            "files": [f"keys/{group}/{name}" for name in (f"{group}{SECRET}", *publics)],
        }
        for group in groups
    ]
    api_keys = {"name": f"{engine.asked.name}-api-keys", "files": ["api-keys", METRICS_KEY]}
    return _kustomization(
        "secrets", {}, secretGenerator=[*secrets, api_keys], generatorOptions=_AS_NAMED
    )


def _monitoring(engine: Engine) -> Files:
    """Return what the Prometheus Operator reads, and Grafana's sidecar."""
    name = engine.asked.name
    files = {"pod-monitor": [pod_monitor(engine)], "alerts": [prometheus_rule(name)]}
    shown = {
        "name": f"{name}-dashboard",
        "files": ["dashboard.json"],
        "options": {"labels": {"grafana_dashboard": "1"}},
    }
    return {
        "monitoring/dashboard.json": dashboard(),
        **_kustomization(
            "monitoring", files, configMapGenerator=[shown], generatorOptions=_AS_NAMED
        ),
    }


def _autoscaling(engine: Engine) -> Files:
    """Return the overlay in which the numbers of pods are KEDA's, and not set again."""
    scaled = [("Deployment", "engine" if engine.is_whole else "gateway")]
    scaled += [("StatefulSet", group.name) for group in optional_groups(engine)]
    patches = [
        {
            "target": {"kind": kind, "name": f"{engine.name}-{name}"},
            "patch": yaml_text([{"op": "remove", "path": "/spec/replicas"}]),
        }
        for kind, name in scaled
    ]
    return _overlay("autoscaling", {"scaled-objects": scaled_objects(engine)}, patches)


def _leader_worker_sets(engine: Engine) -> Files:
    """Return the overlay in which attention nodes and their stages are groups; none: no stages."""
    groups = list(leader_groups(engine))
    if not groups:
        return {}
    patches = [
        {
            "target": {"kind": "StatefulSet", "name": name},
            "patch": yaml_text({**_NAMED, "metadata": {"name": name}, "$patch": "delete"}),
        }
        for group in groups
        for name in replaced(engine, group)
    ]
    sets = [leader_worker_set(engine, group) for group in groups]
    return _overlay("leaderworkerset", {"leader-worker-sets": sets}, patches)


def _overlay(name: str, files: Mapping[str, Sequence[Object]], patches: Sequence[Object]) -> Files:
    """Return a change of `base` as a component, so that several go together, and an overlay."""
    return {
        **_kustomization(f"components/{name}", files, kind="Component", patches=patches),
        **_kustomization(
            f"overlays/{name}", {}, above=["../../base"], components=[f"../../components/{name}"]
        ),
    }


_NAMED: Final = {"apiVersion": "apps/v1", "kind": "StatefulSet"}
# Pods name them; what changes has another revision, and keys are read again in place.
_AS_NAMED: Final = {"disableNameSuffixHash": True}


def _kustomization(
    folder: str,
    files: Mapping[str, Sequence[Object]],
    *,
    above: Sequence[str] = (),
    kind: str = "Kustomization",
    **more: Any,
) -> Files:
    """Return a folder with these files."""
    version = "v1alpha1" if kind == "Component" else "v1beta1"
    listed: Object = {"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind}
    if resources := [*above, *(f"{name}.yaml" for name in files)]:
        listed["resources"] = resources
    texts = {f"{folder}/kustomization.yaml": yaml_text(listed | more)}
    for name, objects in files.items():
        texts[f"{folder}/{name}.yaml"] = yaml_text(*objects)
    return texts
