"""The measured rate of first tokens, on a virtual clock."""

from __future__ import annotations

import pytest

from server.scheduler.waiting.first_token import MEMORY_S, DrainRate


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
