"""More requests than the engine can serve, on a virtual clock: who is refused, and who waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from server.scheduler.planning.admission import MAX_PASSED
from tests.pairwise import few
from tests.server.scheduler.engine import Engine, make_config, make_request
from topspin.errors import Overloaded, RequestTimeout
from topspin.messages import Tenant
from topspin.plan.settings import DEFAULT_MAX_TTFT_S, SchedulingPolicy

SEATS = 4
OUTPUT = 8
STEP_S = 0.05


def overloaded(**settings: Any) -> Engine:
    """Return an engine of SEATS seats whose steps take STEP_S each."""
    config = make_config(max_num_seqs=SEATS, max_num_batched_tokens=64, **settings)
    return Engine(config, num_blocks=64, step_s=lambda num_rows: STEP_S)


class Load:
    """Requests sent to an engine at their times, and what became of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sent_at: dict[str, float] = {}
        self.begun_at: dict[str, float] = {}
        self._numbers = iter(range(1, 10**6))

    def send(self, tenant: Tenant | None = None, **request: Any) -> str:
        """Send a request now; returns its id, which begins with its tenant's name."""
        number = next(self._numbers)
        name = f"{tenant.name if tenant else ''}{number}"
        prompt = [number % 13, number % 11, number % 7]
        message = make_request(
            name, prompt, max_tokens=OUTPUT, seed=number, salt=name, tenant=tenant, **request
        )
        self.sent_at[name] = self.engine.now
        self.engine.add(message)
        return name

    def turn(self) -> None:
        """Let the engine work for a step, or wait for a moment if it has no work."""
        engine = self.engine
        engine.receive(engine.policy.expire(engine.now))
        if not engine.turn():
            engine.now += STEP_S / 10
        for name, client in engine.clients.items():
            if client.tokens and name not in self.begun_at:
                self.begun_at[name] = engine.now

    def run(self, arrivals: Iterator[float], seconds: float) -> None:
        """Send a request at each of the times, for so long, and serve them to the end."""
        start = self.engine.now
        at = start + next(arrivals)
        while self.engine.now < start + seconds:
            while at <= self.engine.now:
                self.send()
                at += next(arrivals)
            self.turn()
        while self.engine.policy.num_running + self.engine.policy.num_waiting:
            self.turn()

    def ttfts(self) -> list[float]:
        """Return the times to first token of those that had one, shortest first."""
        return sorted(at - self.sent_at[name] for name, at in self.begun_at.items())


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Yield the times between arrivals."""
    dice = random.Random(seed)
    while True:
        yield dice.expovariate(rate)


def goodput(load: Load, bound_s: float) -> int:
    """Return how many had their first token in time."""
    return sum(ttft <= bound_s for ttft in load.ttfts())


@pytest.fixture(scope="module")
def capacity() -> float:
    """Return how many requests a second are served while enough of them wait."""
    load = Load(overloaded(max_ttft_s=0.0))
    load.run(poisson(100.0), 3.0)
    return len(load.begun_at) / load.engine.now


@pytest.mark.parametrize("factor", few([1, 2, 5], 2))
def test_more_than_it_can_serve_costs_no_goodput(factor: int, capacity: float) -> None:
    bound_s, seconds = 2.0, 60.0
    load = Load(overloaded(max_ttft_s=bound_s))
    load.run(poisson(factor * capacity), seconds)
    ttfts = load.ttfts()
    assert goodput(load, bound_s) >= 0.95 * capacity * seconds
    assert ttfts[int(0.99 * len(ttfts))] <= bound_s
    failures = [each.failure for each in load.engine.clients.values() if each.failure]
    assert all(each.code == Overloaded.code for each in failures)
    # Nearly all are told at once.
    stats = load.engine.policy.stats(0, (), load.engine.now)
    assert stats.num_refused.get("late", 0) <= 0.01 * max(100, len(failures))
    assert sum(stats.num_refused.values()) == len(failures)


@pytest.mark.slow
def test_without_a_bound_everybody_waits(capacity: float) -> None:
    load = Load(overloaded(max_ttft_s=0.0))
    load.run(poisson(2 * capacity), 30.0)
    assert not any(each.failure for each in load.engine.clients.values())
    assert load.ttfts()[-1] > 10.0


def test_who_is_refused_is_told_when_to_come_again(capacity: float) -> None:
    load = Load(overloaded(max_ttft_s=2.0))
    load.run(poisson(5 * capacity), 20.0)
    refused = []
    while not refused:
        load.send()
        refused = [each.failure for each in load.engine.clients.values() if each.failure][-1:]
        if load.engine.clients[str(len(load.sent_at))].failure is None:
            refused = []
    failure = refused[0]
    assert failure is not None
    again_at = load.engine.now + failure.retry_after_s
    while load.engine.now < again_at:
        load.turn()
    name = load.send()
    assert load.engine.clients[name].failure is None


def test_a_long_prompt_may_wait_longer_unless_somebody_says_how_long() -> None:
    limits = SchedulingPolicy()
    assert limits.first_token_bound_s(None, 0.1) == DEFAULT_MAX_TTFT_S
    assert limits.first_token_bound_s(None, 20.0) == 60.0
    assert limits.first_token_bound_s(5.0, 20.0) == 5.0
    assert limits.first_token_bound_s(500.0, 20.0) == 500.0
    asked = SchedulingPolicy(max_ttft_s=7.0)
    assert [asked.first_token_bound_s(each, 20.0) for each in (None, 5.0, 500.0)] == [7.0, 5.0, 7.0]
    assert SchedulingPolicy(max_ttft_s=0.0).first_token_bound_s(None, 1.0) == float("inf")


# Deadlines.


def test_a_request_is_refused_by_its_own_deadline() -> None:
    load = Load(overloaded(max_ttft_s=0.0))
    load.run(iter([0.0] * 40 + [1e9]), 0.0001)
    for _ in range(40):
        load.send()
    for _ in range(4):
        load.turn()
    refused = load.engine.clients[load.send(timeout_s=1.0)].failure
    assert refused is not None
    assert refused.status == 429
    assert load.engine.clients[load.send(timeout_s=60.0)].failure is None
    assert load.engine.clients[load.send()].failure is None


def test_a_request_whose_time_is_over_ends() -> None:
    load = Load(overloaded(max_ttft_s=0.0))
    name = load.send(timeout_s=0.15)
    while not load.engine.clients[name].ended:
        load.turn()
    client = load.engine.clients[name]
    assert client.failure is not None
    assert (client.failure.code, client.failure.status) == (RequestTimeout.code, 504)
    assert client.tokens
    load.engine.finish()


def test_a_request_whose_time_is_over_before_its_turn_gets_to_no_node() -> None:
    load = Load(overloaded(max_ttft_s=0.0))
    before = [load.send() for _ in range(SEATS)]
    load.turn()
    name = load.send(timeout_s=0.15)
    while not load.engine.clients[name].ended:
        load.turn()
    failure = load.engine.clients[name].failure
    assert failure is not None
    assert failure.status == 429
    load.engine.finish()
    news = [each.request_id for step in load.engine.steps for each in step.plans[0].new]
    assert name not in news
    assert all(load.engine.clients[each].failure is None for each in before)


def test_who_waited_too_long_is_refused_unless_the_engine_recovered_meanwhile() -> None:
    load = Load(overloaded(max_ttft_s=2.0))
    engine = load.engine
    running = [load.send() for _ in range(SEATS)]
    engine.schedule()
    late = load.send()
    engine.halt()
    engine.receive(engine.policy.expire(engine.now))
    engine.now += 5.0
    engine.receive(engine.policy.expire(engine.now))
    assert engine.clients[late].failure is None
    engine.resume()
    engine.receive(engine.policy.expire(engine.now))
    engine.now += 1.9
    engine.receive(engine.policy.expire(engine.now))
    assert engine.clients[late].failure is None
    engine.schedule()  # the others have their seats again
    engine.now += 0.2
    engine.receive(engine.policy.expire(engine.now))
    refused = engine.clients[late].failure
    assert refused is not None
    assert refused.status == 429
    engine.finish()
    assert all(engine.clients[each].tokens for each in running)


def test_nobody_is_late_who_fits_only_a_node_that_is_absent() -> None:
    config = make_config(num_nodes=2, max_model_len=64, max_ttft_s=2.0)
    engine = Engine(config, num_blocks=[16, 4])
    engine.halt(lost=[0])
    engine.resume()
    engine.add(make_request("large", [1] * 30, max_tokens=4))
    engine.add(make_request("small", [2] * 3, max_tokens=4, seed=1))
    while engine.turn():
        pass
    engine.now += 60.0
    engine.receive(engine.policy.expire(engine.now))
    assert engine.clients["small"].tokens
    assert engine.clients["large"].failure is None
    engine.halt()
    engine.resume(back=[0])
    engine.finish()
    assert engine.clients["large"].tokens


def test_nobody_is_late_because_a_node_hangs() -> None:
    load = Load(overloaded(max_ttft_s=2.0))
    engine = load.engine
    for _ in range(SEATS):
        load.send()
    load.turn()
    assert engine.schedule()
    late = load.send()
    for _ in range(100):  # no node gets on with its step
        engine.now += 0.2
        engine.receive(engine.policy.expire(engine.now))
    assert engine.clients[late].failure is None
    engine.answer(0)
    engine.receive(engine.policy.expire(engine.now))
    assert engine.clients[late].failure is None
    engine.finish()
    assert engine.clients[late].tokens


# Tenants.

FLOOD = Tenant(name="flood")
OTHER = Tenant(name="other")


def shared(load: Load, tenants: dict[Tenant, int], seconds: float) -> dict[str, int]:
    """Keep so many requests of each tenant under way; returns how many of each had a token."""
    end = load.engine.now + seconds
    while load.engine.now < end:
        for tenant, count in tenants.items():
            under_way = sum(
                not client.ended and client.message.tenant == tenant
                for client in load.engine.clients.values()
            )
            for _ in range(count - under_way):
                load.send(tenant)
        load.turn()
        ended = [name for name, client in load.engine.clients.items() if client.ended]
        for name in ended:
            del load.engine.clients[name]
    return {
        tenant.name: sum(name.startswith(tenant.name) for name in load.begun_at)
        for tenant in tenants
    }


def test_a_flood_leaves_another_tenant_its_share() -> None:
    load = Load(overloaded(max_ttft_s=0.0))
    begun = shared(load, {FLOOD: 60, OTHER: 4}, 60.0)
    assert begun["other"] >= 0.9 * begun["flood"]
    waits = [at - load.sent_at[name] for name, at in load.begun_at.items() if name[0] == "o"]
    assert sorted(waits)[int(0.95 * len(waits))] < 1.0


def test_shares_are_in_proportion_to_weights() -> None:
    heavy = Tenant(name="heavy", weight=3.0)
    begun = shared(Load(overloaded(max_ttft_s=0.0)), {heavy: 20, OTHER: 20}, 60.0)
    assert begun["heavy"] == pytest.approx(3 * begun["other"], rel=0.1)


@pytest.mark.slow
def test_a_tenant_that_comes_back_has_no_credit() -> None:
    load = Load(overloaded(max_ttft_s=0.0))
    shared(load, {FLOOD: 8}, 30.0)
    load.begun_at.clear()
    begun = shared(load, {FLOOD: 8, OTHER: 8}, 30.0)
    assert begun["flood"] >= 0.8 * begun["other"]


def test_a_new_tenant_gets_seats_of_one_that_has_them_all() -> None:
    load = Load(overloaded(max_ttft_s=0.0))
    for _ in range(3 * SEATS):
        load.send(FLOOD)
    for _ in range(3):
        load.turn()
    name = load.send(OTHER)
    sent_at = load.engine.now
    while name not in load.begun_at:
        load.turn()
    assert load.begun_at[name] - sent_at <= 5 * STEP_S  # a request of the flood takes more
    load.engine.finish()


def test_a_tenant_alone_gives_no_seat_away() -> None:
    load = Load(overloaded(max_ttft_s=0.0))
    shared(load, {FLOOD: 20}, 10.0)
    assert load.engine.policy.stats(0, (), 0.0).num_preemptions == 0


def test_one_tenant_is_refused_while_another_is_served(capacity: float) -> None:
    load = Load(overloaded(max_ttft_s=2.0))
    shared(load, {FLOOD: 60}, 20.0)
    assert load.engine.add(make_request("f", [1], seed=10**6, tenant=FLOOD)) is not None
    assert load.engine.add(make_request("o", [1], seed=10**6 + 1, tenant=OTHER)) is None


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"max_concurrency": 2}, "concurrency"),
        ({"requests_per_minute": 2}, "rate"),
        ({"tokens_per_minute": 6}, "rate"),
    ],
)
def test_a_tenants_limits(limits: dict[str, int], cause: str) -> None:
    load = Load(overloaded())
    limited = Tenant(name="limited", **limits)
    names = [load.send(limited) for _ in range(3)]
    failures = [load.engine.clients[name].failure for name in names]
    assert failures[:2] == [None, None]
    assert failures[2] is not None
    assert failures[2].status == 429
    assert load.engine.policy.stats(0, (), 0.0).num_refused == {cause: 1}
    assert load.engine.clients[load.send(OTHER)].failure is None
    load.engine.finish()
    load.engine.now += failures[2].retry_after_s + (0 if cause == "concurrency" else 240.0)
    assert load.engine.clients[load.send(limited)].failure is None


# What is in the way.


def test_a_long_prompt_holds_up_no_short_ones() -> None:
    engine = Engine(make_config(max_num_batched_tokens=8, max_model_len=64))
    engine.add(make_request("long", [1] * 60, max_tokens=2, seed=0))
    engine.schedule()
    engine.add(make_request("short", [2] * 4, max_tokens=2, seed=1))
    turns = 0
    while not engine.clients["short"].tokens:
        engine.turn()
        turns += 1
    assert turns <= 3
    assert not engine.clients["long"].tokens
    engine.finish()


def test_short_prompts_do_not_starve_a_long_one() -> None:
    engine = Engine(make_config(max_num_batched_tokens=8, max_model_len=64))
    engine.add(make_request("long", [1] * 40, max_tokens=2, seed=0))
    for turn in range(1, 40):
        engine.add(make_request(f"r{turn}", [turn % 13] * 6, max_tokens=1, seed=turn))
        engine.turn()
    assert engine.clients["long"].tokens
    engine.finish()


def test_many_choices_hold_up_no_request() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    for choice in range(20):
        engine.add(make_request(f"many#1-{choice}", [1], max_tokens=2, seed=choice))
    singles = [f"single#{number}-0" for number in (2, 3)]
    for seed, name in enumerate(singles, start=20):
        engine.add(make_request(name, [2], max_tokens=2, seed=seed))
    engine.finish()
    admitted = [new.request_id for step in engine.steps for new in step.plans[0].new]
    assert admitted[:5] == ["many", "single", "many", "single", "many"]


def test_a_request_without_room_lets_some_others_pass_and_then_none() -> None:
    config = make_config(block_size=1, max_model_len=40, prefix_caching=False)
    engine = Engine(config, num_blocks=40)
    engine.add(make_request("first", [1] * 10, max_tokens=30, seed=0))
    engine.schedule()
    engine.add(make_request("large", [2] * 32, max_tokens=2, seed=1))
    for number in range(2, 60):
        engine.add(make_request(f"r{number}", [number % 13], max_tokens=1, seed=number))
    while not engine.clients["large"].tokens:
        engine.turn()
    passed = [name for name, client in engine.clients.items() if name[0] == "r" and client.tokens]
    assert 1 <= len(passed) <= MAX_PASSED + config.attention[0].max_num_seqs
    engine.finish()


# Caps.


@pytest.mark.parametrize(
    ("limits", "cause"),
    [({"max_num_queued_tokens": 8}, "tokens"), ({"max_num_queued_reqs": 0}, "queue")],
)
def test_a_full_queue(limits: dict[str, int], cause: str) -> None:
    engine = Engine(make_config(max_num_seqs=1, **limits))
    assert engine.add(make_request("a", [1] * 7, seed=0)) is None
    refused = engine.add(make_request("b", [2] * 7, seed=1))
    assert refused is not None
    assert refused.status == 429
    assert engine.policy.stats(0, (), 0.0).num_refused == {cause: 1}
    engine.finish()
    assert engine.add(make_request("c", [3] * 7, seed=2)) is None
    engine.finish()
