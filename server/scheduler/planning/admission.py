"""The admission of waiting requests: to which attention node, with which prefix, before whom.

Owns the rules by which a request that has no room holds up others: for a while, or its tenant's
share of the seats is given back by a tenant that has more. Whose turn it is, is that of
server.scheduler.waiting.tenants; which node is best is load_balancing.py's choice, and whether a
node has room is the node's (attention_replica.py). Called by policy.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from server.scheduler.micro_batching.cost import CostFits
from server.scheduler.planning.attention_replica import AttentionReplica, NodeBatch
from server.scheduler.planning.compilations import Compilations
from server.scheduler.planning.load_balancing import ReplicaCandidate, choose_replica
from server.scheduler.planning.sequence import Request
from server.scheduler.planning.sequence import Sequence as RunningSequence
from server.scheduler.planning.telemetry import Counters, Journal
from server.scheduler.waiting.pace import SeatLimit
from server.scheduler.waiting.tenants import Tenants
from topspin.plan.kv_cache import BlockNeeds
from topspin.plan.spec import EnginePlan

# So many requests are passed by in a step, because there are no blocks for them, before the others
# are left for the next one.
MAX_ASIDE: Final = 8
# And so many times is one passed by, before it holds up all others.
MAX_PASSED: Final = 32


class Admission:
    """The way of one engine's waiting requests to a node.

    `compilations` say whose grammar is not ready; `counters` and `journal` are told of admissions.
    """

    def __init__(
        self,
        plan: EnginePlan,
        replicas: Sequence[AttentionReplica],
        waiting: Tenants,
        seat_limit: SeatLimit,
        *,
        needs: BlockNeeds,
        costs: CostFits,
        compilations: Compilations,
        counters: Counters,
        journal: Journal,
    ) -> None:
        self._replicas = replicas
        self._costs = costs
        self._compilations = compilations
        self._counters = counters
        self._journal = journal
        self._block_size = needs.block_size
        self._num_groups = len(needs.windows)
        self._has_prefix_cache = plan.scheduling.prefix_caching
        self._max_preemptions = plan.scheduling.max_preemptions
        self._waiting = waiting
        self._seat_limit = seat_limit
        self._num_admissions = 0
        self._blocked: Request | None = None

    @property
    def is_full(self) -> bool:
        """Return whether a request found no room in the last step."""
        return self._blocked is not None and not self._blocked.ended

    def admit(self, batches: list[NodeBatch], now: float) -> None:
        """Admit waiting requests in their order, as long as there is room.

        One that fits only nodes that are absent, or whose grammar is being compiled, keeps its
        place and holds up nobody; one for which there are no blocks lets some others pass, unless
        its answer has begun.
        """
        self._blocked = None
        aside: list[Request] = []
        passed: list[Request] = []
        num_running = sum(replica.num_running for replica in self._replicas)
        while (request := self._waiting.first()) is not None:
            if self.waits_apart(request):
                self._set_aside(request, aside)
                continue
            open_replicas = [
                replica
                for replica in self._replicas
                if replica.num_free_seats > 0
                and batches[replica.index].budget > 0
                and num_running < self._seat_limit.limit
            ]
            if open_replicas and self._admit_one(request, open_replicas, batches, now):
                num_running += 1
                for other in passed:
                    other.num_passed += 1
            else:
                self._blocked = self._blocked or request
                if not open_replicas or request.has_begun or len(passed) == MAX_ASIDE:
                    break
                self._set_aside(request, passed)
            if any(other.num_passed >= MAX_PASSED for other in passed):
                break
        for request in (*aside, *passed):
            self._waiting.push(request)

    def _set_aside(self, request: Request, others: list[Request]) -> None:
        self._waiting.pop(request)
        others.append(request)

    def to_give_way(self) -> RunningSequence | None:
        """Return a running sequence that should give its room to a request that found none.

        That request's tenant has less than its share of the seats, and the sequence's has more: it
        is the one of the last rank, of the tenant that is furthest above its share.
        """
        request = self._blocked
        tenants = self._waiting.active
        if request is None or request.ended or request.sequence is not None or len(tenants) < 2:
            return None
        running = [seq for replica in self._replicas for seq in replica.running]
        seats = Counter(seq.request.account for seq in running)
        num_seats = sum(each.node.max_num_seqs for each in self._replicas if each.is_present)
        num_taken = min(num_seats, len(running))
        over = {each: seats[each] - self._waiting.share(each) * num_taken for each in tenants}
        if over[request.account] > -1.0:
            return None
        given = [
            seq
            for seq in running
            if not seq.protected and over.get(seq.request.account, 0.0) >= 1.0
        ]
        return max(
            given, key=lambda seq: (over[seq.request.account], seq.request.rank), default=None
        )

    def waits_apart(self, request: Request) -> bool:
        """Say whether a request waits for something else than room: its grammar, or a node."""
        present = (replica.max_blocks for replica in self._replicas if replica.is_present)
        is_too_large = request.max_blocks > max(present, default=0)
        return is_too_large or self._compilations.is_under_way(request.grammar_key)

    def num_cached(self, request: Request) -> int:
        """Return how many of a request's tokens a node has, at best."""
        if not self._has_prefix_cache:
            return 0
        hashes = self._hashes(request)
        columns = (replica.tables.find_prefix(hashes) for replica in self._replicas)
        return max(len(blocks) for blocks in columns) // self._num_groups * self._block_size

    def _hashes(self, request: Request) -> list[bytes]:
        """Return the names of the blocks that need not be computed if they are found."""
        # The last token is always computed: its logits are sampled from.
        num_blocks = (len(request.tokens) - 1) // self._block_size
        if request.num_scored < request.num_to_score:
            # So are those whose next token's log-probability is still wanted.
            num_blocks = min(num_blocks, request.num_scored // self._block_size)
        return request.hashes.first(num_blocks, request.tokens)

    def _admit_one(
        self,
        request: Request,
        replicas: list[AttentionReplica],
        batches: list[NodeBatch],
        now: float,
    ) -> bool:
        protect = request.num_preemptions >= self._max_preemptions
        hashes = self._hashes(request) if self._has_prefix_cache else []
        hits: dict[int, list[int]] = {}
        candidates = []
        for replica in replicas:
            blocks = replica.tables.find_prefix(hashes)
            if replica.fits(request, blocks, protect=protect):
                hits[replica.index] = blocks
                num_hit_tokens = len(blocks) // self._num_groups * self._block_size
                candidates.append(
                    ReplicaCandidate(
                        replica.index,
                        num_hit_tokens,
                        replica.num_pending_tokens,
                        replica.num_running,
                        self._costs.of(replica.index),
                    )
                )
        if not candidates:
            return False
        chosen = choose_replica(candidates, num_tokens=len(request.tokens))
        self._waiting.pop(request)
        self._num_admissions += 1
        request.sequence = self._replicas[chosen.replica_idx].admit(
            request,
            seq_id=self._num_admissions,
            hits=hits[chosen.replica_idx],
            protect=protect,
            batch=batches[chosen.replica_idx],
        )
        if hashes:
            self._counters.prefix_cache_queries += len(request.tokens)
            self._counters.prefix_cache_hits += chosen.num_hit_tokens
        request.account.charge(num_prompt_tokens=len(request.tokens) - chosen.num_hit_tokens)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = chosen.num_hit_tokens
            request.queue_s = now - request.added_at
        self._journal.admitted(request, node=chosen.replica_idx, num_cached=chosen.num_hit_tokens)
        return True
