"""Tenants: the order of requests that wait, by rank and by deadline, and limits per minute."""

from __future__ import annotations

import pytest

from server.scheduler.planning.sequence import Request
from server.scheduler.waiting.tenants import MIN_COMPACTED, Allowance, RequestHeap
from tests.server.scheduler.engine import make_request
from tests.server.scheduler.planning.test_intake import INTAKE
from topspin.messages import Tenant


def request(arrival: int) -> Request:
    """Return the request that arrived as number `arrival`."""
    return INTAKE.request(make_request("r", [1]), peer=b"gateway", arrival=arrival)


def test_a_request_that_comes_back_has_its_old_place() -> None:
    queue = RequestHeap()
    first, second, third = request(0), request(1), request(2)
    queue.push(first.rank, first)
    queue.push(second.rank, second)
    assert queue.first() is first
    assert queue.pop() is first
    queue.push(third.rank, third)
    queue.push(first.rank, first)
    assert [queue.pop() for _ in range(3)] == [first, second, third]


def test_a_lower_priority_comes_first_whenever_it_arrived() -> None:
    queue = RequestHeap()
    requests = [request(arrival) for arrival in range(4)]
    for each, priority in zip(requests, (0, 5, -1, 0), strict=True):
        each.priority = priority
        queue.push(each.rank, each)
    assert [queue.pop().arrival for _ in requests] == [2, 0, 3, 1]


def test_ended_requests_behind_others_are_not_kept() -> None:
    queue = RequestHeap()
    only = request(0)
    queue.push(only.rank, only)
    for arrival in range(1, 10 * MIN_COMPACTED):
        late = request(arrival)
        late.priority = 9
        queue.push(late.rank, late)
        late.ended = True
    assert len(queue._heap) <= MIN_COMPACTED + 1
    assert queue.count() == 1


def test_ended_requests_are_passed_over() -> None:
    queue = RequestHeap()
    first, second = request(0), request(1)
    queue.push(first.rank, first)
    queue.push(second.rank, second)
    first.ended = True
    assert queue.count() == 1
    assert queue.first() is second
    second.ended = True
    assert queue.first() is None
    assert queue.count() == 0


def test_only_what_is_due_is_taken() -> None:
    queue = RequestHeap()
    requests = [request(arrival) for arrival in range(4)]
    for each, at in zip(requests, (3.0, 1.0, 2.0, 1.0), strict=True):
        queue.push((at, each.number), each)
    requests[1].ended = True
    assert queue.pop_until(0.9) is None
    assert [queue.pop_until(2.0) for _ in range(3)] == [requests[3], requests[2], None]
    assert queue.first() is requests[0]


def test_a_minutes_worth_may_be_used_at_once_and_fills_evenly() -> None:
    allowance, tenant = Allowance(), Tenant(requests_per_minute=30)
    for _ in range(30):
        assert allowance.wait_s(tenant, 0.0) == 0.0
        allowance.take(num_requests=1)
    assert allowance.wait_s(tenant, 0.0) == pytest.approx(2.0)
    assert allowance.wait_s(tenant, 1.5) == pytest.approx(0.5)
    assert allowance.wait_s(tenant, 2.0) == 0.0


def test_what_was_overdrawn_is_waited_for() -> None:
    allowance, tenant = Allowance(), Tenant(tokens_per_minute=60)
    allowance.take(num_tokens=119)
    assert allowance.wait_s(tenant, 0.0) == pytest.approx(60.0)
    assert allowance.wait_s(tenant, 59.0) == pytest.approx(1.0)


def test_a_limit_that_changes_holds_at_once() -> None:
    allowance = Allowance()
    allowance.take(num_requests=10)
    assert allowance.wait_s(Tenant(), 0.0) == 0.0
    assert allowance.wait_s(Tenant(requests_per_minute=10), 0.0) == pytest.approx(6.0)
    assert allowance.wait_s(Tenant(requests_per_minute=20), 0.0) == 0.0
