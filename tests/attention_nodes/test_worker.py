"""The worker on a device that runs by itself: its launches, its messages, its dropped steps.

The scheduler is a list of messages; the device does one piece of work whenever the worker has
looked for a message and found none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_nodes.loading import load_runner
from attention_nodes.step.model_runner import ModelRunner
from attention_nodes.worker import AttentionWorker
from kernels import reference
from models.description.config import load_model_config
from tests.attention_nodes.delayed_runtime import DelayedRuntime
from tests.attention_nodes.plans import BLOCK_SIZE, Planner, SilentNet, one_by_one
from tests.checkpoints import make_checkpoint
from tests.engine import engine_config
from tests.structs import changed
from topspin.errors import DeadlineExceeded
from topspin.expert_table import uniform_table
from topspin.messages import (
    CompileGrammar,
    ExpertPeer,
    GrammarReady,
    Halt,
    Halted,
    Message,
    StepFailed,
    StepResult,
    Stop,
    Topology,
    Welcome,
)
from topspin.plan.spec import NodeConfig
from topspin.processes.node_life import Stopped


class World:
    """The scheduler's end of a control connection, and the device."""

    def __init__(self, runtime: DelayedRuntime, config: NodeConfig, num_layers: int) -> None:
        self.runtime = runtime
        self.sent: list[Message] = []
        self._inbox: deque[Message] = deque()
        self._has_given = False
        self.seen: list[str] = []
        table = uniform_table(num_layers=num_layers, num_experts=8, num_nodes=1)
        expert = ExpertPeer(address="nowhere", incarnation=1)
        topology = Topology(table=table, experts=(expert,), attention_incarnations=(1,))
        self.say(Welcome(config=config, topology=topology))

    def say(self, *messages: Message) -> None:
        self._inbox += messages

    def recv(self, timeout_s: float | None = None) -> Message | None:
        """Return a message; the next call with a timeout then returns None."""
        if self._inbox and not (self._has_given and timeout_s is not None):
            self._has_given = True
            message = self._inbox.popleft()
            self.seen.append(type(message).__name__)
            return message
        if timeout_s is None:
            self.seen.append("idle")
            raise Stopped("nothing is left to say")
        if not self._has_given and self.runtime.is_busy:
            self.runtime.go_on()
        self._has_given = False
        return None

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self.seen.append(f"> {type(message).__name__}")

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class Echo(SilentNet):
    """A silent net with faults: check() raises `faults[n]` in step n, begin() refuses `refused`.

    While the worker only checks, the device goes on.
    """

    def __init__(self, runtime: DelayedRuntime) -> None:
        self._runtime = runtime
        self.begun = 0
        self.faults: dict[int, Exception] = {}
        self.refused: int | None = None

    def begin(self, ticket: Any) -> None:
        if ticket.step == self.refused:
            raise DeadlineExceeded(f"step {ticket.step} cannot begin")
        self.begun = ticket.step

    def check(self) -> None:
        if self.begun in self.faults:
            raise self.faults[self.begun]
        if self._runtime.is_busy:
            self._runtime.go_on()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("worker"), "mixtral")


@pytest.fixture
def config(checkpoint: Path) -> NodeConfig:
    config = engine_config(checkpoint, block_size=BLOCK_SIZE, max_num_batched_tokens=32)
    return changed(config.for_node(), {"node.kernels": "triton", "restart": True})


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[DelayedRuntime]:
    with DelayedRuntime() as runtime:
        monkeypatch.setattr("attention_nodes.loading.open_runtime", lambda *_: runtime)
        # The reference's ops are fast, and no recordings are made of them.
        monkeypatch.setattr("attention_nodes.loading.select_ops", lambda *names: reference)
        # Only the steps of plans count.
        monkeypatch.setattr("attention_nodes.loading.largest_steps", lambda *_, **__: [])
        yield runtime


@pytest.fixture
def world(runtime: DelayedRuntime, config: NodeConfig, checkpoint: Path) -> World:
    return World(runtime, config, len(load_model_config(checkpoint).moe_layers))


def planner(num_steps: int = 4) -> Planner:
    planner = Planner()
    planner.add(1, [5, 9, 200, 31])
    planner.step({1: 4})
    for _ in range(num_steps - 1):
        planner.decode([1])
    return planner


def serve(world: World, checkpoint: Path, net: SilentNet) -> None:
    control: Any = world
    opened: Any = net
    worker = AttentionWorker(control, index=0, model_path=checkpoint, open_net=lambda *_: opened)
    with pytest.raises(Stopped):
        worker.serve()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps under way after each launch."""
    counts: list[int] = []
    launch = ModelRunner.launch

    def count(self: ModelRunner, *args: Any, **kwargs: Any) -> None:
        launch(self, *args, **kwargs)
        counts.append(self.num_launched)

    monkeypatch.setattr(ModelRunner, "launch", count)
    return counts


def test_the_next_step_is_launched_while_one_runs(
    world: World, checkpoint: Path, config: NodeConfig, launched: list[int]
) -> None:
    plans = planner().plans
    world.say(*plans)
    serve(world, checkpoint, Echo(world.runtime))
    assert launched == [1, 2, 2, 2]
    results = world.of(StepResult)
    assert [each.step for each in results] == [1, 2, 3, 4]
    assert not world.of(StepFailed)
    with torch.inference_mode():
        expected = load_runner(checkpoint, config)
    net: Any = SilentNet()
    assert [each.tokens for each in results] == [
        each.tokens for each in one_by_one(expected, plans, net)
    ]


def test_grammars_are_compiled_while_nothing_else_is_to_do(world: World, checkpoint: Path) -> None:
    world.say(CompileGrammar(key="good", grammar="start: /a+/"))
    world.say(CompileGrammar(key="bad", grammar="start: missing"))
    serve(world, checkpoint, Echo(world.runtime))
    answers = {each.key: each for each in world.of(GrammarReady)}
    assert (answers["good"].index, answers["good"].error) == (0, "")
    assert "missing" in answers["bad"].error
    assert len(world.of(GrammarReady)) == 2


def test_a_result_goes_out_before_the_next_plan_comes(world: World, checkpoint: Path) -> None:
    world.say(planner().plans[0])
    serve(world, checkpoint, Echo(world.runtime))
    assert world.seen[-3:] == ["StepPlan", "> StepResult", "idle"]


def test_a_halt_drops_what_is_launched_once_the_device_has_ended(
    world: World, checkpoint: Path, runtime: DelayedRuntime, launched: list[int]
) -> None:
    plans = planner().plans
    net = Echo(world.runtime)
    world.say(*plans[:2], Halt(generation=2))
    serve(world, checkpoint, net)
    assert launched == [1, 2]
    assert not world.of(StepResult)
    assert [each.generation for each in world.of(Halted)] == [2]
    assert net.is_closed
    assert not runtime.is_busy


def test_a_stop_ends_the_node_behind_the_device(
    world: World, checkpoint: Path, runtime: DelayedRuntime, launched: list[int]
) -> None:
    world.say(*planner().plans[:2], Stop(reason="the end"))
    serve(world, checkpoint, Echo(world.runtime))
    assert launched == [1, 2]
    assert not world.of(StepResult)
    assert not runtime.is_busy


def test_a_fault_on_the_device_fails_the_oldest_step(
    world: World, checkpoint: Path, launched: list[int]
) -> None:
    plans = planner().plans
    net = Echo(world.runtime)
    net.faults[2] = DeadlineExceeded("expert 0 is late")
    world.say(*plans)
    serve(world, checkpoint, net)
    assert launched == [1, 2]
    assert not world.of(StepResult)
    failed = world.of(StepFailed)
    assert [(each.step, each.message) for each in failed] == [(1, "expert 0 is late")]
    assert net.is_closed


def test_a_step_that_cannot_begin_fails_behind_the_one_before_it(
    world: World, checkpoint: Path
) -> None:
    plans = planner().plans
    net = Echo(world.runtime)
    net.refused = 2
    world.say(*plans)
    serve(world, checkpoint, net)
    assert [each.step for each in world.of(StepResult)] == [1]
    assert [each.step for each in world.of(StepFailed)] == [2]
    kinds = [kind for kind in world.seen if kind.startswith("> Step")]
    assert kinds == ["> StepResult", "> StepFailed"]
    assert net.is_closed


def test_a_net_that_needs_the_host_is_not_run_ahead_of(
    world: World, checkpoint: Path, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It waits for the device within the step, as a staged net does.
    net = SilentNet()
    monkeypatch.setattr(net, "is_graph_safe", False, raising=False)
    world.say(*planner(3).plans)
    serve(world, checkpoint, net)
    assert launched == [1, 1, 1]
    assert [each.step for each in world.of(StepResult)] == [1, 2, 3]
