"""The tenants of one engine: the requests of each that wait, and whose turn it is.

Owns a counter of what each tenant has been served, over its weight (the virtual token counters of
VTC, arXiv 2401.00588, algorithm 2). The next request is one of the tenant with the least; within a
tenant, by rank. A tenant that comes back after a while has no credit for it. Also owns the heaps in
which requests wait, and what a tenant has used of its limits per minute. Pure: times are arguments.
Knows no node. Called by entrance.py and by server.scheduler.planning.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, Final

from topspin.messages import Tenant

if TYPE_CHECKING:
    from server.scheduler.planning.sequence import Request

# An output token counts as much as so many prompt tokens, which are computed together (section 5.1
# of the paper).
OUTPUT_COST: Final = 2.0
MIN_COMPACTED: Final = 64

Key = tuple[float, ...]
"""Of equal keys, `Request.number` must be the last part: requests have no order of their own."""


class RequestHeap:
    """A heap of requests. Ended ones are dropped at the front, and all before it would double."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Request]] = []
        self._compact_at = MIN_COMPACTED

    def push(self, key: Key, request: Request) -> None:
        """Insert `request` by `key`."""
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if not entry[1].ended]
            heapq.heapify(self._heap)
            self._compact_at = max(MIN_COMPACTED, 2 * len(self._heap))
        heapq.heappush(self._heap, (key, request))

    def first(self) -> Request | None:
        """Return the request of the lowest key that has not ended, and leave it there."""
        while self._heap and self._heap[0][1].ended:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the request of first()."""
        return heapq.heappop(self._heap)[1]

    def pop_until(self, limit: float) -> Request | None:
        """Remove and return the request of first() if its key begins with `limit` at most."""
        is_due = self.first() is not None and self._heap[0][0][0] <= limit
        return self.pop() if is_due else None

    def count(self) -> int:
        """Return how many requests have not ended, in time linear in the heap."""
        return sum(not request.ended for _, request in self._heap)


class _Bucket:
    """A minute's worth, which may be used at once, and fills evenly.

    Output tokens are known when they are there, so it may be overdrawn: nothing is left until it
    is filled again.
    """

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
    """The requests and the tokens that a tenant has used, for its limits per minute."""

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


class TenantState:
    """One tenant's requests in the engine, and what it has been served.

    `served` is in prompt tokens over the tenant's weight. `unbegun` are its requests without an
    output, and `unbegun_s` the time that their prompts take.
    """

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.served = 0.0
        self.allowance = Allowance()
        self.waiting = RequestHeap()
        self.num_requests = 0
        self.unbegun: set[Request] = set()
        self.unbegun_s = 0.0

    def charge(self, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Count what the tenant has been served."""
        self.allowance.take(num_tokens=num_output_tokens)
        cost = num_prompt_tokens + OUTPUT_COST * num_output_tokens
        self.served += cost / self.tenant.weight


def charge(served: list[TenantState]) -> None:
    """Count output tokens, for each of which `served` has its tenant, and forget them."""
    for account, num_tokens in Counter(served).items():
        account.charge(num_output_tokens=num_tokens)
    served.clear()


class Tenants:
    """The accounts of all tenants that have had requests, and the order of those that wait."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantState] = {}
        self._active: dict[str, TenantState] = {}
        self._last_served = 0.0

    def account(self, tenant: Tenant) -> TenantState:
        """Return the tenant's account, with the weight and the limits that it has now."""
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = TenantState(tenant)
        account.tenant = tenant
        return account

    def entered(self, request: Request) -> None:
        """Count a new request, and let it wait."""
        account = request.account
        if not account.num_requests:
            others = (each.served for each in self._active.values())
            account.served = max(account.served, min(others, default=self._last_served))
            self._active[account.tenant.name] = account
        account.num_requests += 1
        account.waiting.push(request.rank, request)

    def left(self, request: Request) -> None:
        """Count a request no longer, which has ended."""
        account = request.account
        account.num_requests -= 1
        if not account.num_requests:
            del self._active[account.tenant.name]
            self._last_served = max(self._last_served, account.served)

    @property
    def active(self) -> list[TenantState]:
        """Return the accounts of tenants that have requests."""
        return list(self._active.values())

    def share(self, account: TenantState) -> float:
        """Return the tenant's share while all that have requests want more."""
        weight = account.tenant.weight
        total = sum(each.tenant.weight for each in self._active.values())
        return weight / (total if account.num_requests else total + weight)

    def first(self) -> Request | None:
        """Return the request whose turn it is, and leave it in its queue."""
        firsts = (account.waiting.first() for account in self._active.values())
        waiting = [request for request in firsts if request is not None]
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        return min(waiting, key=lambda request: (request.account.served, request.number))

    def pop(self, request: Request) -> None:
        """Remove the request of first() from its queue."""
        popped = request.account.waiting.pop()
        assert popped is request

    def push(self, request: Request) -> None:
        """Let a request wait again, at its old place."""
        request.account.waiting.push(request.rank, request)

    def count(self) -> int:
        """Return how many requests wait, in time linear in the queues."""
        return sum(account.waiting.count() for account in self._active.values())
