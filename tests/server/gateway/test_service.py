"""The gateway as a process, between a scheduler played by the test and real HTTP clients."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import msgspec
import pytest

from server.gateway.engine_client import EngineClient
from server.gateway.service import build_app
from tests.server.gateway.fakes import FakeEngine, backend, ids, output
from tests.server.gateway.operations.collector import collector
from tests.server.scheduler.engine import make_config
from tests.structs import changed
from topspin import __version__
from topspin.errors import ConfigError
from topspin.messages import AddRequest, EngineState, Hello, Message, Outputs, Refused, StatsQuery
from topspin.plan.settings import GatewaySection
from topspin.plan.spec import ServeConfig
from topspin.processes.channel import ControlServer, Heartbeat, PeerGone, Received
from topspin.processes.listening import bind, bound_socket

ROOT = Path(__file__).parents[3]
DEADLINE_S = 20.0

_Kind = TypeVar("_Kind", bound=Message)


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

    def finish(self, request: AddRequest) -> None:
        """Answer with `hello`, and its end."""
        self.say(Outputs(outputs=(output(request, ids("hello"), finish_reason="length"),)))

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

    def become_ready(self, scheduler: Scheduler) -> Hello:
        """Connect, and wait until the engine's state has come."""
        hello = scheduler.expect(Hello)
        scheduler.say(EngineState(state="ready", max_request_tokens=64))
        while self.get("/v1/models").result().json()["data"][0]["max_model_len"] is None:
            pass
        return hello

    def end(self) -> tuple[int, str]:
        """Send SIGTERM, and return exit status and stderr."""
        self.process.send_signal(signal.SIGTERM)
        return ended(self.process)


def config_of(checkpoint: Path, changes: dict[str, object], **section: Any) -> ServeConfig:
    plan = changed(make_config(), {"model.path": str(checkpoint), **changes})
    return ServeConfig(
        plan=plan,
        gateway=GatewaySection(
            **{"port": 0, "served_names": ("tiny",), "shutdown_timeout_s": 0.1, **section}
        ),
    )


def start(
    checkpoint: Path, control: str, *, listener: socket.socket | None = None, **section: Any
) -> subprocess.Popen[str]:
    """Start a gateway process with these settings of its HTTP side, perhaps at `listener`."""
    file = checkpoint / "engine.json"
    file.write_bytes(msgspec.json.encode(config_of(checkpoint, {}, **section)))
    argv = [sys.executable, "-m", "server.gateway", "--config", str(file), "--control", control]
    fds = () if listener is None else (listener.fileno(),)
    argv += [f"--listen-fd={fd}" for fd in fds]
    return subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, pass_fds=fds)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit status and stderr."""
    try:
        _, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, stderr


@contextmanager
def running(
    checkpoint: Path, scheduler: Scheduler, *, is_replacement: bool = False, **options: Any
) -> Iterator[Gateway]:
    """Run a gateway process; `options` are those of start().

    A replacement's clients may have connected before it lives.
    """
    with bound_socket("127.0.0.1", 0) as listener, ThreadPoolExecutor(4) as pool:
        if is_replacement:
            listener.listen()
        process = start(checkpoint, scheduler.address, listener=listener, **options)
        try:
            while not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    raise AssertionError(f"the gateway exited with {process.wait(0.01)}")
            yield Gateway(process, listener.getsockname()[1], pool)
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The files of a checkpoint that a gateway reads: no weights."""
    backend().save(str(tmp_path / "tokenizer.json"))
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
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.close()


@pytest.mark.slow
def test_it_reads_the_model_with_the_plans_overrides(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["rope_scaling"] = {"rope_type": "unknown"}
    (checkpoint / "config.json").write_text(json.dumps(raw))
    status, stderr = ended(start(checkpoint, scheduler.address))
    assert status == 2
    assert "rope_type = 'unknown'" in stderr
    assert "Traceback" not in stderr
    linear = {"model.hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}
    assert build_app(config_of(checkpoint, linear), EngineClient(FakeEngine()))


def test_a_life_from_hello_to_sigterm(checkpoint: Path, scheduler: Scheduler) -> None:
    with (
        collector() as found,
        running(checkpoint, scheduler, otlp_traces_endpoint=found.url) as gateway,
    ):
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
        assert "libtorch" not in Path(f"/proc/{hello.pid}/maps").read_text()

        whole = gateway.complete(stream=False)
        scheduler.finish(scheduler.expect(AddRequest))
        assert whole.result().json()["choices"][0]["text"] == "hello"

        stream = gateway.complete(stream=True)
        request = scheduler.expect(AddRequest)
        scheduler.say(Outputs(outputs=(output(request, ids("hello")),)))
        status, stderr = gateway.end()
        text = stream.result().text
        assert '"text":"hello"' in text
        assert '"code":"engine_unavailable"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert status == 0, stderr
        assert "Traceback" not in stderr
        roots = [span.name for span in found.receive().spans if not span.parent_span_id]
        assert roots == ["text_completion tiny"] * 2, "also of the last requests"


def test_requests_in_flight_may_end_within_the_shutdown_timeout(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with running(checkpoint, scheduler, shutdown_timeout_s=DEADLINE_S) as gateway:
        gateway.become_ready(scheduler)
        stream = gateway.complete(stream=True)
        request = scheduler.expect(AddRequest)
        gateway.process.send_signal(signal.SIGTERM)
        while gateway.get("/health").result().json()["state"] != "stopping":
            pass
        refused = gateway.complete(stream=False).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        scheduler.finish(request)
        text = stream.result().text
        assert '"text":"hello"' in text
        assert '"error"' not in text
        assert ended(gateway.process)[0] == 0


@pytest.mark.slow
def test_a_second_signal_cuts_the_requests_in_flight(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with running(checkpoint, scheduler, shutdown_timeout_s=1000.0) as gateway:
        gateway.become_ready(scheduler)
        pending = gateway.complete(stream=False)
        scheduler.expect(AddRequest)
        gateway.process.send_signal(signal.SIGTERM)
        while gateway.get("/health").result().json()["state"] != "stopping":
            pass
        status, _ = gateway.end()
        assert status == 0
        assert pending.exception() or pending.result().status_code == 503


@pytest.mark.slow
def test_clients_of_a_gateway_that_is_gone_wait_for_the_state_of_the_engine(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with running(checkpoint, scheduler, is_replacement=True) as gateway:
        early = gateway.complete(stream=False)
        scheduler.expect(Hello)
        scheduler.say(EngineState(state="ready", max_request_tokens=64))
        scheduler.finish(scheduler.expect(AddRequest))
        assert early.result().json()["choices"][0]["text"] == "hello"


def check_lost(gateway: Gateway, scheduler: Scheduler, lose: Callable[[], None]) -> None:
    """Lose the connection with two requests in flight, which end."""
    pending = [gateway.complete(stream=False), gateway.complete(stream=True)]
    for _ in pending:
        scheduler.expect(AddRequest)
    lose()
    for future in pending:
        response = future.result()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "node_lost"


def test_a_lost_scheduler_ends_requests_within_a_second(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with running(checkpoint, scheduler) as gateway:
        gateway.become_ready(scheduler)
        lost_at_s = time.monotonic()
        check_lost(gateway, scheduler, scheduler.close)
        assert time.monotonic() - lost_at_s < 3.0  # heartbeats would take 5 s
        assert gateway.get("/health").result().json()["state"] == "failed"
        assert gateway.complete(stream=False).result().status_code == 503
        assert gateway.end()[0] == 0


@pytest.mark.slow
def test_a_gateway_that_was_frozen_connects_anew_until_it_is_refused(
    checkpoint: Path, scheduler: Scheduler
) -> None:
    with running(checkpoint, scheduler) as gateway:

        def freeze() -> None:
            gateway.process.send_signal(signal.SIGSTOP)
            scheduler.expect_gone()
            gateway.process.send_signal(signal.SIGCONT)

        first = gateway.become_ready(scheduler)
        check_lost(gateway, scheduler, freeze)
        again = scheduler.expect(Hello)
        assert (again.role, again.pid) == ("gateway", first.pid)
        assert again.incarnation != first.incarnation
        # Connected, but the scheduler has not yet sent the engine's state.
        health = gateway.get("/health").result()
        assert (health.status_code, health.json()["state"]) == (503, "failed")
        assert gateway.complete(stream=False).result().status_code == 503

        scheduler.say(EngineState(state="ready", max_request_tokens=64))
        whole = gateway.complete(stream=False)
        while (request := scheduler.poll(AddRequest)) is None:
            if whole.done():  # before the state had come
                whole = gateway.complete(stream=False)
        scheduler.finish(request)
        assert whole.result().json()["choices"][0]["text"] == "hello"
        freeze()
        scheduler.expect(Hello)
        scheduler.say(Refused(reason="another revision"))
        status, stderr = ended(gateway.process)
        assert status == 1
        assert "another revision" in stderr


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: Address already in use"):
            bind(GatewaySection(port=port))
