"""A cluster of one machine that runs rendered manifests: pods as network namespaces.

Owns what Kubernetes would do with them: addresses and names, mounts, the container's user and
read-only root, restarts of containers that end, probes, and the order of a replacement. Every
command, path, port, probe, variable and deadline is the manifests'. Knows no test.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from deploy.services.processes import INIT
from kernels.cpu.compiled.runtime import PREPARED_VARIABLE
from models.sources.hub import cache_root
from tests.system.rig.hosts import add_link, run_ip

DEADLINE_S = 110.0
MAX_STARTS = 5
REPOSITORY = Path(__file__).parents[3]
Object = dict[str, Any]


def objects_in(folder: Path) -> list[Object]:
    """Return the objects in the files that a kustomization lists."""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return [
        each
        for name in listed.get("resources", [])
        for each in yaml.safe_load_all((folder / name).read_text())
    ]


class Cluster:
    """Pods that can reach each other, and be reached from here. Use as a context manager.

    `volumes` are folders by the name of a Secret, a ConfigMap or a PersistentVolumeClaim.
    """

    def __init__(self, directory: Path, volumes: dict[str, Path]) -> None:
        self.directory, self._volumes = directory, volumes
        self._next_address = 2
        self.hosts_file = directory / "hosts"
        self.hosts_file.write_text("127.0.0.1 localhost\n")
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        # Else its address is the lowest of its ports', and changes when a pod comes or goes: others
        # would send to the old one for up to a minute.
        own = ("address", "02:00:00:00:00:01")
        self.bridge, number = add_link("tsb", *own, "type", "bridge")
        self.network = f"10.214.{number}"
        self._stack.callback(run_ip, "link", "delete", self.bridge)
        run_ip("address", "add", f"{self.network}.1/24", "dev", self.bridge)
        run_ip("link", "set", self.bridge, "up")
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)  # pods show their output where a test failed

    def apply(self, objects: Iterable[Object]) -> list[Pod]:
        """Start the pods of all workloads; returns them."""
        pods = []
        for workload in objects:
            spec, name = workload["spec"], workload["metadata"]["name"]
            if workload["kind"] in ("Deployment", "StatefulSet"):
                for ordinal in range(spec["replicas"]):
                    pods.append(self.start(workload, ordinal))
            elif workload["kind"] == "LeaderWorkerSet":
                # Its pods' subdomain is the set's name: networkConfig says Shared.
                group = spec["leaderWorkerTemplate"]
                for number in range(spec["replicas"]):
                    leader = f"{name}-{number}"
                    pods.append(self._start(group["leaderTemplate"], leader, name))
                    for worker in range(1, group["size"]):
                        template = group["workerTemplate"]
                        pods.append(self._start(template, f"{leader}-{worker}", name))
        return pods

    def start(self, workload: Object, ordinal: int) -> Pod:
        """Start one pod of a workload; a StatefulSet's has a name that others know."""
        spec = workload["spec"]
        name = f"{workload['metadata']['name']}-{ordinal}"
        return self._start(spec["template"], name, spec.get("serviceName"))

    def _start(self, template: Object, name: str, subdomain: str | None) -> Pod:
        pod = Pod(self, template["spec"], name, f"{self.network}.{self._next_address}")
        self._next_address += 1
        if subdomain:
            with self.hosts_file.open("a") as file:
                file.write(f"{pod.address} {pod.name}.{subdomain}\n")
        self._stack.enter_context(pod)
        return pod

    def volume(self, source: Object, pod_directory: Path, name: str) -> Path:
        """Return the folder of a pod's volume."""
        if "emptyDir" in source:
            folder = pod_directory / name
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
            return folder
        names = (
            source.get("configMap", {}).get("name"),
            source.get("secret", {}).get("secretName"),
            source.get("persistentVolumeClaim", {}).get("claimName"),
        )
        return self._volumes[next(each for each in names if each)]


class Pod:
    """One pod: a network namespace, and a process per container. Use as a context manager."""

    def __init__(self, cluster: Cluster, spec: Object, name: str, address: str) -> None:
        self._cluster, self.spec, self.name, self.address = cluster, spec, name, address
        tag = secrets.token_hex(3)
        self._namespace, self._here = f"topspin-{tag}", f"tsp{tag}"
        self._directory = cluster.directory / f"{self.name}-{tag}"
        self._directory.mkdir()
        volumes = self.spec["volumes"]
        self._volumes = {
            each["name"]: cluster.volume(each, self._directory, each["name"]) for each in volumes
        }
        self.containers = {each["name"]: Container(self, each) for each in self.spec["containers"]}

    def __enter__(self) -> Pod:
        run_ip("netns", "add", self._namespace)
        run_ip(
            *("link", "add", self._here, "type", "veth"),
            *("peer", "name", "eth0", "netns", self._namespace),
        )
        run_ip("link", "set", self._here, "master", self._cluster.bridge, "up")
        run_ip("-n", self._namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run_ip("-n", self._namespace, "link", "set", device, "up")
        for container in self.containers.values():
            container.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for container in self.containers.values():
            container.signal(signal.SIGKILL)
            container.wait(DEADLINE_S)
            if kind is not None:
                print(f"--- {self.name} {container.name}\n{container.output}")
        subprocess.run(["ip", "netns", "delete", self._namespace], check=False, capture_output=True)

    def command(self, container: Object) -> list[str]:
        """Return the command that starts a container."""
        own = {"status.podIP": self.address}
        variables = {
            each["name"]: each["value"]
            if "value" in each
            else own[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container["env"]
        }
        *init, program = container["command"]
        arguments = container["args"]
        for name, value in variables.items():
            arguments = [each.replace(f"$({name})", value) for each in arguments]
        root = tempfile.mkdtemp(dir=self._directory)
        spec = {
            "root": root,
            "hostname": self.name,
            "hosts": str(self._cluster.hosts_file),
            "user": self.spec["securityContext"]["runAsUser"],
            "read_only": list(map(str, readable())),
            "mounts": [
                {
                    "source": str(self._volumes[each["name"]]),
                    "target": each["mountPath"],
                    "read_only": each.get("readOnly", False),
                }
                for each in container["volumeMounts"]
                if each["mountPath"] != "/dev/shm"
            ],
            "init": tuple(init) == INIT,
            "argv": [sys.executable, "-P", "-m", program, *arguments],
            "environment": {
                **variables,
                "PATH": os.environ["PATH"],
                PREPARED_VARIABLE: str(cache_root() / "numba"),
            },
        }
        runtime = [sys.executable, str(Path(__file__).with_name("pod_root.py")), json.dumps(spec)]
        return ["ip", "netns", "exec", self._namespace, "unshare", "--uts", *runtime]

    @property
    def is_ready(self) -> bool:
        """Say whether the readiness probes of all containers say so."""
        return all(each.answers("readinessProbe") for each in self.containers.values())

    @property
    def url(self) -> str:
        """Return the address of its HTTP server."""
        (port,) = (port for each in self.spec["containers"] for port in each.get("ports", []))
        return f"http://{self.address}:{port['containerPort']}"

    def wait_until_ready(self) -> None:
        """Wait; the liveness probes must never say no after the startup probes have said yes."""
        end_s = time.monotonic() + DEADLINE_S
        while not self.is_ready:
            assert time.monotonic() < end_s, f"{self.name} is not ready"
            for each in self.containers.values():
                assert each.num_starts <= MAX_STARTS, f"{self.name}: {each.name} ends again"
            time.sleep(0.1)
        assert all(each.answers("livenessProbe") for each in self.containers.values())

    def replace(self) -> None:
        """End its processes as a deleted pod's, and start them anew, in a pod of the same name."""
        self.terminate()
        for container in self.containers.values():
            container.start()

    def terminate(self) -> None:
        """End it as Kubernetes does: preStop, SIGTERM, and no longer than its grace period."""
        for container in self.containers.values():
            container.pre_stop()
        for name, status in self.delete().items():
            assert status == 0, f"{self.name} ended with {status}: {self.containers[name].output}"

    def delete(self) -> dict[str, int]:
        """Send SIGTERM to all containers at once, and wait; returns their exit statuses."""
        for container in self.containers.values():
            container.signal(signal.SIGTERM)
        grace_s = self.spec["terminationGracePeriodSeconds"]
        return {name: each.wait(grace_s) for name, each in self.containers.items()}


class Container:
    """One process of a pod, started again when it ends by itself."""

    def __init__(self, pod: Pod, spec: Object) -> None:
        self._pod, self._spec = pod, spec
        self.name: str = spec["name"]
        self._output = pod._directory / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_starts = 0

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def start(self) -> None:
        self._is_ending.clear()
        self._run()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._output.open("a") as output:
            self._process = subprocess.Popen(
                self._pod.command(self._spec),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.num_starts += 1

    def _keep(self) -> None:
        while True:
            assert self._process is not None
            self._process.wait()
            if self._is_ending.wait(0.2):
                return
            self._run()

    def pre_stop(self) -> None:
        hook = self._spec.get("lifecycle", {}).get("preStop")
        if hook is not None:
            subprocess.run(hook["exec"]["command"], check=True)

    def signal(self, number: int) -> None:
        """Send a signal; the container is not started again."""
        self._is_ending.set()
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, within_s: float) -> int:
        """Wait for its end, and return the exit status."""
        process, thread = self._process, self._thread
        if process is None or thread is None:
            return 0
        thread.join(within_s)
        assert not thread.is_alive(), f"{self.name} did not end within {within_s} s"
        assert process.returncode is not None
        return process.returncode

    def answers(self, name: str) -> bool:
        """Return what a probe says."""
        probe = self._spec[name]
        if "httpGet" in probe:
            try:
                url = self._pod.url + probe["httpGet"]["path"]
                with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False
        assert self._process is not None
        first = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        if not first:
            return False  # it has not begun, or has ended
        user = str(self._pod.spec["securityContext"]["runAsUser"])
        where = ("--target", first.strip(), "--mount", "--net", "--pid", "--root", "--wd=/")
        enter = ["nsenter", *where, "--setuid", user, "--setgid", user]
        program, *arguments = probe["exec"]["command"]
        argv = [*enter, sys.executable, "-P", "-m", program, *arguments]
        return subprocess.run(argv, check=False, capture_output=True).returncode == 0


def secret_folder(target: Path, files: Sequence[Path], *, owner: int) -> Path:
    """Return a folder as Kubernetes mounts a Secret: links to files that change all at once."""
    data = target / "..2026"
    data.mkdir(parents=True)
    target.chmod(0o755)
    data.chmod(0o755)
    (target / "..data").symlink_to(data.name)
    for file in files:
        shutil.copy(file, data / file.name)
        (data / file.name).chmod(0o440)
        os.chown(data / file.name, 0, owner)
        (target / file.name).symlink_to(Path("..data", file.name))
    return target


def readable() -> list[Path]:
    """Return what pods have of this machine besides its system: what an image would have."""
    environment = Path(sys.prefix).resolve()
    others = [] if environment.is_relative_to(REPOSITORY) else [environment]
    return [REPOSITORY, *others, Path(sys.base_prefix), cache_root() / "numba"]
