"""The pace of an engine, on a virtual clock and with steps of known cost."""

from __future__ import annotations

import pytest

from server.scheduler.waiting.pace import (
    LEAST_SEATS,
    LONG_TOKEN_S,
    MEMORY_S,
    DrainRate,
    SeatLimit,
)

NUM_SEATS = 64


def busy(rate: DrainRate, *, seconds: float, every_s: float, prompt_s: float, now: float) -> float:
    """Let a request begin every so many seconds while others wait; returns the time then."""
    rate.note(now, is_waited=True)
    for _ in range(round(seconds / every_s)):
        now += every_s
        rate.note(now, is_waited=True)
        rate.begun(prompt_s)
    return now


def test_before_anything_was_measured_only_prompts_take_time() -> None:
    rate = DrainRate()
    assert rate.time_s(10, 3.5) == 3.5
    rate.begun(9.0)  # while nobody waited
    assert rate.time_s(10, 3.5) == 3.5


def test_time_that_prompts_do_not_explain_counts_by_request() -> None:
    rate = DrainRate()
    busy(rate, seconds=60.0, every_s=0.5, prompt_s=0.2, now=100.0)
    assert rate.time_s(4, 4 * 0.2) == pytest.approx(2.0, rel=0.05)
    # A prompt of 3 s takes 3 s, and a place.
    assert rate.time_s(1, 3.0) == pytest.approx(3.3, rel=0.05)


def test_prompts_that_are_faster_than_the_model_thinks() -> None:
    rate = DrainRate()
    busy(rate, seconds=60.0, every_s=0.5, prompt_s=2.0, now=0.0)
    assert rate.time_s(4, 8.0) == pytest.approx(2.0, rel=0.05)


def test_the_past_fades_only_while_requests_wait() -> None:
    rate = DrainRate()
    now = busy(rate, seconds=60.0, every_s=0.1, prompt_s=0.0, now=0.0)
    assert rate.time_s(10, 0.0) == pytest.approx(1.0, rel=0.05)
    rate.note(now, is_waited=False)
    rate.note(now + 1000.0, is_waited=False)
    assert rate.time_s(10, 0.0) == pytest.approx(1.0, rel=0.05)
    busy(rate, seconds=5 * MEMORY_S, every_s=1.0, prompt_s=0.0, now=now + 1000.0)
    assert rate.time_s(10, 0.0) == pytest.approx(10.0, rel=0.1)


def test_if_nothing_begins_the_wait_is_long_and_finite() -> None:
    rate = DrainRate()
    rate.note(0.0, is_waited=True)
    rate.note(30.0, is_waited=True)
    assert 20.0 < rate.time_s(1, 0.0) <= 30.0


def settled(*, fixed_s: float, row_s: float, load: int = NUM_SEATS) -> int:
    """Return the limit after many requests, of which as many run as may and are there."""
    limit = SeatLimit(NUM_SEATS)
    for _ in range(1000):
        running = min(limit.limit, load)
        step_s = fixed_s + row_s * running
        limit.stepped(step_s)
        limit.finished(decoding_s=31 * step_s, num_tokens=32, num_running=running, fixed_s=fixed_s)
    return limit.limit


def test_it_falls_to_where_tokens_come_in_time() -> None:
    found = settled(fixed_s=0.02, row_s=0.005)
    assert 0.02 + 0.005 * found <= LONG_TOKEN_S + 0.005
    assert found > 25


def test_a_batch_that_pays_is_not_limited() -> None:
    assert settled(fixed_s=0.5, row_s=0.001) == NUM_SEATS
    # Here up to where it still does.
    found = settled(fixed_s=0.1, row_s=0.00625)
    assert 0.25 <= 0.1 / (0.1 + 0.00625 * found) <= 0.35


def test_fast_steps_are_not_limited() -> None:
    assert settled(fixed_s=0.001, row_s=0.001) == NUM_SEATS


def test_some_always_run() -> None:
    assert settled(fixed_s=0.0, row_s=1.0) == LEAST_SEATS


def test_it_rises_again() -> None:
    limit = SeatLimit(NUM_SEATS)
    for token_s in [0.5] * 100 + [0.05] * 100:
        limit.stepped(token_s)
        limit.finished(decoding_s=9 * token_s, num_tokens=10, num_running=limit.limit, fixed_s=0.0)
    assert limit.limit == NUM_SEATS


def test_short_answers_tell_nothing() -> None:
    limit = SeatLimit(NUM_SEATS)
    limit.finished(decoding_s=9.0, num_tokens=3, num_running=9, fixed_s=0.0)
    assert limit.limit == NUM_SEATS
