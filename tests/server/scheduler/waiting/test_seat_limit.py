"""The limit of requests that run at once, with steps of known cost."""

from __future__ import annotations

from server.scheduler.waiting.seat_limit import LEAST_SEATS, LONG_TOKEN_S, SeatLimit

NUM_SEATS = 64


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
