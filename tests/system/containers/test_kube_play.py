"""Manifests of a whole engine, run by podman: what it reads of Kubernetes' objects."""

from __future__ import annotations

import base64
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.services.processes import USER
from tests.system.conftest import Tiny
from tests.system.containers.files import API_KEY, HEADERS, models_of, render
from tests.system.containers.podman import Podman, free_port
from tests.system.rig.pods import Object, objects_in
from tests.system.rig.streams import NUM_STREAMS, Load

DEADLINE_S = 240.0
SECRET = f"tests: {API_KEY}\n".encode()


def objects_of(out: Path, port: int) -> list[Object]:
    """Return the objects as kustomize writes them, as podman 4.3 takes them.

    It ends by a fault at a Secret that does not say whether it is optional, and takes the ports of
    containers for the host's.
    """
    base = yaml.safe_load((out / "base" / "kustomization.yaml").read_text())
    secrets = yaml.safe_load((out / "secrets" / "kustomization.yaml").read_text())
    plan = {"plan.yaml": (out / "base" / "plan.yaml").read_text()}
    keys = dict.fromkeys(("api-keys", "metrics-key"), base64.b64encode(SECRET).decode())
    (engine,) = (each for each in objects_in(out / "base") if each["kind"] == "Deployment")
    pod = engine["spec"]["template"]["spec"]
    for volume in pod["volumes"]:
        volume.get("secret", {})["optional"] = False
    pod["containers"][0]["ports"][0] |= {"hostPort": port, "hostIP": "127.0.0.1"}
    return [
        named("ConfigMap", base["configMapGenerator"][0]["name"], plan),
        named("Secret", secrets["secretGenerator"][0]["name"], keys),
        *objects_in(out / "models"),
        engine,
    ]


def named(kind: str, name: str, data: dict[str, str]) -> Object:
    """Return an object that holds data."""
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "data": data}


def volume_of(podman: Podman, name: str) -> Path:
    """Return where this machine has a volume."""
    return Path(podman("volume", "inspect", "--format", "{{.Mountpoint}}", name))


def wait_until_ready(url: str) -> None:
    """Wait until an engine serves."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("is not ready")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_whole_engine_serves(podman: Podman, tiny: Tiny, tmp_path: Path) -> None:
    models = models_of(tiny.path, tmp_path)
    out = render(models / "tiny", tmp_path, models, transport="local", form="kubernetes")
    port = free_port()
    objects = objects_of(out, port)
    file, url = tmp_path / "objects.yaml", f"http://127.0.0.1:{port}"
    file.write_text(yaml.safe_dump_all(objects))
    container = f"{objects[-1]['metadata']['name']}-pod-0-engine"
    podman("kube", "play", "--start=false", str(file))
    try:
        shutil.copytree(models, volume_of(podman, "topspin-models"), dirs_exist_ok=True)
        # podman 4.3 leaves what a Secret has in base64, and lets all users read it.
        file_of_keys = volume_of(podman, "topspin-api-keys") / "api-keys"
        file_of_keys.write_bytes(SECRET)
        file_of_keys.chmod(0o440)
        os.chown(file_of_keys, USER, USER)
        podman("pod", "start", "--all")
        wait_until_ready(url)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with Load([url], tiny, headers=HEADERS) as load:
            load.wait_for(2 * NUM_STREAMS)
        assert load.wrong == []
        assert podman("exec", container, "id", "-u") == str(USER)
        refused = podman.call("podman", "exec", container, "touch", "/file", check=False)
        assert "Read-only file system" in refused.stderr
        podman("pod", "stop", "--all", "--time", "60")
        assert podman("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
    finally:
        logs = podman.call("podman", "logs", container, check=False)
        print(logs.stdout[-3000:], logs.stderr[-3000:])
        podman("kube", "down", str(file))
        podman("volume", "rm", "--all", "--force")
        podman("secret", "rm", "--all")
    assert podman("ps", "--all", "--quiet") == ""
