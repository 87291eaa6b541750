"""The real process on a real socket: it starts, answers, and ends correctly."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.server.scheduler.engine import make_config
from tests.server.scheduler.test_engine_facts import MIXTRAL, planned
from topspin import __version__
from topspin.errors import PeerLost
from topspin.messages import EngineState, Hello, Refused, Role
from topspin.plan.spec import ServeConfig
from topspin.processes.channel import ControlClient

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 30.0


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    """Return an engine's plan with a model whose config.json exists."""
    plan = make_config()
    model = msgspec.structs.replace(plan.model, path=planned(tmp_path, MIXTRAL).path)
    return ServeConfig(plan=msgspec.structs.replace(plan, model=model))


@pytest.fixture
def address() -> str:
    """Return a control address that leaves no file."""
    return f"ipc://@topspin-test-{secrets.token_hex(8)}"


@pytest.fixture
def process(config: ServeConfig, address: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a scheduler; kill it if the test leaves it running."""
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(config))
    command = ["-m", "server.scheduler", "--config", str(path), "--control", address]
    started = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOPSPIN_LOG_LEVEL": "INFO"},
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


@pytest.fixture
def client(address: str) -> Iterator[ControlClient]:
    """Return a connection; ZeroMQ connects as soon as the scheduler listens."""
    connected = ControlClient(address)
    try:
        yield connected
    finally:
        connected.close()


def say_hello(client: ControlClient, role: Role, revision: str = __version__) -> object:
    """Say Hello and return the answer."""
    client.send(Hello(role=role, index=0, incarnation=1, revision=revision))
    return client.recv(TIMEOUT_S)


@pytest.mark.slow
def test_stop_by_signal(process: subprocess.Popen[str], client: ControlClient) -> None:
    state = say_hello(client, "gateway")
    assert isinstance(state, EngineState)
    assert state.state == "starting"
    process.send_signal(signal.SIGTERM)
    stopping = client.recv(TIMEOUT_S)
    assert isinstance(stopping, EngineState)
    assert stopping.state == "stopping"
    with pytest.raises(PeerLost):
        client.recv(TIMEOUT_S)
    _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "scheduler: stopping: the scheduler got SIGTERM" in log


def test_a_wrong_node_ends_it_with_an_error(
    process: subprocess.Popen[str], client: ControlClient
) -> None:
    refused = say_hello(client, "attention", revision="other")
    assert isinstance(refused, Refused)
    _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "the engine has failed: attention 0 runs revision 'other'" in log


def test_a_configuration_that_cannot_be_read(address: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.json")
    ended = subprocess.run(
        [sys.executable, "-m", "server.scheduler", "--config", missing, "--control", address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert missing in ended.stderr
    assert "Traceback" not in ended.stderr
