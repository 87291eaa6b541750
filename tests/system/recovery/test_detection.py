"""The time until a node's end, freeze, hang or network loss is decided on.

The scheduler runs in this process; its decisions and the events are timed on one clock. The
remaining error is the machine's lateness, which is measured at the same time and allowed for.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from expert_nodes import command
from m2n_comm.open import ExpertListener, listen_expert
from tests.checkpoints import make_checkpoint, oracle_generate
from tests.engine import Engine, engine_config
from tests.faults import faulty_node
from tests.pairwise import few
from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.recovery.test_failover import expert_process, with_replicas
from tests.system.rig.links import Link, measured_lateness
from topspin.plan.spec import EnginePlan
from topspin.processes.channel import FAILOVER_HEARTBEAT

CLOSED_S, FROZEN_S, PARTITION_S = 1.0, 2.0, 3.0
PROGRESS_DEADLINE_S = 2.0
# A decision takes some wake-ups after its cause: pings, their answers, polls.
NUM_WAKE_UPS = 4


def make_config(
    tiny: Tiny, transport: Any, *, num_nodes: int = 1, progress_deadline_s: float = 60.0
) -> EnginePlan:
    """Return a plan in which only the tested detector is quick."""
    return engine_config(
        tiny.path,
        transport=transport,
        deadline_s=60.0,
        restart=True,
        restart_deadline_s=60.0,
        halt_deadline_s=60.0,
        progress_deadline_s=progress_deadline_s,
        attention_nodes=num_nodes,
        expert_nodes=num_nodes,
    )


def survive(
    engine: Engine,
    tiny: Tiny,
    event: Callable[[], None],
    *,
    noticed: str,
    within_s: float,
    afterwards: Callable[[], None] = lambda: None,
) -> str:
    """Let `event` happen in the middle of streams, which must not change.

    The scheduler must log `noticed` in time; then `afterwards` is called, and the engine must
    become whole again. Returns the log entry.
    """
    ids = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in tiny.prompts]
    engine.collect(until=lambda: all(len(engine.requests[each].tokens) >= 4 for each in ids))
    seen, num_states = len(engine.log), len(engine.states)
    with measured_lateness() as lateness:
        happened_s = time.monotonic()
        event()
        engine.collect(until=lambda: any(noticed in text for _, text in engine.log[seen:]))
    decided_s, entry = next(entry for entry in engine.log[seen:] if noticed in entry[1])
    assert decided_s - happened_s <= within_s + NUM_WAKE_UPS * lateness.worst_s, entry
    afterwards()
    engine.collect()
    assert [engine.requests[each].failed for each in ids] == [None] * len(ids)
    assert [engine.requests[each].tokens for each in ids] == tiny.tokens

    def is_whole() -> bool:
        states = engine.states[num_states:]
        return "recovering" in states and states[-1] == "ready" and not engine.details[-1]

    engine.collect(until=is_whole)
    return entry


def test_the_heartbeat_is_short_enough() -> None:
    assert FAILOVER_HEARTBEAT.limit_s < FROZEN_S


SLOW = pytest.mark.slow
ONE_WAY = [{"outbound": False}, {"inbound": False}]


# By default test_chaos.py freezes a node, and above the heartbeat is compared with the limit.
@SLOW
@pytest.mark.parametrize(
    ("number", "within_s"),
    [(signal.SIGKILL, CLOSED_S), (signal.SIGSTOP, FROZEN_S)],
)
def test_a_process_that_ends_or_freezes(tiny: Tiny, number: int, within_s: float) -> None:
    config = make_config(tiny, "shm")
    with Engine(config, external=("expert 0",)) as engine, ExitStack() as stack:
        first: subprocess.Popen[str] = stack.enter_context(expert_process(engine, tiny))
        engine.wait_until_ready()

        def replace() -> None:
            first.kill()
            stack.enter_context(expert_process(engine, tiny))

        survive(
            engine,
            tiny,
            lambda: os.kill(first.pid, number),
            noticed="lost expert 0",
            within_s=within_s,
            afterwards=replace,
        )
        assert engine.dead == [first.pid]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "cut"),
    [
        ("expert", {}),
        ("attention", {"outbound": False}),
        ("attention", {}),
        ("attention", {"inbound": False}),
        *(("expert", cut) for cut in ONE_WAY),
    ],
)
def test_a_control_link_that_carries_nothing_more(
    tiny: Tiny, role: str, cut: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Both ways, or one way: then the other side's pings still arrive and count.

    The side that hears nothing closes the connection, and says how long it has heard nothing; if
    that is the node, the scheduler sees it close.
    """
    with ExitStack() as stack:
        links: list[Link] = []

        def control_of(name: str, address: str) -> str:
            if name != f"{role} 0":
                return address
            if not links:
                path = "\0" + address.removeprefix("ipc://@")
                links.append(stack.enter_context(Link(lambda: connect_unix(path))))
            return f"tcp://127.0.0.1:{links[0].port}"

        with Engine(make_config(tiny, "shm"), control_of=control_of) as engine:
            entry = survive(
                engine,
                tiny,
                lambda: links[0].cut(**cut),
                noticed=f"lost {role} 0",
                within_s=PARTITION_S,
                afterwards=links[0].heal,
            )
            node_hears_nothing = cut == {"outbound": False}
            closed, silent = "closed its connection", "was silent for 1.6 s"
            assert (closed if node_hears_nothing else silent) in entry
            if node_hears_nothing:
                assert f"{role} 0: the scheduler {silent}" in caplog.text


def connect_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    return sock


@contextmanager
def data_links(stack: ExitStack) -> Iterator[list[Link]]:
    """Route connections to expert nodes that open in the context over links."""
    links: list[Link] = []

    def listen(*settings: Any) -> ExpertListener:
        listener = listen_expert(*settings)
        port = int(listener.address.rpartition(":")[2])
        link = Link(lambda: socket.create_connection(("127.0.0.1", port)))
        links.append(stack.enter_context(link))
        listener.address = f"tcp:127.0.0.1:{link.port}"
        return listener

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "listen_expert", listen)
        yield links


@pytest.mark.parametrize("cut", [{}, *(pytest.param(cut, marks=SLOW) for cut in ONE_WAY)])
@pytest.mark.slow
def test_a_data_link_that_carries_nothing_more(tiny: Tiny, cut: dict[str, bool]) -> None:
    """No node is lost: all nodes report that they wait, and reconnect once they can."""
    with (
        ExitStack() as stack,
        data_links(stack) as links,
        Engine(make_config(tiny, "tcp", num_nodes=2)) as engine,
    ):
        survive(
            engine,
            tiny,
            lambda: links[0].cut(**cut),
            noticed="wait for one another",
            within_s=PARTITION_S,
            afterwards=links[0].heal,
        )
        assert engine.dead == []


@pytest.mark.parametrize("role", few(["attention", "expert"], "expert"))
def test_a_node_that_answers_pings_and_does_nothing(tiny: Tiny, role: str) -> None:
    """Its main thread is stuck, its heartbeat thread is not."""
    release = threading.Event()
    config = make_config(tiny, "shm", num_nodes=2, progress_deadline_s=PROGRESS_DEADLINE_S)
    config = with_replicas(tiny, config)

    with faulty_node(role, 1) as injector, Engine(config) as engine:

        def hang() -> None:
            injector.fault = release.wait

        entry = survive(
            engine,
            tiny,
            hang,
            noticed=f"lost {role} 1",
            # Plus the tick of the watch, and the frame in which the node gets stuck.
            within_s=PROGRESS_DEADLINE_S + 0.5,
            afterwards=release.set,
        )
        assert "it has not got on with step" in entry


@pytest.mark.slow
def test_a_long_step_is_no_hang(tmp_path: Path) -> None:
    """A step of eight hops of 0.3 s is longer than a node may be silent."""
    deadline_s, latency_s = 2.0, 0.3
    path = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=4)
    config = engine_config(
        path,
        transport="shm",
        latency_us=1e6 * latency_s,
        restart=True,
        progress_deadline_s=deadline_s,
    )
    with Engine(config) as engine:
        started_s = time.monotonic()
        tokens = engine.generate([[5, 9, 200]], max_tokens=1)
        assert time.monotonic() - started_s >= 8 * latency_s > deadline_s
        assert "recovering" not in engine.states
        assert engine.dead == []
    assert tokens == oracle_generate(path, [[5, 9, 200]], 1).tokens
