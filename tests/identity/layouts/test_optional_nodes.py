"""Optional nodes join late, take load and leave again, and no token changes. Nodes are threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.engine import Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf
from tests.structs import changed
from topspin.messages import ExpertCounts, StepResult, unpack_ints
from topspin.plan.rules.checks import check_plan
from topspin.plan.settings import BalancePolicy
from topspin.plan.spec import EnginePlan
from topspin.processes.channel import ControlServer, Event, Received
from topspin.processes.node_life import NodeLife, Worker

NUM_STREAMS = 4
NUM_EXPERTS = 8


@pytest.fixture(scope="module")
def case(case_of: CaseOf) -> Case:
    whole = case_of("qwen2_moe")
    return Case(whole.path, whole.prompts[:NUM_STREAMS], whole.tokens[:NUM_STREAMS])


def plan_of(case: Case, transport: str = "shm") -> EnginePlan:
    """Return a plan of one node of each role, and another one of each that is optional."""
    plan = engine_config(
        case.path,
        attention_nodes=2,
        expert_nodes=2,
        transport=transport,  # type: ignore[arg-type]
        max_num_seqs=3,
        restart=True,
        restart_deadline_s=60.0,
        redundant_experts=NUM_EXPERTS,
        balance=BalancePolicy(interval_s=0.0),
    )
    nodes = tuple(changed(node, {"optional": node.index == 1}) for node in plan.nodes)
    plan = changed(plan, {"nodes": nodes})
    check_plan(plan)
    return plan


class Load:
    """What nodes have reported: tokens sampled by attention nodes, rows served by expert nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: Counter[str] = Counter()
        poll = ControlServer.poll

        def watched(server: ControlServer, timeout_s: float | None) -> list[Event]:
            events = poll(server, timeout_s)
            for event in events:
                if isinstance(event, Received):
                    self._add(event.message)
            return events

        monkeypatch.setattr(ControlServer, "poll", watched)

    def _add(self, message: object) -> None:
        if isinstance(message, StepResult):
            self.of[f"attention {message.index}"] += len(unpack_ints(message.tokens))
        elif isinstance(message, ExpertCounts):
            rows = sum(sum(unpack_ints(each)) for each in message.counts)
            self.of[f"expert {message.index}"] += rows


def watch_lives(monkeypatch: pytest.MonkeyPatch) -> dict[str, NodeLife]:
    """Return the life of each node that has begun to serve."""
    lives: dict[str, NodeLife] = {}
    serve = NodeLife.serve

    def watched(life: NodeLife, worker: Worker) -> None:
        lives[f"{life._role} {life._index}"] = life
        serve(life, worker)

    monkeypatch.setattr(NodeLife, "serve", watched)
    return lives


def streams_with(engine: Engine, case: Case, event: Callable[[], None]) -> None:
    """Run all streams, with `event` once each has some tokens; all must end with theirs."""
    ids = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in case.prompts]
    engine.collect(until=lambda: any(len(engine.requests[each].tokens) >= 4 for each in ids))
    event()
    engine.collect()
    assert [engine.requests[each].failed for each in ids] == [None] * len(ids)
    assert [engine.requests[each].tokens for each in ids] == case.tokens


def until_joined(engine: Engine, case: Case, name: str) -> None:
    """Run streams until the engine has formed with node `name`."""
    num_ready = engine.states.count("ready")
    streams_with(engine, case, lambda: engine.start_node(name))
    while engine.states.count("ready") == num_ready:
        streams_with(engine, case, lambda: None)


def test_optional_nodes_join_late_take_load_and_leave(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(monkeypatch)
    optional = ["expert 1", "attention 1"]
    lives = watch_lives(monkeypatch)
    with Engine(plan_of(case), external=optional) as engine:
        engine.wait_until_ready()
        assert engine.details[-1] == ""
        for name in optional:
            until_joined(engine, case, name)
            while not load.of[name]:
                streams_with(engine, case, lambda: None)
        for name in optional:
            engine.may_restart.clear()
            streams_with(engine, case, lives[name].ask_to_leave)
            while name not in engine.exit_statuses:
                streams_with(engine, case, lambda: None)
            assert engine.exit_statuses[name] == 0
            before = load.of[name]
            streams_with(engine, case, lambda: None)
            assert load.of[name] == before
        stats = engine.stats()
        assert engine.dead == []
        assert engine.details[-1] == ""
    assert stats.num_replays > 0
