"""Manifests of a whole engine, run by podman: what it reads of Kubernetes' objects."""

from __future__ import annotations

import base64
import shutil
import socket
import time
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.services.processes import USER
from tests.system.conftest import Tiny
from tests.system.containers.files import API_KEY, HEADERS, models_of, render
from tests.system.containers.podman import Podman
from tests.system.rig.pods import Object, objects_in
from tests.system.rig.streams import NUM_STREAMS, Load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
DEADLINE_S = 240.0
SECRET = f"tests: {API_KEY}\n".encode()


def objects_of(out: Path, port: int) -> list[Object]:
    """Return the objects as kustomize writes them, as podman 4.3 takes them.

    It ends by a fault at a Secret that does not say whether it is optional, and takes the ports of
    containers for the host's.
    """
    base = yaml.safe_load((out / "base" / "kustomization.yaml").read_text())
    secrets = yaml.safe_load((out / "secrets" / "kustomization.yaml").read_text())
    data = {name: base64.b64encode(SECRET).decode() for name in ("api-keys", "metrics-key")}
    config = {"data": {"plan.yaml": (out / "base" / "plan.yaml").read_text()}}
    found = [
        named("ConfigMap", base["configMapGenerator"][0]["name"]) | config,
        named("Secret", secrets["secretGenerator"][0]["name"]) | {"data": data},
        *objects_in(out / "models"),
    ]
    (engine,) = (each for each in objects_in(out / "base") if each["kind"] == "Deployment")
    pod = engine["spec"]["template"]["spec"]
    for volume in pod["volumes"]:
        volume.get("secret", {})["optional"] = False
    pod["containers"][0]["ports"][0] |= {"hostPort": port, "hostIP": "127.0.0.1"}
    return [*found, engine]


def named(kind: str, name: str) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}


def fill(volume: Path, source: Path) -> None:
    """Copy a folder into a volume, readable by the image's user."""
    shutil.copytree(source, volume, dirs_exist_ok=True)


def test_a_whole_engine_serves(podman: Podman, tiny: Tiny, tmp_path: Path) -> None:
    models = models_of(tiny.path, tmp_path)
    out = render(models / "tiny", tmp_path, models, transport="local", form="kubernetes")
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    objects = objects_of(out, port)
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    url = f"http://127.0.0.1:{port}"
    podman("kube", "play", "--start=false", str(file))
    try:
        fill(volume_of(podman, "topspin-models"), models)
        # podman 4.3 leaves what a Secret has in base64.
        (volume_of(podman, "topspin-api-keys") / "api-keys").write_bytes(SECRET)
        (pod,) = podman("pod", "ls", "--quiet").splitlines()
        podman("pod", "start", pod)
        wait_until_ready(url)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with Load([url], tiny, headers=HEADERS) as load:
            load.wait_for(2 * NUM_STREAMS)
        assert load.wrong == []
        container = f"{objects[-1]['metadata']['name']}-pod-0-engine"
        assert podman("exec", container, "id", "-u") == str(USER)
        refused = podman.call("podman", "exec", container, "touch", "/file", check=False)
        assert "Read-only file system" in refused.stderr
        podman("pod", "stop", "--time", "60", pod)
        assert podman("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
    finally:
        podman("kube", "down", str(file))
        podman("volume", "rm", "--all", "--force")
        podman("secret", "rm", "--all")
    assert podman("ps", "--all", "--quiet") == ""


def volume_of(podman: Podman, name: str) -> Path:
    """Return where this machine has a volume."""
    return Path(podman("volume", "inspect", "--format", "{{.Mountpoint}}", name))


def wait_until_ready(url: str) -> None:
    """Wait until an engine serves."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline_s, "is not ready"
        time.sleep(0.1)
