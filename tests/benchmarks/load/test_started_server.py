"""Servers started by compare: ready, dead, never ready, and ended with their children."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from benchmarks.load.client.targets import check_ready
from benchmarks.load.started_server import StartedServer, free_port
from tests.benchmarks.load.scripted_server import ScriptedServer
from topspin.errors import ConfigError, EngineUnavailable

# Many servers are a parent process whose child serves.
_PARENT = """
import subprocess, sys
print("parent up", flush=True)
subprocess.run([sys.executable, "-m", "tests.benchmarks.load.scripted_main", "x", *sys.argv[1:]])
"""

ROOT = Path(__file__).parents[3]
Make = Callable[..., StartedServer]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def make(tmp_path: Path, port: int) -> Make:
    def started(*words: str, ready_timeout_s: float = 60.0) -> StartedServer:
        return StartedServer(
            shlex.join([sys.executable, *words]),
            url=f"http://127.0.0.1:{port}",
            log=tmp_path / "logs" / "server.log",
            ready_timeout_s=ready_timeout_s,
            cwd=ROOT,
        )

    return started


@pytest.mark.slow
def test_it_answers_inside_the_block_and_its_whole_group_is_gone_after(
    make: Make, port: int, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{port}"
    with make("-c", _PARENT, str(port), str(tmp_path / "journal")) as server:
        check_ready(url)
        server.check()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert "parent up" in (tmp_path / "logs" / "server.log").read_text()


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(make: Make) -> None:
    with (
        pytest.raises(EngineUnavailable, match=r"ended with status 3(.|\n)*no such model"),
        make("-c", "import sys; print('no such model'); sys.exit(3)"),
    ):
        pass


def test_a_server_that_never_answers_is_ended(make: Make) -> None:
    words = ("-c", "import time; time.sleep(600)")
    late = pytest.raises(EngineUnavailable, match=r"did not answer within 0\.3 s")
    with late, make(*words, ready_timeout_s=0.3):
        pass


def test_what_cannot_be_started_is_said(make: Make, tmp_path: Path) -> None:
    asked = {"url": "http://127.0.0.1:1", "log": tmp_path / "x.log", "ready_timeout_s": 1.0}
    for command, reason in (("'open", "No closing quotation"), (" ", "needs a command")):
        with pytest.raises(ConfigError, match=reason):
            StartedServer(command, **asked)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot run"), StartedServer("/no/such", **asked):  # type: ignore[arg-type]
        pass


def test_a_server_that_is_already_there_is_not_measured_by_mistake(tmp_path: Path) -> None:
    with (
        ScriptedServer() as other,
        pytest.raises(ConfigError, match="already answers"),
        StartedServer("true", url=other.base_url, log=tmp_path / "x.log", ready_timeout_s=1.0),
    ):
        pass
