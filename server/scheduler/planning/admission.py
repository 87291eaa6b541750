"""The admission of waiting requests: in which order, to which attention node, with which prefix.

Owns the queue of those that wait, new ones and preempted ones. Which node is best is
load_balancing.py's choice, and whether a node has room is the node's (attention_replica.py). Called
by policy.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.scheduler.micro_batching.cost import CostFits
from server.scheduler.planning.attention_replica import AttentionReplica, NodeBatch
from server.scheduler.planning.compilations import Compilations
from server.scheduler.planning.load_balancing import ReplicaCandidate, choose_replica
from server.scheduler.planning.sequence import Request, WaitingQueue
from server.scheduler.planning.telemetry import Counters, Journal
from topspin.plan.kv_cache import BlockNeeds
from topspin.plan.spec import EnginePlan


class Admission:
    """The waiting requests of one engine, in `waiting`, and their way to a node.

    `compilations` say whose grammar is not ready; `counters` and `journal` are told of admissions.
    """

    def __init__(
        self,
        plan: EnginePlan,
        replicas: Sequence[AttentionReplica],
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
        self.waiting = WaitingQueue()
        self._num_admissions = 0

    def admit(self, batches: list[NodeBatch], now: float) -> None:
        """Admit waiting requests by rank, until the first one fits no node now.

        One that fits only nodes that are absent, or whose grammar is being compiled, keeps its
        place and holds up nobody.
        """
        present = [replica for replica in self._replicas if replica.is_present]
        largest = max((replica.max_blocks for replica in present), default=0)
        aside: list[Request] = []
        while (request := self.waiting.first()) is not None:
            is_compiling = self._compilations.is_under_way(request.grammar_key)
            if request.max_blocks > largest or is_compiling:
                aside.append(self.waiting.pop())
                continue
            open_replicas = [
                replica
                for replica in self._replicas
                if replica.num_free_seats > 0 and batches[replica.index].budget > 0
            ]
            if not open_replicas or not self._admit_one(request, open_replicas, batches, now):
                break
        for request in aside:
            self.waiting.push(request)

    def _admit_one(
        self,
        request: Request,
        replicas: list[AttentionReplica],
        batches: list[NodeBatch],
        now: float,
    ) -> bool:
        protect = request.num_preemptions >= self._max_preemptions
        hashes: list[bytes] = []
        if self._has_prefix_cache:
            # The last token is always computed: its logits are sampled from.
            num_blocks = (len(request.tokens) - 1) // self._block_size
            if request.num_scored < request.num_to_score:
                # So are those whose next token's log-probability is still wanted.
                num_blocks = min(num_blocks, request.num_scored // self._block_size)
            hashes = request.hashes.first(num_blocks, request.tokens)
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
        self.waiting.pop()
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
        if request.num_cached_tokens is None:
            request.num_cached_tokens = chosen.num_hit_tokens
            request.queue_s = now - request.added_at
        self._journal.admitted(request, node=chosen.replica_idx, num_cached=chosen.num_hit_tokens)
        return True
