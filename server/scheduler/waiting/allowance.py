"""A tenant's allowance: the requests and the tokens that it may use in a minute.

Owns two token buckets. Each holds a minute's worth, which may be used at once, and fills evenly.
Output tokens are known when they are there, so a bucket may be overdrawn: it refuses until it is
filled again. Pure: times are arguments. Called by tenants.py and entrance.py.
"""

from __future__ import annotations

from topspin.messages import Tenant


class _Bucket:
    def __init__(self) -> None:
        self._used = 0.0
        self._at: float | None = None

    def wait_s(self, per_minute: float, now: float) -> float:
        """Return how long nothing is left; 0: something is, or there is no limit."""
        passed_s = 0.0 if self._at is None else now - self._at
        self._at = now
        self._used = max(0.0, self._used - passed_s * per_minute / 60.0)
        if not per_minute:
            return 0.0
        return max(0.0, (self._used + 1.0 - per_minute) * 60.0 / per_minute)

    def take(self, amount: float) -> None:
        self._used += amount


class Allowance:
    """One tenant's use of its limits per minute."""

    def __init__(self) -> None:
        self._requests = _Bucket()
        self._tokens = _Bucket()

    def wait_s(self, tenant: Tenant, now: float) -> float:
        """Return how long `tenant` has to wait until it may ask again; 0: it may."""
        return max(
            self._requests.wait_s(tenant.requests_per_minute, now),
            self._tokens.wait_s(tenant.tokens_per_minute, now),
        )

    def take(self, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Count requests, or tokens of prompts and outputs."""
        self._requests.take(num_requests)
        self._tokens.take(num_tokens)
