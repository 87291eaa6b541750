"""Lost nodes, at any time: every output equals that of an undisturbed run, once and complete."""

from __future__ import annotations

import random

import msgspec
import pytest

from server.scheduler.planning.policy import MAX_REPLAYS
from tests.server.scheduler.engine import Engine, make_config, make_request
from tests.server.scheduler.planning.test_policy_random import random_drafts, random_request


@pytest.mark.parametrize(
    "seed", [*range(24), *(pytest.param(each, marks=pytest.mark.slow) for each in range(24, 80))]
)
def test_outputs_survive_any_losses(seed: int) -> None:
    """Random work, answers, losses and returns, late results, and other schedulers in between."""
    rng = random.Random(seed)
    num_nodes = rng.choice((1, 2, 3))
    config = make_config(
        block_size=rng.choice((1, 2, 4)),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice((4, 9, 16)),
        max_model_len=40,
        num_nodes=num_nodes,
        micro_batches=rng.choice((None, 1, 2)),
        prefix_caching=rng.random() < 0.8,
        max_preemptions=rng.choice((0, 1, 4)),
    )
    num_blocks = -(-40 // config.kv_cache.block_size) + rng.choice((0, 3, 100))
    engine = Engine(config, num_blocks=num_blocks, **random_drafts(rng))
    number = num_losses = num_schedulers = 0
    is_halted = False
    for _ in range(500):
        action = rng.choice(
            ("add", "schedule", "schedule", "answer", "answer", "answer", "abort", "lose", "late")
        )
        if rng.random() < 0.02:
            engine.replace_scheduler()
            num_schedulers += 1
            is_halted = False
        if action == "add" and number < 25:
            assert engine.add(random_request(rng, number, max_total=40)) is None
            number += 1
        elif action == "schedule":
            assert not (engine.schedule() and is_halted)
        elif action == "answer":
            engine.answer(rng.randrange(num_nodes))
        elif action == "abort" and number and rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(number)}")
        elif action == "late":
            engine.answer_late()
        elif action == "lose" and rng.random() < 0.3:
            if is_halted:
                absent = [i for i in range(num_nodes) if i not in engine.present]
                back = [i for i in absent if rng.random() < 0.7]
                if engine.present or back:
                    engine.resume(back)
                    is_halted = False
            else:
                num_losses += 1
                lost = [i for i in engine.present if rng.random() < 0.4]
                engine.halt(lost)
                is_halted = True
        engine.policy.check_integrity()
    if not is_halted:
        engine.halt()
    engine.resume(range(num_nodes))
    engine.finish()
    while engine.late:
        engine.answer_late()
    assert num_losses > 0
    assert num_schedulers > 0
    failures = [client.failure for client in engine.clients.values() if client.failure]
    assert all(failure.code == "node_lost" for failure in failures)


def test_replays_find_room_in_a_queue_that_new_requests_have_filled() -> None:
    engine = Engine(make_config(max_queued_requests=2, max_num_seqs=1))
    for number in range(3):
        assert engine.add(make_request(f"new{number}", [number], seed=number)) is None
    for number in range(4):
        request = make_request(f"old{number}", [number], seed=10 + number)
        refusal = engine.add(msgspec.structs.replace(request, replayed=True))
        assert (refusal is None) == (number < 3)
    engine.finish()
    assert engine.policy.stats(0, (), engine.now).num_replays == 3


def run_until_tokens(engine: Engine, request_id: str, count: int) -> None:
    while len(engine.clients[request_id].tokens) < count:
        assert engine.turn()


def test_a_survivor_recomputes_only_what_was_not_published() -> None:
    engine = Engine(make_config(block_size=4, max_model_len=64))
    engine.add(make_request("r", list(range(10, 30)), max_tokens=20))
    run_until_tokens(engine, "r", 8)
    engine.halt()
    engine.resume()
    assert engine.schedule()
    (new,) = engine.steps[-1].plans[0].new
    assert new.num_computed >= 24
    assert engine.steps[-1].ticket.previous == 0
    assert engine.steps[-1].ticket.generation == 2
    assert engine.steps[-1].ticket.table_version == 2
    engine.finish()


def test_a_lost_node_has_nothing_left_and_the_others_go_on() -> None:
    engine = Engine(make_config(num_nodes=2))
    for number in range(4):
        engine.add(make_request(f"r{number}", [number] * 6, max_tokens=12, seed=number))
    for number in range(4):
        run_until_tokens(engine, f"r{number}", 2)
    engine.halt([0])
    assert not engine.schedule()
    engine.resume()
    engine.turn()
    assert set(engine.steps[-1].plans) == {1}
    num_known = sum(len(client.tokens) + 6 for client in engine.clients.values())
    assert num_known > 0
    engine.halt()
    engine.resume([0])
    engine.finish()
    assert {index for step in engine.steps for index in step.plans} == {0, 1}


def test_replays_keep_the_order_of_arrival_and_are_no_preemptions() -> None:
    config = make_config(max_num_seqs=1, max_num_batched_tokens=8)
    engine = Engine(config)
    for number in range(3):
        engine.add(make_request(f"r{number}", [number] * 3, max_tokens=6, seed=number))
    run_until_tokens(engine, "r0", 2)
    for _ in range(3):
        engine.halt()
        engine.add(
            make_request(
                f"late{engine.formation.generation}", [9], seed=90 + engine.formation.generation
            )
        )
        engine.resume()
        run_until_tokens(engine, "r0", len(engine.clients["r0"].tokens) + 1)
        assert not engine.clients["r1"].tokens
    engine.finish()
    assert engine.policy.stats(0, (), engine.now).num_preemptions == 0


def test_what_kills_every_generation_fails_and_the_others_do_not() -> None:
    engine = Engine(make_config(max_num_seqs=1, max_num_batched_tokens=8))
    engine.add(make_request("poison", [1, 2], max_tokens=9))
    engine.add(make_request("waits", [3], max_tokens=9, seed=1))
    for attempt in range(MAX_REPLAYS + 1):
        assert engine.clients["poison"].failure is None, attempt
        assert engine.schedule()
        engine.halt()
        engine.resume()
    failure = engine.clients["poison"].failure
    assert failure is not None
    assert (failure.code, failure.status) == ("node_lost", 503)
    engine.finish()
    assert engine.clients["waits"].failure is None


def test_progress_forgives_earlier_losses() -> None:
    engine = Engine(make_config())
    engine.add(make_request("r", [1, 2], max_tokens=4 * MAX_REPLAYS))
    for count in range(1, 2 * MAX_REPLAYS):
        run_until_tokens(engine, "r", count)
        engine.halt()
        engine.resume()
    engine.finish()
    assert engine.clients["r"].failure is None


def test_requests_are_queued_while_nothing_runs_and_end_when_told() -> None:
    engine = Engine(make_config(max_queued_requests=2, max_num_seqs=1))
    engine.halt([0])
    for number in range(3):
        assert engine.add(make_request(f"r{number}", [1], seed=number)) is None
    refused = engine.add(make_request("too many", [1], seed=7))
    assert refused is not None
    assert refused.code == "rate_limit_exceeded"
    assert not engine.schedule()
    assert engine.policy.stats(0, (), engine.now).num_waiting == 3
    engine.resume([0])
    engine.finish()
