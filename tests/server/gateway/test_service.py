"""The gateway as a process, between a scheduler played by the test and real HTTP clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import msgspec
import pytest

from server.gateway.http.listener import bind
from tests.server.gateway.fakes import FakeEngine, backend, ids, output
from tests.server.gateway.operations.collector import collector
from tests.server.scheduler.engine import make_config
from tests.structs import changed
from topspin import __version__
from topspin.errors import ConfigError
from topspin.messages import (
    AddRequest,
    EngineState,
    Hello,
    Message,
    Outputs,
    Refused,
    StatsQuery,
)
from topspin.plan.settings import GatewaySection
from topspin.plan.spec import ServeConfig
from topspin.processes.channel import ControlServer, Heartbeat, PeerGone, Received

ROOT = Path(__file__).parents[3]
DEADLINE_S = 20.0

_Kind = TypeVar("_Kind", bound=Message)


def write_checkpoint(path: Path) -> None:
    """Write the files of a checkpoint that a gateway reads: no weights."""
    path.mkdir()
    backend().save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": backend().get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": ids("<|eos|>")[0],
    }
    (path / "config.json").write_text(json.dumps(config))


class Scheduler:
    """The scheduler's end of the control plane, driven step by step."""

    def __init__(self) -> None:
        self.address = f"ipc://@topspin-test-{uuid4().hex}"
        self._server = ControlServer(self.address, heartbeat=Heartbeat(100, 500))
        self._waiting: list[Received] = []
        self.peer = b""
        self._closed = False

    def expect(self, kind: type[_Kind]) -> _Kind:
        """Wait for the next message of `kind`; others are skipped."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            if (message := self.poll(kind)) is not None:
                return message
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_S} s")

    def poll(self, kind: type[_Kind]) -> _Kind | None:
        """Look for a message of `kind` among those that come soon; others are skipped."""
        while True:
            while self._waiting:
                received = self._waiting.pop(0)
                self.peer = received.peer
                if isinstance(received.message, kind):
                    return received.message
            events = self._server.poll(0.1)
            self._waiting += [event for event in events if isinstance(event, Received)]
            if not self._waiting:
                return None

    def expect_gone(self) -> None:
        """Wait until the peer's connection has closed."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            events = self._server.poll(0.1)
            if any(isinstance(each, PeerGone) and each.peer == self.peer for each in events):
                return
        raise AssertionError(f"the gateway is still there after {DEADLINE_S} s")

    def say(self, message: Message) -> None:
        assert self._server.send(self.peer, message)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._server.close()


class Gateway:
    """A gateway process and a pool of clients."""

    def __init__(self, process: subprocess.Popen[str], port: int, pool: ThreadPoolExecutor) -> None:
        self.process = process
        self._url = f"http://127.0.0.1:{port}"
        self._pool = pool

    def get(self, path: str) -> Future[httpx.Response]:
        return self._pool.submit(httpx.get, self._url + path, timeout=DEADLINE_S)

    def complete(self, *, stream: bool) -> Future[httpx.Response]:
        body = {"model": "tiny", "prompt": "hello", "stream": stream}
        return self._pool.submit(
            httpx.post, self._url + "/v1/completions", json=body, timeout=DEADLINE_S
        )


def start(
    checkpoint: Path,
    control: str,
    *,
    port: int = 0,
    port_fd: int | None = None,
    hf_overrides: dict[str, object] | None = None,
    shutdown_timeout_s: float = 0.1,
    otlp_traces_endpoint: str | None = None,
) -> subprocess.Popen[str]:
    model = {"model.path": str(checkpoint), "model.hf_overrides": hf_overrides}
    config = ServeConfig(
        plan=changed(make_config(), model),
        gateway=GatewaySection(
            port=port,
            served_names=("tiny",),
            shutdown_timeout_s=shutdown_timeout_s,
            otlp_traces_endpoint=otlp_traces_endpoint,
        ),
    )
    file = checkpoint / "engine.json"
    file.write_bytes(msgspec.json.encode(config))
    argv = [sys.executable, "-m", "server.gateway", "--config", str(file), "--control", control]
    if port_fd is not None:
        argv += ["--port-fd", str(port_fd)]
    return subprocess.Popen(
        argv,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=() if port_fd is None else (port_fd,),
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit status and stderr."""
    try:
        _, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, stderr


@contextmanager
def running(checkpoint: Path, scheduler: Scheduler, **options: Any) -> Iterator[Gateway]:
    """Run a gateway process; `options` are those of start()."""
    read_fd, write_fd = os.pipe()
    process = start(checkpoint, scheduler.address, port_fd=write_fd, **options)
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as announced, ThreadPoolExecutor(4) as pool:
            yield Gateway(process, int(announced.readline()), pool)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    write_checkpoint(path)
    return path


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.close()


def test_it_reads_the_model_with_the_plans_overrides(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["rope_scaling"] = {"rope_type": "unknown"}
    (checkpoint / "config.json").write_text(json.dumps(raw))
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with running(checkpoint, scheduler, hf_overrides=linear):
        assert scheduler.expect(Hello).role == "gateway"
    status, stderr = ended(start(checkpoint, scheduler.address))
    assert status == 2
    assert "rope_type = 'unknown'" in stderr


def test_a_life_from_hello_to_sigterm(checkpoint: Path, scheduler: Scheduler) -> None:
    with running(checkpoint, scheduler) as gateway:
        hello = scheduler.expect(Hello)
        assert (hello.role, hello.index, hello.revision) == ("gateway", 0, __version__)
        assert hello.pid == gateway.process.pid
        assert hello.incarnation > 0
        starting = gateway.get("/health").result()
        assert (starting.status_code, starting.json()["state"]) == (503, "starting")
        scheduler.say(EngineState(state="ready", max_request_tokens=64))
        health = gateway.get("/health")
        query = scheduler.expect(StatsQuery)
        scheduler.say(msgspec.structs.replace(FakeEngine().stats, query_id=query.query_id))
        assert health.result().status_code == 200

        whole = gateway.complete(stream=False)
        request = scheduler.expect(AddRequest)
        scheduler.say(Outputs(outputs=(output(request, ids("hello"), finish_reason="length"),)))
        assert whole.result().json()["choices"][0]["text"] == "hello"

        stream = gateway.complete(stream=True)
        request = scheduler.expect(AddRequest)
        scheduler.say(Outputs(outputs=(output(request, ids("hello")),)))
        gateway.process.send_signal(signal.SIGTERM)
        text = stream.result().text
        assert '"text":"hello"' in text
        assert '"code":"engine_unavailable"' in text
        assert text.endswith("data: [DONE]\n\n")
        status, stderr = ended(gateway.process)
        assert status == 0, stderr
        assert "Traceback" not in stderr


def test_requests_in_flight_may_end_within_the_shutdown_timeout(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with running(checkpoint, scheduler, shutdown_timeout_s=DEADLINE_S) as gateway:
        scheduler.expect(Hello)
        scheduler.say(EngineState(state="ready", max_request_tokens=64))
        while gateway.get("/v1/models").result().json()["data"][0]["max_model_len"] is None:
            pass
        stream = gateway.complete(stream=True)
        request = scheduler.expect(AddRequest)
        gateway.process.send_signal(signal.SIGTERM)
        while gateway.get("/health").result().json()["state"] != "stopping":
            pass
        refused = gateway.complete(stream=False).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        scheduler.say(Outputs(outputs=(output(request, ids("hello"), finish_reason="length"),)))
        text = stream.result().text
        assert '"text":"hello"' in text
        assert '"error"' not in text
        assert ended(gateway.process)[0] == 0


def test_spans_of_the_last_requests_are_sent_at_sigterm(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with (
        collector() as found,
        running(checkpoint, scheduler, otlp_traces_endpoint=found.url) as gateway,
    ):
        assert gateway.complete(stream=False).result().status_code == 503
        gateway.process.send_signal(signal.SIGTERM)
        status, stderr = ended(gateway.process)
        assert status == 0, stderr
        assert [span.name for span in found.receive().spans] == ["text_completion"]


def test_a_lost_scheduler_ends_requests_within_a_second(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with running(checkpoint, scheduler) as gateway:
        scheduler.expect(Hello)
        scheduler.say(EngineState(state="ready", max_request_tokens=64))
        while gateway.get("/v1/models").result().json()["data"][0]["max_model_len"] is None:
            pass
        pending = [gateway.complete(stream=False), gateway.complete(stream=True)]
        for _ in pending:
            scheduler.expect(AddRequest)
        lost_at_s = time.monotonic()
        scheduler.close()
        for future in pending:
            response = future.result()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "node_lost"
        assert time.monotonic() - lost_at_s < 3.0  # heartbeats would take 5 s
        assert gateway.get("/health").result().json()["state"] == "failed"
        assert gateway.complete(stream=False).result().status_code == 503
        gateway.process.send_signal(signal.SIGTERM)
        assert ended(gateway.process)[0] == 0


def test_a_gateway_that_was_frozen_connects_anew(checkpoint: Path, scheduler: Scheduler) -> None:
    with running(checkpoint, scheduler) as gateway:
        first = scheduler.expect(Hello)
        scheduler.say(EngineState(state="ready", max_request_tokens=64))
        while gateway.get("/v1/models").result().json()["data"][0]["max_model_len"] is None:
            pass
        pending = [gateway.complete(stream=False), gateway.complete(stream=True)]
        for _ in pending:
            scheduler.expect(AddRequest)
        gateway.process.send_signal(signal.SIGSTOP)
        scheduler.expect_gone()
        gateway.process.send_signal(signal.SIGCONT)
        for future in pending:
            response = future.result()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "node_lost"
        again = scheduler.expect(Hello)
        assert (again.role, again.pid) == ("gateway", first.pid)
        assert again.incarnation != first.incarnation
        # Connected, but the scheduler has not yet sent the engine's state.
        health = gateway.get("/health").result()
        assert (health.status_code, health.json()["state"]) == (503, "failed")
        assert gateway.complete(stream=False).result().status_code == 503

        scheduler.say(EngineState(state="ready", max_request_tokens=64))
        answer = gateway.get("/health")
        while not answer.done() or answer.result().status_code != 200:
            if answer.done():
                answer = gateway.get("/health")
            query = scheduler.poll(StatsQuery)
            if query is not None:
                scheduler.say(msgspec.structs.replace(FakeEngine().stats, query_id=query.query_id))
        whole = gateway.complete(stream=False)
        request = scheduler.expect(AddRequest)
        scheduler.say(Outputs(outputs=(output(request, ids("hello"), finish_reason="length"),)))
        assert whole.result().json()["choices"][0]["text"] == "hello"
        gateway.process.send_signal(signal.SIGTERM)
        assert ended(gateway.process)[0] == 0


def test_a_gateway_that_is_refused_when_it_comes_back_exits(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with running(checkpoint, scheduler) as gateway:
        scheduler.expect(Hello)
        gateway.process.send_signal(signal.SIGSTOP)
        scheduler.expect_gone()
        gateway.process.send_signal(signal.SIGCONT)
        scheduler.expect(Hello)
        scheduler.say(Refused(reason="another revision"))
        status, stderr = ended(gateway.process)
        assert status == 1
        assert "another revision" in stderr


def test_a_refused_gateway_exits_with_the_reason(checkpoint: Path, scheduler: Scheduler) -> None:
    with running(checkpoint, scheduler) as gateway:
        scheduler.expect(Hello)
        scheduler.say(Refused(reason="another revision"))
        status, stderr = ended(gateway.process)
        assert status == 1
        assert "another revision" in stderr


def test_a_taken_port_is_named(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, stderr = ended(start(checkpoint, "ipc://@topspin-test-nobody", port=port))
    assert status == 2
    assert f"--port {port}: Address already in use" in stderr
    assert "Traceback" not in stderr


def test_a_host_that_does_not_exist_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"--host 300\.1\.1\.1"):
        bind(GatewaySection(host="300.1.1.1", port=0))


def test_the_gateway_imports_no_torch() -> None:
    code = "import sys, server.gateway.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
