"""The shares in the work of a step: a node for each request, tokens for each node and prompt.

Pure. A request goes to the node with the least predicted work and stays there while it runs; after
a preemption it is routed again (usually to the same node, where the prefix cache still has its
blocks). All nodes of a step wait for the slowest, so a node that needs longer per token gets fewer
prompt tokens. While streams decode, a long prompt enters in chunks by their predicted time. Called
by policy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from server.scheduler.micro_batching.cost import CostFits, CostModel
from topspin.plan.spec import AttentionNode

# Fitted times of equal nodes vary by less: their budgets stay whole.
EQUAL = 1.25

# A running sequence is expected to decode this many more tokens alongside the new one.
DECODE_HORIZON_TOKENS = 64

UNPACED_S: Final = 0.25
"""What is left of a prompt enters in one step if it takes no longer: streams wait that once."""
PACE: Final = 0.5
"""Each longer prompt makes steps of running streams longer by this share of them, on average."""
MIN_PACED: Final = 8
"""A node that has nothing else to do in a step computes so many tokens of a prompt."""
PACED_CHUNK: Final = 64
"""A prompt saves its time up for so many tokens: fewer take longer each (4,000 with AVX2 twice as
long by 8 as by 512), and nodes on CPUs record steps of fewer rows, of each size."""


class ReplicaCandidate(NamedTuple):
    """A node that has a seat, budget and blocks for the request; `cost` has its own times."""

    replica_idx: int
    num_hit_tokens: int
    num_pending_tokens: int
    num_running: int
    cost: CostModel


def choose_replica(candidates: Sequence[ReplicaCandidate], *, num_tokens: int) -> ReplicaCandidate:
    """Return the candidate with the least predicted work; the lowest index among equals.

    Work is the prefill still queued there, this request's own uncached part, and the
    decoding of the sequences that run there.
    """

    def work_s(candidate: ReplicaCandidate) -> float:
        cost = candidate.cost
        own_s = cost.slice_s(num_tokens - candidate.num_hit_tokens, candidate.num_hit_tokens)
        queued_s = cost.slice_s(candidate.num_pending_tokens, 0)
        decoding_s = cost.slice_s(candidate.num_running * DECODE_HORIZON_TOKENS, 0)
        return own_s + queued_s + decoding_s

    return min(candidates, key=work_s)


def token_budgets(
    nodes: Sequence[AttentionNode], cost_of: Callable[[int], CostModel]
) -> dict[int, int]:
    """Return the budgets of `nodes`, which step together, by index; `cost_of` has their times.

    A budget is the node's most tokens, or as many as it computes in the fastest one's time, and
    never less than every running sequence needs to advance.
    """
    costs = {node.index: cost_of(node.index) for node in nodes}
    token_s = {idx: each.attention_token_s + each.expert_token_s for idx, each in costs.items()}
    fastest_s = min(token_s.values(), default=0.0)
    budgets = {}
    for node in nodes:
        own_s, most = token_s[node.index], node.max_num_batched_tokens
        if own_s > EQUAL * fastest_s:
            most = max(node.max_num_seqs, int(most * fastest_s / own_s))
        budgets[node.index] = most
    return budgets


@dataclass(slots=True)
class Pace:
    """The time that long prompts may add to one step of a node, beside streams that decode.

    `num_prompts` enter or wait; the more, the more of a step is theirs, so that streams slow down
    instead of prompts that wait for ever.
    """

    costs: CostFits
    node: int
    num_prompts: int
    _given_s: float | None = None

    def cut(
        self,
        count: int,
        *,
        num_left: int,
        start: int,
        slices: Sequence[int],
        saved_s: float,
        share: float,
    ) -> tuple[int, float]:
        """Return how many of `count` tokens of a prompt the step has, and the time it then saves.

        The prompt has `num_left` tokens from `start`, `saved_s` of earlier steps, and `share` of
        what this one gives. `slices` are the positions of what the step has already: at the first
        call the rows that decode. A step without any has MIN_PACED tokens at least.
        """
        if self.costs.prompt_s(self.node, num_left, start) <= UNPACED_S:
            return count, saved_s
        if self._given_s is None:
            self._given_s = PACE * self.num_prompts * self._plain_s(slices)
        token_s = self.costs.prompt_s(self.node, 1, start)
        saved_s = min(saved_s, PACED_CHUNK * token_s) + share * self._given_s
        num_paid = int(saved_s / token_s)
        if not slices:
            num_paid = max(num_paid, MIN_PACED)
        elif num_paid < PACED_CHUNK:
            return 0, saved_s
        count = min(count, num_paid)
        return count, max(0.0, saved_s - count * token_s)

    def _plain_s(self, streams: Sequence[int]) -> float:
        """Return the time of the step without prompts."""
        num_rows = len(streams)
        rows_s = 0.0
        if num_rows:
            rows_s = num_rows * self.costs.prompt_s(self.node, 1, sum(streams) // num_rows)
        return self.costs.fixed_s(self.node) + rows_s
