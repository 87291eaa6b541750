"""An engine that podman-compose has brought up from our Compose file.

Owns bringing it up and down, waiting for health, and killing a process. Knows no test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import yaml

from tests.system.containers.podman import Podman, free_port

DEADLINE_S = 240.0
needs_compose = pytest.mark.skipif(
    importlib.util.find_spec("podman_compose") is None, reason="no podman-compose here"
)


class Composed:
    """The services of the Compose file in `folder`. Use as a context manager.

    `limits`: the most bytes that a service may have, by name.
    """

    def __init__(self, podman: Podman, folder: Path, limits: dict[str, int] | None = None) -> None:
        self._podman, self._folder, self._port = podman, folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        own_limits = {name: {"mem_limit": size} for name, size in (limits or {}).items()}
        (folder / "limits.yaml").write_text(yaml.safe_dump({"services": own_limits}))
        file = yaml.safe_load((folder / "compose.yaml").read_text())
        self._services: dict[str, Any] = file["services"]

    def _compose(self, *arguments: str) -> None:
        files = ("-f", "compose.yaml", "-f", "limits.yaml")
        command = (sys.executable, "-m", "podman_compose", *files, *arguments)
        variables = {"TOPSPIN_PORT": str(self._port)}
        self._podman.call(*command, cwd=self._folder, variables=variables)

    def __enter__(self) -> Composed:
        try:
            self._compose("up", "--detach")
        except BaseException:
            self._compose("down", "--volumes")
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in self._services if kind is not None else ():
            output = self._podman.call("podman", "logs", self._container(name), check=False)
            print(f"--- {name}\n{output.stdout[-3000:]}{output.stderr[-3000:]}")
        self._compose("down", "--volumes")

    def _container(self, service: str) -> str:
        return f"topspin_{service}_1"

    def state(self, service: str) -> dict[str, Any]:
        """Return what podman says of a service's container."""
        (found,) = json.loads(self._podman("inspect", self._container(service)))
        assert isinstance(found, dict)
        return found

    def wait_until_healthy(self) -> None:
        """Wait until the health checks of all services succeed."""
        deadline_s = time.monotonic() + DEADLINE_S
        for name in (key for key, own in self._services.items() if "healthcheck" in own):
            check = ("podman", "healthcheck", "run", self._container(name))
            while self._podman.call(*check, check=False).returncode != 0:
                assert time.monotonic() < deadline_s, f"{name} does not become healthy"

    def kill(self, service: str) -> None:
        """SIGKILL process 1 of a service's container, as the kernel does that is out of memory."""
        os.kill(self.state(service)["State"]["Pid"], signal.SIGKILL)
