"""Rendered plans for the tests of manifests, and how Kubernetes would read them.

Knows the forms of objects that hold pods or select them; no plan's content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from app.cli.deploy import rendered
from deploy.kubernetes.objects import Object
from deploy.services.engine import DeployOptions, Engine
from tests.structs import changed, with_nodes
from topspin.plan.file import read_plan
from topspin.plan.retrieval import SpillSpec, policy_of
from topspin.plan.spec import DraftNode, EnginePlan
from topspin.plan.speculation import SELF_INT4, Speculation

# libyaml's takes a tenth of the time; PyYAML may be built without it.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PLANS = Path(__file__).parents[3] / "docs" / "plans"
IMAGE = "registry.example/topspin:1"


@cache
def plan_named(name: str) -> EnginePlan:
    """Return a plan of docs/plans, or a variant that no example has."""
    if name == "stages, tcp":
        plan = with_nodes(plan_named("stages"), num_threads=2)
        return changed(plan, {"links": (changed(plan.link, {"transport": "tcp"}),)})
    if name == "two cut in three":
        return _two_cut_in_three(plan_named("stages, tcp"))
    if name == "one process, 2 threads":
        return with_nodes(plan_named("one_process"), num_threads=2)
    if name == "drafts, gpus":
        return _drafts_on_gpus(plan_named("kubernetes"))
    return read_plan(str(PLANS / f"{name}.yaml"))


def _two_cut_in_three(plan: EnginePlan) -> EnginePlan:
    first, stage = plan.attention[0], plan.stages[0]
    owners = [changed(first, {"index": owner}) for owner in range(2)]
    stages = [
        changed(stage, {"index": 2 * owner + place, "of": owner, "layers": layers})
        for owner in range(2)
        for place, layers in enumerate([(9, 20), (20, 30)])
    ]
    return changed(plan, {"nodes": (*owners, *stages, *plan.experts)})


def _drafts_on_gpus(plan: EnginePlan) -> EnginePlan:
    plan = with_nodes(plan, device="cuda:3", kernels="triton", num_threads=None)
    draft = DraftNode(
        index=0, device="cpu", kernels="cpu", wait="block", num_threads=2, kv_cache_tokens=4096,
        address="tcp://localhost:7100",
    )  # fmt: skip
    drafts = Speculation(method="draft_model", model=SELF_INT4, num_speculative_tokens=4)
    return changed(plan, {"nodes": (*plan.nodes, draft), "speculation": drafts})


def spilling(plan: EnginePlan, directory: str) -> EnginePlan:
    """Return a plan whose attention nodes keep 1 GiB of keys each in a file in `directory`."""
    spill = SpillSpec(directory=directory, size_bytes=2**30)
    kept = changed(plan.kv_cache, {"spill": spill, "retrieval": policy_of(1024)})
    return changed(plan, {"kv_cache": kept})


APART = ("kubernetes", "unequal", "stages, tcp", "two cut in three")
WHOLE = ("planned/8xh200", "planned/h20_l40s")


@cache
def render(name: str, **asked: Any) -> tuple[Engine, Mapping[str, str]]:
    """Return the engine of a named plan, and the files of its manifests."""
    settings = DeployOptions(image=IMAGE, **asked)
    return rendered(plan_named(name), settings, None, form="kubernetes")


def objects_of(files: Mapping[str, str], folder: str = "") -> list[Object]:
    """Return the objects in files, but for kustomizations and plans."""
    return [
        each
        for path, text in files.items()
        if path.startswith(folder)
        if not path.endswith(("kustomization.yaml", "plan.yaml", ".json"))
        for each in yaml.load_all(text, LOADER)
    ]


def kustomization(files: Mapping[str, str], folder: str) -> Object:
    """Return a folder's kustomization."""
    found: Object = yaml.load(files[f"{folder}/kustomization.yaml"], LOADER)
    return found


def templates(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Yield each workload with the template of its pods."""
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield each, each["spec"]["template"]


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Say whether a label selector takes a pod with `labels`."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        rule["operator"] == "In" and labels.get(rule["key"]) in rule["values"]
        for rule in selector.get("matchExpressions", [])
    )
