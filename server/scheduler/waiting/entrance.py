"""The entrance to one engine's queue: who is refused at once, and who has waited too long.

Owns the caps of the queue, the limits of each tenant, the prediction of a request's first token
and the deadlines. Replays are not refused: their clients have been answered. Pure: no clock, no
socket, no node. Called by server.scheduler.planning.policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, NoReturn

from server.scheduler.planning.sequence import Request
from server.scheduler.waiting.pace import DrainRate
from server.scheduler.waiting.tenants import RequestHeap, Tenants, TenantState
from topspin.errors import Overloaded, RequestTimeout, TopspinError
from topspin.messages import AddRequest
from topspin.plan.settings import SchedulingPolicy

# Prompts, grammars and biases of the requests that wait, in bytes.
MAX_QUEUED_BYTES: Final = 256 * 2**20
# A request that would have its first token this near to its bound is refused: predictions err.
MARGIN: Final = 0.75
_RATE: Final = 0.1
# A request that waits for its grammar, or for an absent node, is looked at again after this.
EXCUSED_S: Final = 1.0
_TOKEN_BYTES: Final = 4


class Entrance:
    """The requests of one engine from their coming to their first output, and their tenants.

    `num_seats`: as many may run at once. The queue's clock stands still between pause() and
    resume(): nobody is late because a node was.
    """

    def __init__(self, limits: SchedulingPolicy, *, num_seats: int) -> None:
        self._limits = limits
        self._num_seats = num_seats
        self._rate = DrainRate()
        self._num_tokens = 0
        self._num_bytes = 0
        self._is_waited = False
        # From the admission to the first output, lately.
        self._start_s = 0.0
        self._late = RequestHeap()
        self._timeouts = RequestHeap()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self.tenants = Tenants()
        self.num_refused: Counter[str] = Counter()

    # Refusals.

    def check(self, message: AddRequest, *, now: float, num_requests: int) -> None:
        """Raise Overloaded if the queue is full, or the tenant has had its share.

        `num_requests` are in the engine; seats on nodes are not part of the queue. Replays have as
        much room again: all of another scheduler's come at once, new ones between.
        """
        limits, room = self._limits, 1 + message.replayed
        if num_requests >= (limits.max_num_queued_reqs + self._num_seats) * room:
            self._refuse("queue", f"{limits.max_num_queued_reqs} requests are waiting")
        num_bytes = _size(message)
        num_tokens = len(message.prompt) // _TOKEN_BYTES
        is_full = self._num_tokens + num_tokens > limits.max_num_queued_tokens * room
        if self._num_tokens and is_full:
            self._refuse("tokens", f"{self._num_tokens} prompt tokens are waiting")
        if self._num_bytes + num_bytes > MAX_QUEUED_BYTES * room:
            self._refuse("bytes", f"requests of {self._num_bytes} bytes are waiting")
        if not message.replayed:
            self._check_tenant(self.tenants.account(message.tenant), now)

    def _check_tenant(self, account: TenantState, now: float) -> None:
        tenant = account.tenant
        if tenant.max_concurrency and account.num_requests >= tenant.max_concurrency:
            reason = f"{account.num_requests} requests of this key's tenant are under way"
            self._refuse("concurrency", reason)
        wait_s = account.allowance.wait_s(tenant, now)
        if wait_s > 0:
            reason = "this key's tenant has used what it may in a minute"
            self._refuse("rate", reason, retry_after_s=wait_s)

    def _refuse(
        self,
        cause: str,
        reason: str,
        *,
        retry_after_s: float | None = None,
        wait_s: float = 0.0,
    ) -> NoReturn:
        self.num_refused[cause] += 1
        if retry_after_s is None:
            retry_after_s = self._rate.time_s(1, 0.0)
        raise Overloaded(reason, retry_after_s=retry_after_s, wait_s=wait_s)

    def check_wait(self, request: Request, *, timeout_s: float | None) -> None:
        """Raise Overloaded if the request's first token would come too late.

        Where nobody waits for room it is not known how long that takes, and none is refused.
        """
        num_unbegun = sum(len(each.unbegun) for each in self.tenants.active)
        if not self._is_waited and num_unbegun < self._num_seats:
            return
        bound_s = self._limits.first_token_bound_s(timeout_s, request.prompt_s)
        wait_s = self._wait_s(request.account, request.prompt_s)
        if wait_s > MARGIN * bound_s:
            # Those of a worse rank come later.
            before = [each for each in request.account.unbegun if each.rank < request.rank]
            wait_s = self._wait_s(request.account, request.prompt_s, before)
        if wait_s > MARGIN * bound_s:
            any_s = self._wait_s(request.account, 0.0)
            self._refuse(
                "ttft",
                f"the first token would come in {wait_s:.1f} s, which is too late",
                retry_after_s=wait_s - MARGIN * bound_s,
                wait_s=any_s / MARGIN,
            )

    def _wait_s(
        self, account: TenantState, prompt_s: float, before: Collection[Request] | None = None
    ) -> float:
        """Return when one more request of a tenant would have its first token.

        It is not later than if all requests came before, nor than if its tenant got its share.
        """
        if before is None:
            num_own, own_s = len(account.unbegun), account.unbegun_s
        else:
            num_own, own_s = len(before), sum(each.prompt_s for each in before)
        share = self.tenants.share(account)
        own_wait_s = self._rate.time_s(num_own + 1, own_s + prompt_s) / share
        if share == 1.0:
            return own_wait_s
        others = [each for each in self.tenants.active if each is not account]
        num_all = num_own + 1 + sum(len(each.unbegun) for each in others)
        all_s = own_s + prompt_s + sum(each.unbegun_s for each in others)
        return min(own_wait_s, self._rate.time_s(num_all, all_s))

    def first_token_s(self) -> float:
        """Return the predicted wait of one more request, behind all."""
        active = self.tenants.active
        num_requests = 1 + sum(len(each.unbegun) for each in active)
        return self._rate.time_s(num_requests, sum(each.unbegun_s for each in active))

    # The course of a request.

    def entered(self, request: Request, message: AddRequest, now: float) -> None:
        """Let a request wait for its turn."""
        account = request.account
        self.tenants.entered(request)
        request.num_bytes = _size(message)
        self._num_tokens += request.num_prompt_tokens
        self._num_bytes += request.num_bytes
        account.unbegun.add(request)
        account.unbegun_s += request.prompt_s
        if message.timeout_s is not None:
            self._timeouts.push((now + message.timeout_s, request.number), request)
        if message.replayed:
            return
        account.allowance.take(num_requests=1, num_tokens=request.num_prompt_tokens)
        bound_s = self._limits.first_token_bound_s(message.timeout_s, request.prompt_s)
        if bound_s < math.inf:
            # Later its own prompt would take too long, but it may wait for half of the time.
            start_s = max(request.prompt_s, self._start_s)
            latest_s = max(bound_s - start_s, 0.5 * bound_s)
            self._late.push((now - self._paused_s + latest_s, request.number), request)

    def begun(self, request: Request, now: float) -> None:
        """Note the first output of a request."""
        request.has_begun, request.begun_at = True, now
        took_s = now - request.added_at - request.queue_s
        self._start_s += _RATE * (took_s - self._start_s)
        self._rate.begun(request.prompt_s)
        self._forget(request)

    def left(self, request: Request) -> None:
        """Note the end of a request."""
        self._forget(request)
        self.tenants.left(request)

    def _forget(self, request: Request) -> None:
        account = request.account
        if request in account.unbegun:
            account.unbegun.remove(request)
            account.unbegun_s = account.unbegun_s - request.prompt_s if account.unbegun else 0.0
            self._num_tokens -= request.num_prompt_tokens
            self._num_bytes -= request.num_bytes

    # Time.

    def note(self, now: float, *, is_waited: bool) -> None:
        """Note whether requests wait for room from now on."""
        self._is_waited = is_waited
        self._rate.note(now, is_waited=is_waited)

    def pause(self, now: float, *, since: float | None = None) -> None:
        """Stop the queue's clock, as of `since`: the engine is recovering, or a node hangs."""
        if self._paused_at is None:
            self.note(now, is_waited=False)
            self._paused_at = now if since is None else since

    def resume(self, now: float) -> None:
        """Let the queue's clock go on."""
        if self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None

    def expired(
        self, now: float, *, is_excused: Callable[[Request], bool]
    ) -> dict[Request, TopspinError]:
        """Return the requests whose time is over, and why.

        Those that `is_excused` wait for something else than their turn.
        """
        found: dict[Request, TopspinError] = {}
        while (request := self._timeouts.pop_until(now)) is not None:
            found[request] = RequestTimeout("the request's time is over")
        queue_s = now - self._paused_s
        while self._paused_at is None and (request := self._late.pop_until(queue_s)) is not None:
            if request.has_begun or request.sequence is not None:
                continue
            if is_excused(request):
                self._late.push((queue_s + EXCUSED_S, request.number), request)
                continue
            self.num_refused["late"] += 1
            reason = f"its turn has not come in {now - request.added_at:.1f} s"
            again_s = self._rate.time_s(1, 0.0)
            found[request] = Overloaded(reason, retry_after_s=again_s)
        return found


def _size(message: AddRequest) -> int:
    """Return about how many bytes a request takes while it waits."""
    sampling = message.sampling
    num_ids = len(sampling.logit_bias) + len(sampling.allowed_token_ids) + len(message.output)
    return len(message.prompt) + len(sampling.grammar) + _TOKEN_BYTES * num_ids
