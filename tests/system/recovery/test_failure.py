"""A killed role: every request ends once, with a typed error, in time; no process is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.rig.chaos import Streams, wait_until
from tests.system.rig.links import measured_lateness
from tests.system.rig.server import Server

slow = pytest.mark.slow
# Two MoE layers, two hops each: about 80 ms a step, so that requests are still under way.
SLOW_LINK = {"latency_us": 20_000}
TWO_BY_TWO = ("--attention-nodes", "2", "--expert-nodes", "2")
MAX_TOKENS = 200
DETECTION_S = 3.0
# A failure passes through every process in turn, on a machine that may be busy.
NUM_WAKE_UPS = 20


def begun(server: Server, tiny: Tiny) -> Streams:
    """Start streams, and return once each has received tokens."""
    streams = Streams(server.url, tiny.prompts, MAX_TOKENS)
    streams.wait_for_all()
    return streams


@pytest.mark.parametrize(
    ("role", "transport"),
    [
        pytest.param("expert 0", "shm", marks=slow),
        pytest.param("attention 0", "shm", marks=slow),
        pytest.param("scheduler", "shm", marks=slow),
        pytest.param("expert 0", "tcp", marks=slow),
        ("local", "local"),
    ],
)
def test_a_killed_role_ends_every_request_with_one_typed_error(
    tiny: Tiny, tmp_path: Path, role: str, transport: str
) -> None:
    shared_memory = sorted(os.listdir("/dev/shm"))
    flags = (
        "--restart",
        "off",
        "--transport",
        transport,
        *(TWO_BY_TWO if transport == "tcp" else ()),
    )
    with Server(tiny.path, tmp_path, *flags, settings=SLOW_LINK) as server:
        streams = begun(server, tiny)
        with measured_lateness() as lateness:
            killed_at = server.kill(role)
            streams.join()
        for ended, tokens in zip(streams.watched, tiny.tokens, strict=True):
            assert ended.tokens[:NUM_TOKENS] == tokens[: len(ended.tokens)]
            assert len(ended.errors) == 1, ended
            assert ended.errors[0]["code"] in {"node_lost", "step_failed"}, ended
            assert (ended.status, ended.num_done) == (200, 1)
            assert 0 < len(ended.tokens) < MAX_TOKENS
            assert ended.ended_s - killed_at < DETECTION_S + NUM_WAKE_UPS * lateness.worst_s
        assert server.wait() == 1
        assert role in server.output
        assert "SIGKILL" in server.output
    assert sorted(os.listdir("/dev/shm")) == shared_memory


@slow
def test_a_killed_gateway_stops_the_engine(tiny: Tiny, tmp_path: Path) -> None:
    with Server(tiny.path, tmp_path, "--restart", "off") as server:
        server.kill("gateway")
        assert server.wait() == 1
        assert "gateway" in server.output


@slow  # the parts: server/gateway/test_service.py and app/launch/test_engine.py
def test_a_frozen_gateway_serves_again_and_roles_die_with_a_killed_supervisor(
    tiny: Tiny, tmp_path: Path
) -> None:
    with Server(tiny.path, tmp_path, "--restart", "on") as server:  # the shorter heartbeat
        os.kill(server.pids["gateway"], signal.SIGSTOP)
        wait_until(lambda: "a gateway is gone" in server.output, "not noticed", 30)
        os.kill(server.pids["gateway"], signal.SIGCONT)
        wait_until(lambda: server.output.count("gateway 0 joined") == 2, "not back", 30)
        health = f"{server.url}/health"
        wait_until(lambda: httpx.get(health).status_code == 200, "not healthy", 30)
        body = {"model": "tiny", "prompt": tiny.prompts[0], "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
        server.assert_nothing_left()


@slow  # the parts: server/gateway/test_service.py and app/launch/test_engine.py
def test_sigterm_ends_open_requests_and_exits_0(tiny: Tiny, tmp_path: Path) -> None:
    with Server(tiny.path, tmp_path, settings=SLOW_LINK) as server:
        streams = begun(server, tiny)
        server.process.terminate()
        streams.join()
        assert server.wait() == 0
        for ended in streams.watched:
            assert [error["code"] for error in ended.errors] == ["engine_unavailable"]
            assert ended.num_done == 1
