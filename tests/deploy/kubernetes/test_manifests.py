"""Manifests: valid, complete as kustomizations, and their selectors, sizes and rollouts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as validator

from app.cli.deploy import rendered
from app.cli.keys import make
from app.launch.role import index_of
from deploy.kubernetes.objects import Object
from deploy.placement.shapes import ModelShape
from deploy.services.engine import HTTP_PORT, RESTART_DEADLINE_S, DeployOptions
from deploy.services.processes import SHUTDOWN_TIMEOUT_S
from models.description.config import load_model_config
from tests.deploy.containers import parse
from tests.deploy.kubernetes.renders import (
    APART,
    IMAGE,
    WHOLE,
    kustomization,
    objects_of,
    plan_named,
    render,
    selects,
    spilling,
    templates,
)
from tests.pairwise import slow_rows
from tests.structs import changed
from topspin.plan.network import NetworkSpec

SCHEMAS = Path(__file__).parent / "schemas"
MODEL = Path(__file__).parents[1] / "placement" / "models" / "smollm2-moe"
VERSIONS = ("1.30", "1.37")
OVER_HOSTS = "planned/megascale_infer"
NAMES = (*APART, "drafts, gpus", OVER_HOSTS, *WHOLE)


@cache
def schemas() -> dict[tuple[str, str], Object]:
    """Return the schemas of objects that extend Kubernetes, by apiVersion and kind."""
    found = {}
    for file in SCHEMAS.glob("*.json"):
        crd = json.loads(file.read_text())
        if "kind" in crd:
            found[f"{crd['group']}/{crd['version']}", crd["kind"]] = crd["schema"]
    return found


@pytest.fixture(scope="module", autouse=True)
def _schemas_read_once() -> Iterator[None]:
    """Let the validator keep what it reads: megabytes of definitions anew for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validator, "schema_contents", cache(validator.schema_contents))
        yield


def check_object(found: Object, version: str) -> None:
    key = found["apiVersion"], found["kind"]
    if key in (known := schemas()):
        jsonschema.validate(found, known[key])
        return
    kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize(
    ("name", "version"),
    slow_rows(
        [*((name, VERSIONS[-1]) for name in NAMES), ("kubernetes", VERSIONS[0])],
        beside=[(name, VERSIONS[-1]) for name in ("drafts, gpus", "stages, tcp", OVER_HOSTS)],
    ),
)
def test_every_object_is_valid(name: str, version: str) -> None:
    _, files = render(name)
    objects = objects_of(files)
    kinds = {each["kind"] for each in objects}
    assert {"Service", "NetworkPolicy", "PodMonitor", "ScaledObject", "InferencePool"} <= kinds
    for each in objects:
        check_object(each, version)


def test_the_check_of_objects_refuses_bad_ones() -> None:
    """Otherwise the test above could not fail."""
    _, files = render("kubernetes")
    objects = {each["kind"]: each for each in objects_of(files)}
    objects["ScaledObject"]["spec"]["minReplicas"] = 1
    objects["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["arguments"] = []
    for kind in ("ScaledObject", "StatefulSet"):
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            check_object(objects[kind], VERSIONS[-1])


@pytest.mark.parametrize("name", NAMES)
def test_kustomizations_list_their_files_and_no_others(name: str) -> None:
    _, files = render(name)
    for folder in {path.rpartition("/")[0] for path in files}:
        listed = kustomization(files, folder)
        for each in listed.get("components", []):
            component = kustomization(files, os.path.normpath(f"{folder}/{each}"))
            assert component["kind"] == "Component"
        own = {path for path in files if path.rpartition("/")[0] == folder}
        named = {"kustomization.yaml", *listed.get("resources", [])}
        for each in listed.get("configMapGenerator", []):
            named |= set(each["files"])
        above = {each for each in named if each.startswith("../")}
        assert own == {f"{folder}/{each}" for each in named - above}
        for each in above:
            assert f"{os.path.normpath(f'{folder}/{each}')}/kustomization.yaml" in files


KUSTOMIZE = os.environ.get("TOPSPIN_KUSTOMIZE") or shutil.which("kustomize")


@pytest.mark.slow
@pytest.mark.skipif(KUSTOMIZE is None, reason="there is no kustomize here")
@pytest.mark.parametrize(
    "name",
    [
        "kubernetes",
        "unequal",
        WHOLE[0],
        "two cut in three",
    ],
)
def test_kustomize_builds_every_folder(name: str, tmp_path: Path) -> None:
    engine, files = render(name)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    make(tmp_path / "secrets" / "keys", engine.key_groups)
    for each in ("api-keys", "metrics-key"):
        (tmp_path / "secrets" / each).write_text("x")
    both = tmp_path / "both"
    both.mkdir()
    components = [f"../components/{each.name}" for each in (tmp_path / "components").iterdir()]
    own = {"resources": ["../base"], "components": components}
    (both / "kustomization.yaml").write_text(yaml.safe_dump(own))
    built = {}
    for file in sorted(tmp_path.rglob("kustomization.yaml")):
        if file.is_relative_to(tmp_path / "components"):
            continue  # without a base there is nothing to change
        command = [str(KUSTOMIZE), "build", str(file.parent)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        built[str(file.parent.relative_to(tmp_path))] = list(yaml.safe_load_all(text))
        for each in built[str(file.parent.relative_to(tmp_path))]:
            check_object(each, VERSIONS[-1])
    own = {(each["kind"], each["metadata"]["name"]) for each in objects_of(files, "base/")}
    base = {(each["kind"], each["metadata"]["name"]) for each in built["base"]}
    assert base == own | {("ConfigMap", f"{engine.name}-plan")}
    scaled = [each for each in built["overlays/autoscaling"] if each["kind"] == "ScaledObject"]
    targets = {tuple(each["spec"]["scaleTargetRef"].values()) for each in scaled}
    for each in built["overlays/autoscaling"]:
        if each["kind"] in ("Deployment", "StatefulSet"):
            is_scaled = (each["kind"], each["metadata"]["name"]) in targets
            assert ("replicas" in each["spec"]) != is_scaled
    if "overlays/leaderworkerset" in built:
        groups = [each["kind"] for each in built["overlays/leaderworkerset"]]
        assert "LeaderWorkerSet" in groups
        left = {
            each["metadata"]["name"].removeprefix(f"{engine.name}-")
            for each in built["overlays/leaderworkerset"]
            if each["kind"] == "StatefulSet"
        }
        assert left == {"scheduler", "expert"}
        names = {(each["kind"], each["metadata"]["name"]) for each in built["both"]}
        assert {("LeaderWorkerSet", f"{engine.name}-attention")} < names
        assert ("ScaledObject", f"{engine.name}-gateway") in names
    secrets = {each["metadata"]["name"] for each in built["secrets"]}
    assert secrets == {"topspin-api-keys", *(f"topspin-keys-{one}" for one in engine.key_groups)}


def test_groups_of_pods_are_an_attention_node_and_its_stages() -> None:
    """LeaderWorkerSet's names: NAME-GROUP for a leader, NAME-GROUP-WORKER for those that follow."""
    _, files = render("two cut in three")
    (found,) = objects_of(files, "components/leaderworkerset/")
    check_object(found, VERSIONS[-1])
    name, spec = found["metadata"]["name"], found["spec"]
    template = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], template["size"]) == (2, 3)
    nodes = {}
    for role in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}} | template[role]
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
        (container,) = template[role]["spec"]["containers"]
        nodes[role] = parse(container["args"])
    for group in range(2):
        leader = nodes["leaderTemplate"]
        assert (leader.role, index_of(leader.index, f"{name}-{group}")) == ("attention", group)
        for number in (1, 2):
            worker = nodes["workerTemplate"]
            index = index_of(worker.index, f"{name}-{group}-{number}")
            stage = plan_named("two cut in three").stages[index]
            assert (worker.role, stage.of) == ("stage", group)
            assert stage.layers == [(9, 20), (20, 30)][number - 1]


def test_names_and_addresses_are_texts_whatever_they_mean_in_yaml() -> None:
    address = "http://user:'a' #b@prometheus:9090"
    options = DeployOptions(image=IMAGE, name="no", prometheus=address)
    engine, files = rendered(plan_named("kubernetes"), options, None, form="kubernetes")
    objects = {each["kind"]: each for each in objects_of(files)}  # the last of a kind
    assert objects["Service"]["spec"]["selector"]["app.kubernetes.io/part-of"] == "no"
    assert objects["HTTPRoute"]["spec"]["parentRefs"] == [{"name": "no"}]
    (scaled,) = objects["ScaledObject"]["spec"]["triggers"][:1]
    assert scaled["metadata"]["serverAddress"] == address
    assert engine.name in scaled["metadata"]["query"]


def test_nodes_of_a_plan_over_hosts_choose_their_gpus() -> None:
    """A StatefulSet for each kind of hosts."""
    _, files = render(OVER_HOSTS)
    found = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: (
            owner["spec"]["replicas"],
            template["spec"].get("nodeSelector"),
        )
        for owner, template in templates(objects_of(files, "base"))
    }
    label = "nvidia.com/gpu.product"
    assert found == {
        "scheduler": (1, None),
        "gateway": (2, None),
        "attention": (6, {label: "NVIDIA-H20"}),
        "expert": (8, {label: "NVIDIA-L40S"}),
    }


def test_rows_by_rdma_need_a_device() -> None:
    plan = plan_named("kubernetes")
    link = changed(plan.link, {"transport": "nixl"})
    network = NetworkSpec(control="tcp://10.0.0.1:7000", trusted=True)
    plan = changed(plan, {"links": (link,), "network": network})
    options = DeployOptions(image=IMAGE, rdma_resource="rdma/ib")
    _, files = rendered(plan, options, None, form="kubernetes")
    for workload, template in templates(objects_of(files, "base/")):
        (container,) = template["spec"]["containers"]
        is_node = workload["kind"] == "StatefulSet" and "scheduler" not in container["name"]
        assert ("rdma/ib" in container["resources"].get("limits", {})) == is_node


def test_files_of_keys_have_room_on_the_host() -> None:
    for name, files_each in (("kubernetes", {"attention": 1}), ("unequal", {"nodes": 2})):
        plan = spilling(plan_named(name), "/tmp")
        _, files = rendered(plan, DeployOptions(image=IMAGE), None, form="kubernetes")
        for workload, template in templates(objects_of(files, "base/")):
            role = workload["metadata"]["labels"]["app.kubernetes.io/component"]
            limits = [
                each["emptyDir"]["sizeLimit"]
                for each in template["spec"]["volumes"]
                if each["name"] == "spill"
            ]
            asked = [
                each["resources"]["requests"].get("ephemeral-storage")
                for each in template["spec"]["containers"]
            ]
            num_files = files_each.get(role, 0)
            assert limits == ([f"{num_files * 1280}Mi"] if num_files else [])
            assert asked.count("1280Mi") == num_files


def test_stages_of_a_group_ask_for_the_most_that_one_of_them_needs() -> None:
    plan = plan_named("two cut in three")
    threads = {1: 2, 2: 8}
    nodes = tuple(
        changed(each, {"num_threads": threads[1 + each.index % 2]})
        if each.role == "stage"
        else each
        for each in plan.nodes
    )
    shape = ModelShape.from_config(load_model_config(MODEL, None), dtype=plan.model.dtype)
    engine, files = rendered(
        changed(plan, {"nodes": nodes}), DeployOptions(image=IMAGE), shape, form="kubernetes"
    )
    (found,) = objects_of(files, "components/leaderworkerset/")
    (worker,) = found["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    stages = engine.plan.stages
    memory = max(engine.memory_of(stage) or 0 for stage in stages)
    assert [stage.num_threads for stage in stages if engine.memory_of(stage) == memory] == [2, 2]
    assert worker["resources"]["requests"] == {"cpu": "8", "memory": f"{-(-memory // 2**20)}Mi"}


@pytest.mark.parametrize("name", NAMES)
def test_pods_end_in_time(name: str) -> None:
    """Gateways have left the Service before they end; pods of lost hosts are given up in time."""
    _, files = render(name)
    for workload, template in templates(objects_of(files, "base/")):
        pod = template["spec"]
        for each in pod["tolerations"]:
            assert each["effect"] == "NoExecute"
            assert each["tolerationSeconds"] < RESTART_DEADLINE_S / 2
        if workload["kind"] == "Deployment":
            (container,) = pod["containers"]
            drain_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
            assert pod["terminationGracePeriodSeconds"] > drain_s + SHUTDOWN_TIMEOUT_S
            assert container["ports"] == [{"name": "http", "containerPort": HTTP_PORT}]
            assert all(
                each["httpGet"]["port"] == "http"
                for key, each in container.items()
                if key.endswith("Probe")
            )


@pytest.mark.parametrize("name", NAMES)
def test_every_selector_takes_pods_of_the_engine(name: str) -> None:
    _, files = render(name)
    objects = objects_of(files)
    pods = [template["metadata"]["labels"] for _, template in templates(objects)]
    for each in objects:
        selector = each["spec"].get("podSelector") or each["spec"].get("selector")
        if selector is None:
            continue
        if each["kind"] == "Service":
            selector = {"matchLabels": selector}
        assert any(selects(selector, labels) for labels in pods), each["kind"]
        if each["kind"] in ("Deployment", "StatefulSet"):
            own = each["spec"]["template"]["metadata"]["labels"]
            assert [labels for labels in pods if selects(selector, labels)] == [own]


def test_revisions_share_what_clients_see_and_nothing_that_runs() -> None:
    def names(files: object, folder: str) -> set[tuple[str, str]]:
        objects = objects_of(files, folder)  # type: ignore[arg-type]
        return {(each["kind"], each["metadata"]["name"]) for each in objects}

    first, files = render("kubernetes")
    again, _ = render("kubernetes")
    second, others = render("unequal")
    assert first.revision == again.revision != second.revision
    assert not names(files, "base/") & names(others, "base/")
    for folder in ("service/", "monitoring/", "inference-gateway/"):
        assert names(files, folder) == names(others, folder)
    (service,) = objects_of(files, "service/")
    (pool, _route) = objects_of(files, "inference-gateway/")
    for both in (files, others):
        servers = [
            template["metadata"]["labels"]
            for _, template in templates(objects_of(both, "base/"))
            if selects({"matchLabels": service["spec"]["selector"]}, template["metadata"]["labels"])
        ]
        assert [each["app.kubernetes.io/component"] for each in servers] == ["gateway"]
        assert selects(pool["spec"]["selector"], servers[0])
