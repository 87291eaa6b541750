"""The tenants of one engine: the requests of each that wait, and whose turn it is.

Owns a counter of what each tenant has been served, over its weight (the virtual token counters of
VTC, arXiv 2401.00588, algorithm 2). The next request is one of the tenant with the least; within a
tenant, by rank. A tenant that comes back after a while has no credit for it. Knows no clock, no
node, and of limits only where a tenant's use of them is kept (allowance.py). Called by entrance.py
and by server.scheduler.planning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from server.scheduler.waiting.allowance import Allowance
from server.scheduler.waiting.request_heap import RequestHeap
from topspin.messages import Tenant

if TYPE_CHECKING:
    from server.scheduler.planning.sequence import Request

# An output token counts as much as so many prompt tokens, which are computed together (section 5.1
# of the paper).
OUTPUT_COST: Final = 2.0


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


def charge(served: dict[TenantState, int]) -> None:
    """Count the output tokens of each tenant, and forget them."""
    for account, num_tokens in served.items():
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
