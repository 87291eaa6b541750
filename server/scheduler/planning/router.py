"""The choice of an attention node for a request.

Pure: compares candidates that could all take the request now. A request stays on its node
while it runs; after a preemption it is routed again (usually to the same node, where the
prefix cache still has its blocks). Called by policy.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.scheduler.micro_batching.cost import CostModel

# A running sequence is expected to decode this many more tokens alongside the new one.
DECODE_HORIZON_TOKENS = 64


class Candidate(NamedTuple):
    """A node that has a seat, budget and blocks for the request; `cost` has its own times."""

    replica_idx: int
    num_hit_tokens: int
    num_pending_tokens: int
    num_running: int
    cost: CostModel


def choose_replica(candidates: Sequence[Candidate], *, num_tokens: int) -> Candidate:
    """Return the candidate with the least predicted work; the lowest index among equals.

    Work is the prefill still queued there, this request's own uncached part, and the
    decoding of the sequences that run there.
    """

    def work_s(candidate: Candidate) -> float:
        cost = candidate.cost
        own_s = cost.slice_s(num_tokens - candidate.num_hit_tokens, candidate.num_hit_tokens)
        queued_s = cost.slice_s(candidate.num_pending_tokens, 0)
        decoding_s = cost.slice_s(candidate.num_running * DECODE_HORIZON_TOKENS, 0)
        return own_s + queued_s + decoding_s

    return min(candidates, key=work_s)
