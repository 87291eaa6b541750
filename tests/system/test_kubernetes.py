"""Rendered manifests, run: pods as network namespaces, with the manifests' commands and probes."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from app.cli.main import main
from app.cli.serve import plan_of
from tests.gguf_files import write_gguf
from tests.structs import changed
from tests.system.conftest import Tiny
from tests.system.rig.pods import Cluster, Object, Pod, objects_in, secret_folder
from tests.system.rig.streams import NUM_STREAMS, Load
from topspin.plan.file import print_plan
from topspin.plan.spec import DraftNode, EnginePlan, StageNode
from topspin.plan.speculation import Speculation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

USER = 10001
API_KEY = "a-key-of-the-tests-1234"
HEADERS = {"Authorization": f"Bearer {API_KEY}"}
MODEL = "/topspin/models/tiny"
NUM_LAYERS = 2
STAGES = r'topspin_nodes\{.*role="stage".*\} 1\.0'
DRAFTS = r"topspin_spec_decode_num_accepted_tokens_total\{.*\} [1-9]"


@pytest.fixture(scope="module", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile them, for pods have them from their image; one worker does it for all."""
    with (tmp_path_factory.getbasetemp().parent / "kernels").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        command = [sys.executable, "-P", "-m", "deploy.images.compile_kernels"]
        subprocess.run(command, check=True)


def plan_for(tiny: Tiny, *, transport: str, counts: tuple[int, int]) -> EnginePlan:
    """Return a plan as `topspin serve --print-plan` gives one, of the model in the pods."""
    plan = plan_of(
        tiny.path,
        kv_cache_bytes=8 * 2**20,
        layout="shared",
        num_threads=1,
        attention_nodes=counts[0],
        expert_nodes=counts[1],
        transport=transport,
    )
    return changed(plan, {"model": changed(plan.model, {"path": MODEL})})


class Engines:
    """Revisions of an engine on one cluster, by the commands of docs/kubernetes.md."""

    def __init__(self, tiny: Tiny, directory: Path) -> None:
        self._tiny, self._directory = tiny, directory
        self.volumes: dict[str, Path] = {}

    def render(
        self, plan: EnginePlan, *, gateways: int, component: str | None = None
    ) -> list[Object]:
        """Return the objects of a plan, changed by a component; makes the keys once."""
        file = self._directory / "plan.yaml"
        file.write_text(print_plan(plan))
        out = self._directory / "out"
        render = ("deploy", "render", "--plan", str(file), "-o", str(out), "--image", "topspin:1")
        assert main([*render, "--gateways", str(gateways)]) == 0
        if not self.volumes:
            self._make_secrets(out)
        base = yaml.safe_load((out / "base" / "kustomization.yaml").read_text())
        (config,) = base["configMapGenerator"]
        folder = self._directory / config["name"]
        folder.mkdir()
        (folder / "plan.yaml").write_text((out / "base" / "plan.yaml").read_text())
        self.volumes[config["name"]] = folder
        objects = objects_in(out / "base")
        return objects if component is None else changed_by(out / "components" / component, objects)

    def _make_secrets(self, out: Path) -> None:
        secrets = out / "secrets"
        keys = ("keys", str(secrets / "keys"), "--plan", str(out / "base" / "plan.yaml"))
        assert main(keys) == 0
        (secrets / "api-keys").write_text(f"tests: {API_KEY}\n")
        (secrets / "metrics-key").write_text(API_KEY)
        listed = yaml.safe_load((secrets / "kustomization.yaml").read_text())
        for each in listed["secretGenerator"]:
            files = [secrets / name for name in each["files"]]
            folder = self._directory / each["name"]
            self.volumes[each["name"]] = secret_folder(folder, files, owner=USER)
        models = self._directory / "models"
        shutil.copytree(self._tiny.path, models / "tiny")
        for each in (models / "tiny", *(models / "tiny").iterdir()):
            os.chown(each, USER, USER)
        self.volumes["topspin-models"] = models


def changed_by(component: Path, objects: list[Object]) -> list[Object]:
    """Return objects without those that a component's patches delete, and with its own."""
    patches = yaml.safe_load((component / "kustomization.yaml").read_text())["patches"]
    deleted = {
        (each["target"]["kind"], each["target"]["name"])
        for each in patches
        if yaml.safe_load(each["patch"])["$patch"] == "delete"
    }
    left = [each for each in objects if (each["kind"], each["metadata"]["name"]) not in deleted]
    assert len(left) == len(objects) - len(deleted)
    return [*left, *objects_in(component)]


@pytest.mark.parametrize("path", [MODEL, f"{MODEL}.gguf"], ids=["checkpoint", "GGUF file"])
def test_the_pods_of_a_plan_serve(tiny: Tiny, tmp_path: Path, path: str) -> None:
    engines = Engines(tiny, tmp_path)
    plan = plan_for(tiny, transport="tcp", counts=(1, 1))
    plan = changed(plan, {"model": changed(plan.model, {"path": path, "dtype": "float32"})})
    objects = engines.render(plan, gateways=1)
    write_gguf(tiny.path, engines.volumes["topspin-models"] / "tiny.gguf")
    with Cluster(tmp_path, engines.volumes) as cluster:
        pods = cluster.apply(objects)
        for pod in pods:
            pod.wait_until_ready()
        (gateway,) = (pod for pod in pods if "gateway" in pod.name)
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 401
        with Load([gateway.url], tiny, headers=HEADERS) as load:
            load.wait_for(2 * NUM_STREAMS)
        assert load.wrong == []


def with_a_stage(plan: EnginePlan) -> EnginePlan:
    """Return a plan whose attention node computes the first layer only."""
    first = changed(plan.attention[0], {"layers": (0, 1)})
    stage = StageNode(
        **{name: getattr(first, name) for name in ("index", "device", "kernels", "wait")},
        num_threads=1,
        layers=(1, NUM_LAYERS),
        of=0,
        kv_cache_bytes=8 * 2**20,
    )
    # Stages refuse the guesses that plans made of flags have.
    return changed(plan, {"nodes": (first, stage, *plan.experts), "speculation": None})


def with_a_draft_node(plan: EnginePlan) -> EnginePlan:
    """Return a plan in which a node with a name of its own drafts, by the same model."""
    draft = DraftNode(
        index=0, device="cpu", kernels="cpu", wait="block", num_threads=1, kv_cache_tokens=2048
    )
    speculation = Speculation(method="draft_model", model=MODEL, num_speculative_tokens=3)
    return changed(plan, {"nodes": (*plan.nodes, draft), "speculation": speculation})


@pytest.mark.parametrize(
    ("change", "component", "shown", "ending"),
    [
        (with_a_stage, None, STAGES, "stage-0"),
        (with_a_stage, "leaderworkerset", STAGES, "attention-0-1"),
        (with_a_draft_node, None, DRAFTS, "draft-0"),
    ],
)
def test_pods_of_other_roles_serve(
    tiny: Tiny,
    tmp_path: Path,
    change: Callable[[EnginePlan], EnginePlan],
    component: str | None,
    shown: str,
    ending: str,
) -> None:
    """And end by SIGTERM within their grace, although these roles leave it to the kernel."""
    engines = Engines(tiny, tmp_path)
    plan = change(plan_for(tiny, transport="tcp", counts=(1, 1)))
    with Cluster(tmp_path, engines.volumes) as cluster:
        pods = cluster.apply(engines.render(plan, gateways=1, component=component))
        for pod in pods:
            pod.wait_until_ready()
        (gateway,) = (pod for pod in pods if "gateway" in pod.name)
        with Load([gateway.url], tiny, headers=HEADERS) as load:
            load.wait_for(2 * NUM_STREAMS)
        assert load.wrong == []
        assert re.search(shown, httpx.get(f"{gateway.url}/metrics", headers=HEADERS).text)
        (pod,) = (pod for pod in pods if pod.name.endswith(ending))
        assert set(pod.delete().values()) == {128 + signal.SIGTERM}


def test_pods_of_optional_nodes_come_and_go_under_load(tiny: Tiny, tmp_path: Path) -> None:
    """As KEDA scales their StatefulSet, from none to one and back."""
    engines = Engines(tiny, tmp_path)
    plan = plan_for(tiny, transport="tcp", counts=(2, 1))
    late = changed(plan.attention[1], {"optional": True})
    plan = changed(plan, {"nodes": (plan.attention[0], late, *plan.experts)})
    plan = changed(plan, {"failover": changed(plan.failover, {"restart": True})})
    objects = engines.render(plan, gateways=1)
    optional = next(each for each in objects if each["metadata"]["name"].endswith("attention-1"))
    objects.remove(optional)
    with Cluster(tmp_path, engines.volumes) as cluster:
        pods = cluster.apply(objects)
        for pod in pods:
            pod.wait_until_ready()
        (gateway,) = (pod for pod in pods if "gateway" in pod.name)

        def nodes() -> str:
            metrics = httpx.get(f"{gateway.url}/metrics", headers=HEADERS).text
            found = re.search(r'topspin_nodes\{[^}]*optional="true"[^}]*\} (\d)', metrics)
            assert found is not None
            return found[1]

        with Load([gateway.url], tiny, headers=HEADERS) as load:
            load.wait_for(NUM_STREAMS)
            assert nodes() == "0"
            added = cluster.start(optional, 0)
            added.wait_until_ready()
            load.wait_for(NUM_STREAMS)
            assert nodes() == "1"
            added.terminate()
            load.wait_for(2 * NUM_STREAMS)
            assert nodes() == "0"
        assert load.wrong == []


def replace_gateway(cluster: Cluster, workload: Object, old: Pod, urls: list[str]) -> None:
    """Replace a gateway as its Deployment says: a new one is ready before the old one ends."""
    new = cluster.start(workload, 0)
    new.wait_until_ready()
    urls.append(new.url)
    urls.remove(old.url)
    old.terminate()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_rolling_restart_fails_no_request(tiny: Tiny, tmp_path: Path, transport: str) -> None:
    engines = Engines(tiny, tmp_path)
    objects = engines.render(plan_for(tiny, transport=transport, counts=(2, 2)), gateways=2)
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    with Cluster(tmp_path, engines.volumes) as cluster:
        pods = cluster.apply(objects)
        for pod in pods:
            pod.wait_until_ready()
        gateways = [pod for pod in pods if "gateway" in pod.name]
        nodes = [pod for pod in pods if pod not in gateways and "scheduler" not in pod.name]
        assert len(nodes) == (4 if transport == "tcp" else 1)
        (scheduler,) = (pod for pod in pods if "scheduler" in pod.name)
        urls = [pod.url for pod in gateways]
        with Load(urls, tiny, headers=HEADERS) as load:
            load.wait_for(NUM_STREAMS)
            scheduler.replace()
            scheduler.wait_until_ready()
            load.wait_for(NUM_STREAMS)
            assert {each.num_starts for pod in nodes for each in pod.containers.values()} == {1}
            for pod in nodes:
                load.wait_for(NUM_STREAMS)
                pod.replace()
                pod.wait_until_ready()
            for pod in gateways:
                load.wait_for(NUM_STREAMS)
                replace_gateway(cluster, deployment, pod, urls)
            load.wait_for(NUM_STREAMS)
        assert load.wrong == []


def test_an_upgrade_is_a_second_engine_and_fails_no_request(tiny: Tiny, tmp_path: Path) -> None:
    engines = Engines(tiny, tmp_path)
    plan = plan_for(tiny, transport="tcp", counts=(1, 1))
    old_objects = engines.render(plan, gateways=1)
    new_objects = engines.render(changed(plan, {"scheduling.max_num_queued_reqs": 99}), gateways=1)
    with Cluster(tmp_path, engines.volumes) as cluster:
        old = cluster.apply(old_objects)
        for pod in old:
            pod.wait_until_ready()
        urls = [pod.url for pod in old if "gateway" in pod.name]
        with Load(urls, tiny, headers=HEADERS) as load:
            load.wait_for(NUM_STREAMS)
            new = cluster.apply(new_objects)
            for pod in new:
                pod.wait_until_ready()
            urls += [pod.url for pod in new if "gateway" in pod.name]
            load.wait_for(NUM_STREAMS)
            # As `kubectl delete deployment` and then `kubectl delete -k` do.
            for pod in old:
                if "gateway" in pod.name:
                    urls.remove(pod.url)
                    pod.terminate()
            for pod in old:
                if "gateway" not in pod.name:
                    pod.delete()
            load.wait_for(2 * NUM_STREAMS)
        assert load.wrong == []
