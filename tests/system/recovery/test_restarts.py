"""`topspin serve` on one host: no death of a process ends it, and its own end leaves nothing.

A scheduler's death costs no weights and no request, a gateway's its own streams only: the port
stays. test_failover.py and test_chaos.py have the nodes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.cli.serve import plan_of
from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.rig.chaos import Streams, check_identical, wait_until, wait_until_whole
from tests.system.rig.server import Server, Settings, descendants, is_running
from tests.system.test_serve import gauge
from tests.system.test_speculation import FLAGS, TREES

slow = pytest.mark.slow
# Two MoE layers, two hops each: about 80 ms a step, so that streams outlast what happens.
SLOW_LINK: Settings = {"latency_us": 20_000}
DRAFTS = (*FLAGS, "--draft-nodes", "1", "--speculative-config")
NODES = ("attention", "expert", "draft", "local")


def undisturbed(server: Server, tiny: Tiny, num_tokens: int) -> list[list[int]]:
    found = [each.tokens for each in Streams(server.url, tiny.prompts, num_tokens).join()]
    assert [tokens[:NUM_TOKENS] for tokens in found] == tiny.tokens
    return found


def lose(server: Server, role: str, number: int = signal.SIGKILL) -> None:
    """End a process, and wait until another one has its place and the engine is whole."""
    seen, before = len(server.output), server.pids[role]
    os.kill(before, number)
    wait_until(lambda: f"{role} " in server.output[seen:], "not noticed")
    wait_until(lambda: server.pids_by_role().get(role, before) != before, "not started again")
    wait_until_whole(server)


def nodes(pids: dict[str, int]) -> dict[str, int]:
    return {role: pid for role, pid in pids.items() if role.startswith(NODES)}


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        pytest.param("local", signal.SIGKILL, marks=slow),
        pytest.param("shm", signal.SIGKILL, marks=slow),
        pytest.param("shm", signal.SIGTERM, marks=slow),
        pytest.param("tcp", signal.SIGKILL, marks=slow),
        pytest.param("two in one process", signal.SIGKILL, marks=slow),
        pytest.param("draft node", signal.SIGKILL, marks=slow),
    ],
)
def test_weights_and_requests_outlive_the_scheduler(
    tiny: Tiny, tmp_path: Path, layout: str, number: int
) -> None:
    flags: tuple[str, ...] = ("--transport", layout)
    if layout == "two in one process":
        flags = ("--transport", "local", "--attention-nodes", "2", "--expert-nodes", "2")
    if layout == "draft node":
        flags = (*DRAFTS, TREES % tiny.path)
    with Server(tiny.path, tmp_path, *flags, settings=SLOW_LINK) as server:
        expected, pids = undisturbed(server, tiny, 80), server.pids
        for _ in range(2):
            streams = Streams(server.url, tiny.prompts, 80)
            streams.wait_for_events(12)
            lose(server, "scheduler", number)
            check_identical(streams.join(), expected)
        assert nodes(server.pids) == nodes(pids)
        assert server.pids["gateway"] == pids["gateway"]


@slow
def test_the_port_outlives_the_gateway(tiny: Tiny, tmp_path: Path) -> None:
    with Server(tiny.path, tmp_path, settings=SLOW_LINK) as server:
        before = server.pids["gateway"]
        with begun(server, tiny) as events:
            server.kill("gateway")
            read_until_cut(events)
        wait_until(lambda: not is_running(before), "it lives")
        # They connect while no gateway lives, and are answered.
        check_identical(Streams(server.url, tiny.prompts, NUM_TOKENS).join(), tiny.tokens)
        assert gauge(server.url, "topspin_num_requests_running") == 0.0, "lost ones go on"
        server.pids = server.pids_by_role()
        assert server.pids["gateway"] != before


@contextmanager
def begun(server: Server, tiny: Tiny, **fields: object) -> Iterator[Iterator[str]]:
    """Start a stream; yield its events but the first, which has come."""
    body = {"model": "tiny", "prompt": tiny.prompts[0], "max_tokens": 200, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True, **fields}, timeout=60) as response:
        events = response.iter_lines()
        next(events)
        yield events


def read_until_cut(events: Iterator[str]) -> None:
    with pytest.raises(httpx.TransportError):
        list(events)


@slow
@pytest.mark.parametrize("layout", ["local", "draft node"])
def test_nothing_outlives_the_supervisor(tiny: Tiny, tmp_path: Path, layout: str) -> None:
    flags: tuple[str, ...] = ("--transport", "local")
    if layout == "draft node":
        flags = (*DRAFTS, TREES % tiny.path)
    shared_memory = sorted(os.listdir("/dev/shm"))
    with Server(tiny.path, tmp_path, *flags, settings=SLOW_LINK) as server:
        fields = {"structured_outputs": {"regex": "[a-z ]{150,}"}, "ignore_eos": False}
        with begun(server, tiny, **fields) as events:
            everyone = {pid: words(pid) for pid in descendants(server.process.pid)}
            forked = [argv for argv in everyone.values() if "grammars.fork_server" in argv]
            assert len(forked) >= 2, "a server, and what it has forked"
            server.process.kill()
            read_until_cut(events)
        assert server.wait() == -signal.SIGKILL
        wait_until(lambda: not any(map(is_running, everyone)), "orphans")
        scheduler = everyone[server.pids["scheduler"]].split("\0")
        control = scheduler[scheduler.index("--control") + 1].removeprefix("ipc://")
        # A thread that ends after its process's first one may close it.
        sockets = Path("/proc/net/unix")
        wait_until(lambda: control not in sockets.read_text(), "a socket is left", 10)
    assert sorted(os.listdir("/dev/shm")) == shared_memory


def words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def patient(tiny: Tiny, directory: Path, transport: str) -> Server:
    """Start a server whose requests get long to end."""
    plan = plan_of(
        tiny.path,
        transport=transport,
        layout="shared",
        kv_cache_bytes=8 * 2**20,
        **SLOW_LINK,
    )
    return Server(tiny.path, directory, "--shutdown-timeout", "100", plan=plan)


@slow
@pytest.mark.parametrize(("transport", "lost"), [("shm", "expert 0"), ("local", None)])
def test_after_sigterm_requests_end_and_new_ones_are_refused(
    tiny: Tiny, tmp_path: Path, transport: str, lost: str | None
) -> None:
    with patient(tiny, tmp_path, transport) as server:
        expected = undisturbed(server, tiny, 80)
        streams = Streams(server.url, tiny.prompts, 80)
        streams.wait_for_events(12)
        server.process.terminate()
        health = f"{server.url}/health"
        wait_until(lambda: httpx.get(health).json()["state"] == "stopping", "not told")
        if lost is not None:  # the engine is kept whole for those who wait
            server.kill(lost)
        body = {"model": "tiny", "prompt": tiny.prompts[0]}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 503
        check_identical(streams.join(), expected)
        assert server.wait() == 0


@slow
def test_a_second_signal_cuts_requests_at_once(tiny: Tiny, tmp_path: Path) -> None:
    with patient(tiny, tmp_path, "shm") as server:
        with begun(server, tiny) as events:
            server.process.terminate()
            wait_until(lambda: "once more kills it" in server.output, "not told")
            server.process.terminate()
            read_until_cut(events)
        assert server.wait() == 128 + signal.SIGTERM
