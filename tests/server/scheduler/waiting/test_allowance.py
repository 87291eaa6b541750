"""A tenant's use of its limits per minute, on a virtual clock."""

from __future__ import annotations

import pytest

from server.scheduler.waiting.allowance import Allowance
from topspin.messages import Tenant


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
