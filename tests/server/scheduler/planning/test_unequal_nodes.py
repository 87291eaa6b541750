"""Nodes that differ in seats, tokens per step, cache and speed."""

from __future__ import annotations

import msgspec

from server.scheduler.micro_batching.cost import StepLoad
from tests.server.scheduler.engine import Engine, make_config, make_request, num_tokens_of
from topspin.plan.spec import EnginePlan

SMALL, LARGE = 4, 12


def unequal(plan: EnginePlan, **fields: list[object]) -> EnginePlan:
    """Return `plan` whose attention nodes have these values, in order."""
    nodes = list(plan.nodes)
    for name, values in fields.items():
        for idx, value in enumerate(values):
            nodes[idx] = msgspec.structs.replace(nodes[idx], **{name: value})
    return msgspec.structs.replace(plan, nodes=tuple(nodes))


def two_nodes() -> Engine:
    return Engine(make_config(num_nodes=2), num_blocks=[SMALL, LARGE])


def test_a_request_that_only_the_larger_node_can_hold_runs_there() -> None:
    engine = two_nodes()
    assert engine.policy.max_request_tokens == LARGE * 4
    assert engine.add(make_request("long", [1] * 30, max_tokens=8)) is None
    assert engine.schedule()
    assert set(engine.steps[-1].plans) == {1}
    engine.finish()


def test_while_the_larger_node_is_gone_its_requests_hold_up_nobody() -> None:
    engine = two_nodes()
    engine.halt([1])
    engine.resume([])
    assert engine.add(make_request("long", [1] * 30, max_tokens=8)) is None
    assert engine.add(make_request("short", [2] * 5, max_tokens=3, seed=1)) is None
    while engine.schedule():
        engine.answer(0)
    assert engine.clients["short"].ended
    assert not engine.clients["long"].outputs
    engine.halt()
    engine.resume([1])
    engine.finish()
    assert engine.clients["long"].ended


def test_an_optional_node_comes_with_its_cache_and_makes_no_request_longer() -> None:
    plan = unequal(make_config(num_nodes=2), optional=[False, True])
    engine = Engine(plan, num_blocks=[SMALL, 0])
    assert engine.policy.max_request_tokens == SMALL * 4
    for number in range(4):
        message = make_request(f"r{number}", [number] * 8, max_tokens=8, seed=number)
        assert engine.add(message) is None
    assert engine.schedule()
    assert set(engine.steps[-1].plans) == {0}
    engine.halt()
    engine.policy.equip(1, LARGE, LARGE)
    engine.renew(1)
    engine.resume([1])
    assert engine.schedule()
    assert set(engine.steps[-1].plans) == {0, 1}
    assert engine.policy.max_request_tokens == SMALL * 4
    assert engine.policy.stats(0, (), 0.0).num_blocks == SMALL + LARGE
    engine.finish()


def test_each_node_has_its_own_seats_and_tokens() -> None:
    plan = unequal(make_config(num_nodes=2), max_num_seqs=[1, 3], max_num_batched_tokens=[2, 40])
    engine = Engine(plan, num_blocks=64)
    for number in range(6):
        assert engine.add(make_request(f"r{number}", [number] * 8, seed=number)) is None
    assert engine.schedule()
    plans = engine.steps[-1].plans
    slices = {node: len(each.micro_batches[0].seq_ids) // 4 for node, each in plans.items()}
    assert slices == {0: 1, 1: 3}
    engine.finish()


def test_a_slow_node_alone_has_its_whole_budget() -> None:
    engine = Engine(make_config(num_nodes=2, max_num_batched_tokens=16), num_blocks=64)
    fit = engine.policy._fit.fit()
    for _ in range(50):
        for node, attention_s in enumerate((0.1, 1.0)):
            fit.add_attention(node, StepLoad(1, 16, 136.0), attention_s)
    assert engine.add(make_request("first", [1] * 40, max_tokens=2)) is None
    assert engine.add(make_request("second", [2] * 40, max_tokens=2, seed=1)) is None
    assert engine.schedule()
    assert num_tokens_of(engine.steps[-1], 0) == [16]
    engine.halt([0])
    engine.resume([])
    assert engine.schedule()
    assert num_tokens_of(engine.steps[-1], 1) == [16]
    engine.finish()
