"""One gateway process before a stub engine, while a measurement runs.

Owns the start and the end of both processes. Knows nothing of what is measured. Called by
benchmarks.gateway.command and benchmarks.gateway_hostile.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from app.cli.serve import plan_of
from benchmarks.load.client.targets import wait_until_ready
from benchmarks.load.started_server import free_port

READY_TIMEOUT_S = 30.0


@dataclass
class RunningGateway:
    """A gateway that is ready; `sent` has the stub's send times by seed, after the end."""

    url: str
    pid: int
    sent: dict[int, list[float]] = field(default_factory=dict)


@contextmanager
def running_gateway(
    model: Path,
    *,
    period_ms: float,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[RunningGateway]:
    """Run a gateway on a free port, and benchmarks.gateway.engine_stub with `flags` behind it.

    With an `environment` (None: ours) the gateway's log is thrown away; `headers` are those of a
    client that it answers.
    """
    control = f"ipc://@topspin-bench-{secrets.token_hex(8)}"
    command = [sys.executable, "-P", "-m", "benchmarks.gateway.engine_stub", "--control", control]
    stub = subprocess.Popen(
        [*command, "--period-ms", str(period_ms), *flags], stdout=subprocess.PIPE, env=environment
    )
    process, url = _start_gateway(model, control, environment)
    found = RunningGateway(url, process.pid)
    try:
        wait_until_ready(url, READY_TIMEOUT_S, headers)
        yield found
    finally:
        process.terminate()
        process.wait(30)
        stub.terminate()
        output = stub.communicate(timeout=30)[0]
    found.sent = {int(seed): times for seed, times in json.loads(output).items()}


def _start_gateway(
    model: Path, control: str, environment: Mapping[str, str] | None
) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    # Settings that it leaves at their defaults are not written: an older gateway may not know them.
    config = {
        "plan": msgspec.to_builtins(plan_of(model)),
        "gateway": {"port": port, "served_names": ["stub"], "access_log": False},
    }
    config_reader, config_writer = os.pipe()
    os.write(config_writer, msgspec.json.encode(config))
    os.close(config_writer)
    command = [sys.executable, "-P", "-m", "server.gateway", "--control", control]
    command += ["--config", f"/dev/fd/{config_reader}"]
    process = subprocess.Popen(
        command,
        pass_fds=(config_reader,),
        env=environment,
        stderr=None if environment is None else subprocess.DEVNULL,
    )
    os.close(config_reader)
    return process, f"http://127.0.0.1:{port}"
