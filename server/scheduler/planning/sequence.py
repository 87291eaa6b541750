"""A request, from add() to its end, and a sequence: one admission of it to a node.

Owns their state, the rule by which a sampled token ends a request, and a request's rank: by
priority, then by arrival. A preempted request comes back as a new Sequence of the same Request, at
its old place in the queue. Knows no limits, no pool and no step. Called by attention_replica.py,
admission.py and policy.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from server.scheduler.planning.block_pool import HashChain
from server.scheduler.waiting.tenants import TenantState
from topspin.messages import FinishReason, SamplingParams, Tenant
from topspin.plan.kv_cache import NO_BLOCK


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one client request.

    `arrival` counts the clients' requests, `place` the choices of its own, `number` all choices.
    `tokens` is the prompt and the accepted output; `max_length` the total length at which
    it ends by "length"; `position_limit` the positions that are fed at most (the last token
    is returned, not fed), for which it can hold `max_blocks` blocks of a node's cache;
    `num_scored` the log-probabilities of prompt tokens that were delivered; `num_replays`
    counts lost generations since its last token; `cache_salt` is its tenant's, `grammar_key` names
    its grammar, if it has one. `priority`: lower ones come first. `queue_s` is its wait from
    `added_at` to its first admission. `account` is its tenant's, `prompt_s` the predicted time of
    its prompt, and `num_bytes` its size while it waits. `num_passed` others were admitted while
    there was no room for it. `has_begun`: it has had an output, first at `begun_at`.
    """

    request_id: str
    peer: bytes
    arrival: int
    place: int
    number: int
    sampling: SamplingParams
    tokens: array[int]
    num_prompt_tokens: int
    max_length: int
    position_limit: int
    max_blocks: int
    stop_ids: frozenset[int]
    hashes: HashChain
    cache_salt: str = ""
    priority: int = 0
    grammar_key: str = ""
    num_scored: int = 0
    num_preemptions: int = 0
    num_replays: int = 0
    num_cached_tokens: int | None = None
    added_at: float = 0.0
    queue_s: float = 0.0
    account: TenantState = field(default_factory=lambda: TenantState(Tenant()))
    prompt_s: float = 0.0
    num_bytes: int = 0
    num_passed: int = 0
    has_begun: bool = False
    begun_at: float = 0.0
    sequence: Sequence | None = None
    ended: bool = False

    @property
    def rank(self) -> tuple[int, int, int]:
        """Return its place among requests: by priority, then by arrival.

        Each choice of a client's request lets one request pass that came after it, so that many
        choices hold up nobody.
        """
        return self.priority, self.arrival + self.place, self.number

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens have been accepted."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def samples(self) -> bool:
        """Return whether it has any output."""
        return self.max_length > self.num_prompt_tokens

    @property
    def num_to_score(self) -> int:
        """Return how many prompt tokens get a log-probability: all but the first, if asked."""
        return 0 if self.sampling.prompt_logprobs is None else self.num_prompt_tokens - 1

    def finish_reason(self) -> FinishReason | None:
        """Return why the last accepted token ends the request, if it does.

        A stop or eos token counts from output position `min_tokens` on: before, the node
        masks it.
        """
        if self.tokens[-1] in self.stop_ids and self.num_output_tokens > self.sampling.min_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.max_length else None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on an attention node.

    Positions count tokens whose keys and values are in the cache. `num_planned` includes
    all that steps in flight may add, of which `num_unsure` are tokens of drafts;
    `num_committed` only what succeeded. It may count drafts past `position_limit`, which
    nodes do not feed. `length` is the number of tokens known at its admission: they are fed
    first. `closed`: no later step will name it; its blocks are released when the
    `num_in_flight` steps that name it have succeeded. `publish_at`: committed positions at which
    its next block is full. `saved_s`: what steps have given its prompt, while it is paced
    (load_balancing.Pace), and no chunk has used.

    A column is what holds `block_size` positions: one block of each of `num_groups` groups of
    layers (topspin.plan.kv_cache), side by side in `blocks`. In groups with windows the first
    `freed[group]` columns are behind the window, and those from `placed` on, of a prompt, have no
    block yet: `spare` blocks are held for them. Where no group has a window `freed` is empty.
    """

    request: Request
    seq_id: int
    replica_idx: int
    blocks: list[int]
    block_size: int
    num_planned: int
    num_committed: int
    length: int
    position_limit: int
    num_sent: int
    num_groups: int = 1
    placed: int = 0
    freed: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    publish_at: int = field(init=False)
    capacity: int = field(init=False)
    sent_capacity: int = field(init=False)
    num_in_flight: int = 0
    num_unsure: int = 0
    saved_s: float = 0.0
    closed: bool = False
    protected: bool = False

    def __post_init__(self) -> None:
        self.publish_at = (self.num_sent + 1) * self.block_size
        self.capacity = self.num_columns * self.block_size
        self.sent_capacity = self.num_sent * self.block_size

    @property
    def num_columns(self) -> int:
        """Return how many columns it has."""
        return len(self.blocks) // self.num_groups

    @property
    def held(self) -> list[int]:
        """Return all blocks that it holds."""
        if not self.freed:
            return self.blocks
        return [*(block for block in self.blocks if block != NO_BLOCK), *self.spare]

    @property
    def num_left(self) -> int:
        """Return how many known tokens are not planned yet, while its prompt is computed."""
        return self.length - self.num_planned

    @property
    def can_advance(self) -> bool:
        """Return whether a token is left to feed if the drafts in flight are all refused."""
        return self.num_planned - self.num_unsure < self.position_limit

    def correct(self, draft: int, accepted: int) -> None:
        """Give back what a step that could draft `draft` tokens did not use.

        `accepted` -1: there was not even a token to feed; the step counts as committed.
        """
        self.num_committed += accepted
        self.num_planned -= draft - accepted
        self.num_unsure -= draft

    def add_blocks(self, blocks: Iterable[int]) -> None:
        """Append a column."""
        self.blocks += blocks
        self.placed += 1
        self.capacity += self.block_size

    def blocks_to_send(self) -> list[int]:
        """Return the blocks that the planned positions need and the node does not know yet."""
        needed = -(-min(self.num_planned, self.position_limit) // self.block_size)
        unsent = self.blocks[self.num_sent * self.num_groups : needed * self.num_groups]
        self.num_sent = needed
        self.sent_capacity = needed * self.block_size
        return unsent
