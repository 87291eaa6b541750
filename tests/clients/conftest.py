"""Clients in their own environments, and the server that they ask: the default model.

`make test-clients` runs what is here, and nothing else does.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from models.sources.smollm2_moe import pull
from tests.clients.environments import NotBuilt, environment
from tests.system.rig.server import Server

HERE = Path(__file__).parent
# Making an environment is part of its first test.
LIMIT_S = 1800
# Of a client's run: the hang guard that speaks of the client.
RUN_LIMIT_S = 420

Client = Callable[..., str]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def model() -> Path:
    return pull(progress=False)


@pytest.fixture(scope="session")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose answers to one question are equal, and as exact as transformers'."""
    flags = ["--kv-cache-memory", "256MiB", "--dtype", "float32", "--deterministic"]
    flags += ["--chat-template", str(HERE / "tools.jinja")]
    with Server(model, tmp_path_factory.mktemp("server"), *flags) as server:
        yield server.url


@pytest.fixture
def run(tmp_path: Path) -> Client:
    """Run a program of an environment in an empty directory; returns all that it printed."""

    def run(name: str, *command: str, limit_s: float = RUN_LIMIT_S) -> str:
        try:
            made = environment(name)
        except NotBuilt as error:
            pytest.skip(f"the environment of {name} cannot be built: {error}")
        program = made / "bin" / command[0]
        environ = client_environ(tmp_path)
        environ["PATH"] = f"{made / 'bin'}:{environ['PATH']}"
        environ["NODE_PATH"] = str(made / "node_modules")
        done = subprocess.run(
            [str(program) if program.exists() else command[0], *command[1:]],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def client_environ(home: Path) -> dict[str, str]:
    """Return the variables of a client: nothing of ours, and no tables from the network."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": "none",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
