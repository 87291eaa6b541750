"""A node's life with any worker: its messages, and how its process ends."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from tests.topspin.plans import plan
from topspin.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    FrameError,
    Interrupted,
    PeerLost,
    ProtocolError,
    SchedulerLost,
    TransportError,
)
from topspin.expert_table import uniform_table
from topspin.messages import (
    AnyMessage,
    Goodbye,
    Halt,
    Halted,
    Hello,
    Leaving,
    Loaded,
    Message,
    NodeMemory,
    PrepareTable,
    Ready,
    Reform,
    StepFailed,
    StepTicket,
    Stop,
    Topology,
    Welcome,
)
from topspin.processes.channel import ControlClient, ControlServer, Received
from topspin.processes.inbox import Stopped
from topspin.processes.node_life import CacheSize, NodeLife, run_node

TIMEOUT_S = 30.0


class ServedCheckpoint:
    """A checkpoint that somebody may replace while it is loaded."""

    digests: Mapping[str, str] = MappingProxyType({"model.safetensors": "ab"})

    def __init__(self, replaced: str = "") -> None:
        self._replaced = replaced

    def fingerprint(self) -> str:
        return "print"

    def check_unchanged(self) -> None:
        if self._replaced:
            raise CheckpointError(f"{self._replaced}: has changed")


SERVED = ServedCheckpoint()


@pytest.fixture
def address() -> str:
    return f"ipc://@topspin-test-{secrets.token_hex(8)}"


@pytest.fixture
def scheduler(address: str) -> Iterator[ControlServer]:
    server = ControlServer(address)
    yield server
    server.close()


def end_with(error: Exception, address: str) -> int:
    def body(control: ControlClient) -> None:
        raise error

    return run_node("expert", 3, address, logger=logging.getLogger("expert"), body=body)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ConfigError("no such dtype"), 2, "invalid_config"),
        (CheckpointError("tensor x is missing"), 2, "invalid_checkpoint"),
        (FrameError("a bad frame"), 1, "frame_error"),
        (ZeroDivisionError("a bug"), 1, "internal_error"),
    ],
)
def test_an_error_is_told_and_is_the_exit_status(
    address: str, scheduler: ControlServer, error: Exception, status: int, code: str
) -> None:
    assert end_with(error, address) == status
    events = scheduler.poll(TIMEOUT_S)
    assert isinstance(events[0], Received)
    goodbye = events[0].message
    assert isinstance(goodbye, Goodbye)
    assert (goodbye.role, goodbye.index, goodbye.code) == ("expert", 3, code)
    assert str(error) in goodbye.message


@pytest.mark.parametrize(("error", "status"), [(Stopped("over"), 0), (PeerLost("gone"), 1)])
def test_an_end_that_the_scheduler_knows_is_not_told(
    address: str, error: Exception, status: int
) -> None:
    assert end_with(error, address) == status


# Messages of the scheduler, and the reactions of any worker.

TICKET = StepTicket(
    step=7,
    previous=6,
    generation=1,
    table_version=1,
    num_micro_batches=1,
    participants=(0,),
    row_buckets=(1,),
)


def topology(generation: int) -> Topology:
    table = uniform_table(num_layers=1, num_experts=2, num_nodes=1)
    return Topology(table=table, experts=(), attention_incarnations=(1,), generation=generation)


def welcome(*, restart: bool = True, joins_late: bool = False, generation: int = 1) -> Welcome:
    config = plan(restart=restart).for_node()
    return Welcome(config=config, topology=topology(generation), joins_late=joins_late)


class Node:
    """A worker without work, and the scheduler's end of its connection: a list of messages."""

    def __init__(self, *messages: Message | Exception, can_reform: bool = True) -> None:
        self._messages = deque(messages)
        self.sent: list[Any] = []
        """Without the reports of memory, which are sent by time."""
        self.memory: list[NodeMemory] = []
        self.done: list[str] = []
        self.served = SERVED
        self.faults: dict[int, Exception] = {}
        self.step_fault: Exception = DeadlineExceeded("expert 0 is late")
        control: Any = self
        self.life = NodeLife(control, role="expert", index=3, can_reform=can_reform)

    def recv(self, timeout_s: float | None = None) -> Message | None:
        if timeout_s == 0 or not self._messages:
            return None
        message = self._messages.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    def reconnect(self) -> None:
        self.done.append("reconnect")

    def send(self, message: Message) -> None:
        if isinstance(message, NodeMemory):
            self.memory.append(message)
        else:
            self.sent.append(message)

    def wake(self) -> None:
        pass

    def run(self, ends: type[Exception] = Stopped, *, match: str | None = None) -> None:
        """Serve until the error with which this life ends."""
        with pytest.raises(ends, match=match):
            self.serve()

    def serve(self) -> None:
        self.life.introduce(self.served, "unix:@x")
        self.life.serve(self)

    # The worker.

    def load(self, welcome: Welcome) -> CacheSize:
        self.done.append("load")
        return CacheSize(5, 5)

    def form(self, welcome: Welcome) -> None:
        generation = welcome.topology.generation
        self.done.append(f"form {generation}")
        if generation in self.faults:
            raise self.faults[generation]

    def disband(self) -> None:
        self.done.append("disband")

    def wait_s(self) -> float | None:
        return 1.0

    def idle(self) -> None:
        raise Stopped("nothing is left to say")

    def handle(self, message: AnyMessage) -> None:
        self.done.append(type(message).__name__)
        if isinstance(message, PrepareTable):
            os.kill(os.getpid(), signal.SIGTERM)
        if isinstance(message, StepTicket):
            self.life.report_failure(message, self.step_fault)
            self.disband()


def test_a_node_takes_no_part_with_weights_that_it_has_not_named() -> None:
    node = Node(welcome())
    node.served = ServedCheckpoint("model.safetensors")
    node.run(CheckpointError, match=r"model\.safetensors: has changed")
    assert node.done == ["load"]
    assert [type(message) for message in node.sent] == [Hello]


def test_a_node_joins_serves_halts_and_forms_anew() -> None:
    node = Node(welcome(), Halt(generation=2), Reform(topology=topology(2)), Stop(reason="over"))
    node.run(match="over")
    hello, first, halted, second = node.sent
    assert isinstance(hello, Hello)
    assert (hello.role, hello.index, hello.fingerprint) == ("expert", 3, "print")
    assert hello.data_address == "unix:@x"
    assert hello.files == {"model.safetensors": "ab"}
    assert isinstance(first, Ready)
    assert (first.generation, first.num_blocks) == (1, 5)
    assert halted == Halted(role="expert", index=3, generation=2)
    assert second == Ready(role="expert", index=3, num_blocks=5, num_frames=5, generation=2)
    assert node.done == ["load", "form 1", "disband", "disband", "form 2", "disband"]


@pytest.mark.parametrize(("interval_s", "sizes"), [(1e9, [70]), (0.0, [70, 80, 90])])
def test_a_ready_node_tells_its_memory_once_in_an_interval(
    interval_s: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter((70, 80, 90))
    monkeypatch.setattr("topspin.processes.node_life.resident_bytes", lambda: next(left))
    monkeypatch.setattr("topspin.processes.node_life.MEMORY_INTERVAL_S", interval_s)
    node = Node(welcome(), PrepareTable(table=topology(1).table), Halt(generation=2))
    monkeypatch.setattr(node, "handle", lambda message: None)
    node.run()
    assert node.memory == [
        NodeMemory(role="expert", index=3, resident_bytes=size) for size in sizes
    ]


def test_a_node_that_comes_late_loads_and_waits_for_a_reform() -> None:
    node = Node(welcome(joins_late=True), Reform(topology=topology(4)))
    node.run()
    _, loaded, ready = node.sent
    assert isinstance(loaded, Loaded)
    assert loaded.num_blocks == 5
    assert ready.generation == 4
    assert node.done == ["load", "disband", "form 4", "disband"]


@pytest.mark.parametrize(
    ("fault", "codes"),
    [(DeadlineExceeded("nobody came"), ["deadline_exceeded"]), (Interrupted("Halt"), [])],
)
def test_a_forming_that_fails_is_told_and_the_next_one_awaited(
    fault: TransportError, codes: list[str]
) -> None:
    node = Node(welcome(), Reform(topology=topology(2)), Reform(topology=topology(3)))
    node.faults[2] = fault
    node.run()
    failed = [message for message in node.sent if isinstance(message, StepFailed)]
    assert [(each.step, each.generation) for each in failed] == [(0, 2)] * len(codes)
    assert [each.code for each in failed] == codes
    assert node.sent[-1].generation == 3


@pytest.mark.parametrize(
    ("restart", "can_reform", "fault", "goes_on"),
    [
        (True, True, DeadlineExceeded("late"), True),
        (True, True, ZeroDivisionError("a bug"), False),
        (False, True, DeadlineExceeded("late"), False),
        (True, False, DeadlineExceeded("late"), False),
    ],
)
def test_a_failed_step_is_told_and_ends_the_node_unless_the_engine_reforms(
    restart: bool, can_reform: bool, fault: Exception, goes_on: bool
) -> None:
    node = Node(welcome(restart=restart), TICKET, can_reform=can_reform)
    node.step_fault = fault
    node.run(Stopped if goes_on else type(fault))
    assert isinstance(node.sent[-1], StepFailed)
    assert (node.sent[-1].step, node.sent[-1].generation, node.sent[-1].index) == (7, 1, 3)


def test_a_net_that_fails_because_the_engine_stops_is_no_failure() -> None:
    node = Node(welcome(restart=False), TICKET, TICKET, Stop(reason="over"))
    node.step_fault = PeerLost("attention 0 closed its connection")
    node.run(match="over")
    assert node.done == ["load", "form 1", "StepTicket", "disband"]


def test_a_node_that_cannot_reform_knows_no_halt() -> None:
    node = Node(welcome(), Halt(generation=2), can_reform=False)
    node.run()
    assert node.done == ["load", "form 1", "Halt", "disband"]


# Other schedulers.

GONE = SchedulerLost("the scheduler is gone")


def test_weights_outlive_the_scheduler() -> None:
    node = Node(welcome(), TICKET, GONE, welcome(generation=5), Stop(reason="over"))
    node.run(match="over")
    first, _, _, second, ready = node.sent
    assert (second.fingerprint, second.data_address) == ("print", "unix:@x")
    assert second.incarnation != first.incarnation
    assert (first.generation, second.generation) == (0, 1)
    assert ready == Ready(role="expert", index=3, num_blocks=5, num_frames=5, generation=5)
    begun = ["load", "form 1", "StepTicket", "disband", "disband"]
    assert node.done == [*begun, "reconnect", "disband", "form 5", "disband"]


def test_a_node_that_rejoins_may_come_late_or_lose_that_scheduler_too() -> None:
    node = Node(welcome(), GONE, GONE, welcome(joins_late=True), Reform(topology=topology(3)))
    node.run()
    assert [type(each) for each in node.sent] == [Hello, Ready, Hello, Hello, Loaded, Ready]
    assert node.done.count("load") == 1
    assert node.done.count("reconnect") == 2


def test_the_loss_of_a_scheduler_is_no_failed_step() -> None:
    node = Node(welcome(), TICKET, welcome(generation=2))
    node.step_fault = GONE
    node.run()
    assert not any(isinstance(each, StepFailed) for each in node.sent)
    assert node.done[-4:] == ["reconnect", "disband", "form 2", "disband"]


def test_weights_outlive_a_scheduler_whose_engine_cannot_form() -> None:
    node = Node(welcome(), GONE, welcome(generation=2), GONE, welcome(generation=3))
    node.faults[2] = PeerLost("expert 0 closed its connection")
    node.run()
    assert [type(each) for each in node.sent] == [Hello, Ready, Hello, StepFailed, Hello, Ready]
    assert node.done.count("load") == 1


def test_who_was_told_to_stop_waits_for_no_other_scheduler() -> None:
    class Ended(Node):
        """Its scheduler has sent Stop and is gone, which a step notices."""

        def recv(self, timeout_s: float | None = None) -> Message | None:
            if not self._messages:
                raise GONE
            return super().recv()

        def handle(self, message: AnyMessage) -> None:
            with pytest.raises(Interrupted):
                self.life.check()

    Ended(welcome(), TICKET, Stop(reason="over")).run(match="over")


def test_another_plan_needs_other_weights() -> None:
    other = welcome()
    config = msgspec.structs.replace(other.config, leave_deadline_s=77.0)
    node = Node(welcome(), GONE, msgspec.structs.replace(other, config=config))
    node.run(ProtocolError, match="another plan")


def test_nodes_of_other_engines_end_with_their_scheduler() -> None:
    node = Node(welcome(restart=False), GONE)
    node.run(SchedulerLost)


def test_a_net_that_fails_because_the_scheduler_is_gone_ends_no_node() -> None:
    """In one process the other nodes, which share the net, may notice it first."""
    node = Node(welcome(), TICKET, GONE, welcome(generation=2), Stop(reason=""), can_reform=False)
    node.step_fault = PeerLost("attention 1 closed its net")
    node.run()
    assert node.done.count("load") == 1
    assert "form 2" in node.done


def test_a_node_without_a_scheduler_ends_when_asked() -> None:
    node = Node(welcome(), GONE)
    node.reconnect = node.life.ask_to_leave  # type: ignore[method-assign]
    node.run(match="takes part in nothing")


# SIGTERM, which the node below gets with each PrepareTable.

SIGTERM = PrepareTable(table=uniform_table(num_layers=1, num_experts=2, num_nodes=1))


def test_a_node_that_gets_sigterm_asks_once_and_serves_until_it_is_let_go() -> None:
    before = signal.getsignal(signal.SIGTERM)
    node = Node(
        welcome(), SIGTERM, Halt(generation=2), Reform(topology=topology(2)), Stop(reason="")
    )
    node.run()
    assert [type(message) for message in node.sent] == [Hello, Ready, Leaving, Halted, Ready]
    assert node.sent[2] == Leaving(role="expert", index=3)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_node_in_a_long_wait_asks_too() -> None:
    node = Node(welcome())
    node.life.ask_to_leave()
    node.life.check()
    node.life.check()
    assert [type(message) for message in node.sent if isinstance(message, Leaving)] == [Leaving]


def test_a_node_that_is_to_leave_ends_in_order_if_the_scheduler_is_gone() -> None:
    node = Node(welcome(), SIGTERM, GONE)
    node.run(match="scheduler is gone")


LONELY = """
import sys
from tests.topspin.processes.test_node_life import Node, SIGTERM, plan, welcome
from topspin.plan.settings import FailoverPolicy
import msgspec

restart, num_signals = sys.argv[1] == "restart", int(sys.argv[2])
hello = welcome(restart=restart)
config = msgspec.structs.replace(hello.config, leave_deadline_s=0.2 if restart else None)
node = Node(msgspec.structs.replace(hello, config=config), *[SIGTERM] * num_signals)
node.idle = lambda: None
node.serve()
"""


@pytest.mark.parametrize(
    ("restart", "num_signals", "status"),
    [
        pytest.param(True, 1, -signal.SIGALRM, id="nobody lets it go"),
        pytest.param(True, 2, -signal.SIGTERM, id="asked twice", marks=pytest.mark.slow),
        pytest.param(
            *(False, 1, -signal.SIGTERM),
            id="the engine ends without it anyway",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_node_ends_anyway(restart: bool, num_signals: int, status: int) -> None:
    words = "restart" if restart else "end", str(num_signals)
    done = subprocess.run([sys.executable, "-c", LONELY, *words], timeout=TIMEOUT_S, check=False)
    assert done.returncode == status
