"""Lost nodes, at any time: every output equals that of an undisturbed run, once and complete."""

from __future__ import annotations

import msgspec
import pytest

from server.scheduler.planning.policy import MAX_REPLAYS
from tests.server.scheduler.engine import GATEWAY, Engine, make_config, make_request


def test_replays_find_room_in_a_queue_that_new_requests_have_filled() -> None:
    engine = Engine(make_config(max_num_queued_reqs=2, max_num_seqs=1))
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


def test_progress_forgives_earlier_losses() -> None:
    engine = Engine(make_config())
    engine.add(make_request("r", [1, 2], max_tokens=4 * MAX_REPLAYS))
    for count in range(1, 2 * MAX_REPLAYS):
        run_until_tokens(engine, "r", count)
        engine.halt()
        engine.resume()
    engine.finish()
    assert engine.clients["r"].failure is None


def is_computed(engine: Engine, request_id: str, from_token: int) -> bool:
    """Say whether a step under way has a request that has so many tokens."""
    request = engine.policy._requests.get((GATEWAY, request_id))
    sequence = None if request is None else request.sequence
    return (
        sequence is not None
        and sequence.num_in_flight > 0
        and len(engine.clients[request_id].tokens) >= from_token
    )


@pytest.mark.parametrize("from_token", [0, 3])
@pytest.mark.parametrize("poison", [0, 4, 7])
def test_of_many_requests_only_the_one_by_which_nodes_die_ends(
    poison: int, from_token: int
) -> None:
    engine = Engine(make_config(max_num_batched_tokens=64, num_nodes=2))
    for number in range(8):
        engine.add(make_request(f"r{number}", [number] * 3, seed=number))
    num_deaths = 0
    while engine.turn():
        while engine.schedule():
            if is_computed(engine, f"r{poison}", from_token):
                num_deaths += 1
                engine.halt(has_died=True)
                engine.resume()
        engine.policy.check_integrity()
    assert num_deaths == 3
    failures = {name: client.failure for name, client in engine.clients.items() if client.failure}
    assert [(name, failure.code) for name, failure in failures.items()] == [
        (f"r{poison}", "poison")
    ]
    engine.finish()


def test_suspected_requests_may_be_aborted_and_a_last_one_ends_at_once() -> None:
    engine = Engine(make_config(max_num_batched_tokens=64))
    for number in range(4):
        engine.add(make_request(f"r{number}", [number] * 3, seed=number))
    for _ in range(2):
        assert engine.schedule()
        engine.halt(has_died=True)
        engine.resume()
    assert engine.policy.num_waiting == 4
    engine.abort("r2")
    assert engine.schedule()
    assert engine.policy.num_running == 1
    engine.abort("r0")
    engine.add(make_request("new", [9], seed=9))
    assert engine.schedule()
    assert engine.policy.num_running == 2  # the next, and one that nothing is known of
    engine.halt(has_died=True)
    failed = engine.clients["r1"].failure
    assert failed is not None
    assert (failed.code, failed.status) == ("poison", 500)
    engine.resume()
    engine.finish()
    assert [name for name, client in engine.clients.items() if client.failure] == ["r1"]


def test_requests_are_queued_while_nothing_runs_and_end_when_told() -> None:
    engine = Engine(make_config(max_num_queued_reqs=2, max_num_seqs=1))
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


def test_a_request_that_came_with_output_has_begun_with_its_next_token() -> None:
    engine = Engine(make_config(block_size=16))
    engine.add(make_request("r", [1, 2, 3], max_tokens=40))
    run_until_tokens(engine, "r", 4)
    engine.replace_scheduler()
    run_until_tokens(engine, "r", 5)
    assert not any(each.unbegun for each in engine.policy._entrance.tenants.active)
    engine.finish()
