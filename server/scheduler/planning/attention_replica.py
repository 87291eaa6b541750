"""One attention node as the policy sees it: its running sequences and its block pool.

Owns seats, block reservations, preemption and the choice of a node's slices in a step.
Knows no other node, no queue and no messages but NewSequence. Called by policy.py.

Order of a step: decodes first, with the drafts for which tokens and blocks are left, then
prefill chunks, then (by the policy) admissions. When blocks run out, the sequence of the last rank
that is not protected gives up its blocks. Protected sequences have reserved all blocks that they
can ever need, so they always get them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from server.scheduler.planning.block_pool import BlockPool
from server.scheduler.planning.block_tables import BlockTables
from server.scheduler.planning.frames import FrameBudget
from server.scheduler.planning.load_balancing import Pace
from server.scheduler.planning.sequence import Request, Sequence
from topspin.messages import SAMPLE, SCORE, NewSequence, client_id, pack_ints
from topspin.plan.kv_cache import BlockNeeds
from topspin.plan.spec import AttentionNode

# So many times shorter prompts need not wait for a long one.
SHORT: Final = 8
MIN_SAMPLED_ROWS: Final = 64
"""So many rows may be sampled in a step, drafts included, however few sequences may run."""

DraftTokens = Callable[[Request], int]
"""Returns how many tokens a node may draft for a request in a step."""


@dataclass(slots=True)
class NodeBatch:
    """The work of one node in a step: parallel lists of slices, and the token budget left.

    `drafts` has the greatest number of draft tokens of the slices that have any, by their
    index; `scored`, by sequence id, the first position of each slice with SCORE. `pace` cuts the
    chunks of long prompts; None: no stream decodes.
    """

    budget: int
    pace: Pace | None = None
    seqs: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    drafts: dict[int, int] = field(default_factory=dict)
    scored: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """Return the most rows of each slice."""
        if not self.drafts:
            return self.counts
        return [count + self.drafts.get(idx, 0) for idx, count in enumerate(self.counts)]

    def add(self, seq: Sequence, count: int) -> None:
        """Plan `count` known positions of `seq`; samples after the last one."""
        request = seq.request
        start, end = seq.num_planned, seq.num_planned + count
        wanted = SAMPLE if end == seq.length and request.samples else 0
        if request.num_scored < end and start < request.num_to_score:
            wanted |= SCORE
            self.scored[seq.seq_id] = start
        self._append(seq, count, wanted)

    def _append(self, seq: Sequence, count: int, wanted: int) -> None:
        self.seqs.append(seq)
        self.counts.append(count)
        self.wanted.append(wanted)
        self.starts.append(seq.num_planned)
        seq.num_planned += count
        seq.num_in_flight += 1
        self.budget -= count

    def add_draft(self, seq: Sequence, draft: int) -> None:
        """Plan one position of `seq`, which has one to feed, and up to `draft` more behind it."""
        self.drafts[len(self.seqs)] = draft
        self._append(seq, 1, SAMPLE)
        seq.num_planned += draft
        seq.num_unsure += draft
        self.budget -= draft

    def add_decodes(self, seqs: list[Sequence]) -> None:
        """Plan one position of each of `seqs`, all of which have exactly one to feed."""
        for seq in seqs:
            start = seq.num_planned
            self.starts.append(start)
            seq.num_planned = start + 1
            seq.num_in_flight += 1
        self.budget -= len(seqs)
        self.seqs += seqs
        self.counts += [1] * len(seqs)
        self.wanted += [SAMPLE] * len(seqs)


class AttentionReplica:
    """The sequences and blocks of one attention node.

    Invariant: a sequence is in exactly one of `prefilling` (known tokens left to feed),
    `decoding` (none left; without output it only waits for its end) and `draining` (closed, in a
    step that runs), or holds no blocks.
    """

    def __init__(
        self,
        *,
        node: AttentionNode,
        num_blocks: int,
        needs: BlockNeeds,
        draft_tokens: DraftTokens | None = None,
        frames: FrameBudget | None = None,
    ) -> None:
        """`draft_tokens` None: no drafts. `frames` None: all blocks are in memory."""
        self.node = node
        self.index = node.index
        self.is_present = num_blocks > 0
        self.tables = BlockTables(BlockPool(num_blocks), needs)
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.draining: dict[int, Sequence] = {}
        self._protected: dict[int, Sequence] = {}
        self._finished: list[int] = []
        self._new: list[NewSequence] = []
        self._needs = needs
        self._draft_tokens = draft_tokens
        self._frames = frames
        self._frames_left = 0
        """While a step is planned: its beginning counts, what follows adds and subtracts."""

    @property
    def pool(self) -> BlockPool:
        """Return all its blocks."""
        return self.tables.pool

    @property
    def max_blocks(self) -> int:
        """Return the most blocks that a sequence can have: they must all fit in memory at once."""
        return self.pool.num_blocks if self._frames is None else self._frames.num_frames

    @property
    def running(self) -> Iterator[Sequence]:
        """Return the sequences that hold a seat."""
        return chain(self.prefilling.values(), self.decoding.values())

    @property
    def num_frames_needed(self) -> int:
        """Return how many blocks running sequences need in memory, where others are in a file."""
        return 0 if self._frames is None else sum(map(self._frames.need, self.running))

    def _can_grow(self, seq: Sequence) -> bool:
        """Say whether there are blocks for `seq`, and a place in memory if it needs one."""
        if not self.tables.can_grow:
            return False
        return self._frames is None or self._frames_left >= self._frames.growth(seq)

    def _grow_one(self, seq: Sequence) -> None:
        """Give `seq`, which can grow, blocks for the next positions."""
        if self._frames is not None:
            self._frames_left -= self._frames.growth(seq)
        self.tables.grow(seq)

    @property
    def num_running(self) -> int:
        """Return how many sequences hold a seat."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def positions_held(self) -> dict[int, int]:
        """Return for how many positions running sequences have blocks, by window; 0: without."""
        return self.tables.positions_held(list(self.running))

    @property
    def num_free_seats(self) -> int:
        """Return how many more sequences may run; none while the node is absent."""
        return self.node.max_num_seqs - self.num_running if self.is_present else 0

    @property
    def num_pending_tokens(self) -> int:
        """Return how many known tokens of running sequences are not planned yet."""
        return sum(seq.num_left for seq in self.prefilling.values())

    # Planning.

    def plan_running(
        self,
        preempted: list[Sequence],
        budget: int,
        *,
        num_next: int = 0,
        pace: Pace | None = None,
    ) -> NodeBatch:
        """Return the next step's slices of running sequences, of `budget` tokens at most.

        Appends victims to `preempted`. The next request in the queue has `num_next` tokens.
        """
        batch = NodeBatch(budget=budget, pace=pace)
        if self._frames is not None:
            self._frames_left = self._frames.num_frames - self.num_frames_needed
        ready: list[Sequence] = []
        short: list[Sequence] = []
        for seq in self.decoding.values():
            num_planned = seq.num_planned
            if num_planned < seq.position_limit:
                ready.append(seq)
                if num_planned == seq.capacity:
                    short.append(seq)
            elif seq.can_advance:
                ready.append(seq)
        if short:
            stalled = self._grow(short, preempted)
            ready = [seq for seq in ready if not seq.closed and seq.seq_id not in stalled]
        if self._draft_tokens is not None:
            ready = self._plan_drafts(ready, batch, self._draft_tokens)
        batch.add_decodes(ready)
        if self.prefilling and batch.budget:
            self._plan_prompts(batch, num_next if self.num_free_seats > 0 else 0)
        return batch

    def _plan_prompts(self, batch: NodeBatch, num_next: int) -> None:
        """Plan chunks of prompts: the first one's, then those of the shortest.

        While others are much shorter, the first one leaves them half of the room: a long prompt
        holds nobody up, nor do short ones starve it. So it is with time, where prompts are paced.
        """
        first, *others = self.prefilling.values()
        others.sort(key=lambda seq: seq.num_left)
        shorter = [seq.num_left for seq in others] + [num_next]
        num_shorter = sum(count for count in shorter if SHORT * count <= first.num_left)
        most = max(-(-batch.budget // 2), batch.budget - num_shorter)
        is_shared = bool(others) and SHORT * others[0].num_left <= first.num_left
        self._plan_chunk(first, batch, most=most, share=0.5 if is_shared else 1.0)
        for seq in others:
            if batch.budget == 0:
                break
            self._plan_chunk(seq, batch, share=0.5 if is_shared and seq is others[0] else 0.0)

    def _plan_chunk(
        self, seq: Sequence, batch: NodeBatch, *, share: float, most: int | None = None
    ) -> None:
        """Plan the next chunk of a prompt; paced, one that has `share` of the step's time."""
        count = min(batch.budget if most is None else most, seq.num_left)
        if batch.pace is not None:
            count, seq.saved_s = batch.pace.cut(
                count,
                num_left=seq.num_left,
                start=seq.num_planned,
                slices=batch.starts,
                saved_s=seq.saved_s,
                share=share,
            )
            if count == 0:
                return
        batch.add(seq, count)
        self.tables.place(seq)
        if seq.num_planned == seq.length:
            del self.prefilling[seq.seq_id]
            self.decoding[seq.seq_id] = seq

    def draft_room(self, budget: int, num_decoding: int) -> int:
        """Return how many tokens the drafts of `num_decoding` sequences may have, perhaps < 0.

        Half of what is left of the budget stays for prompts. The rows that are sampled are those of
        a step of all sequences at most: nodes have measured their memory with that.
        """
        most_sampled = max(self.node.max_num_seqs, MIN_SAMPLED_ROWS)
        return min((budget - num_decoding) // 2, most_sampled - num_decoding)

    def _plan_drafts(
        self, ready: list[Sequence], batch: NodeBatch, draft_tokens: DraftTokens
    ) -> list[Sequence]:
        """Plan those of `ready` that get a draft; return the others."""
        others = []
        room = self.draft_room(batch.budget, len(ready))
        for seq in ready:
            draft = self._reserve_draft(seq, min(room, draft_tokens(seq.request)))
            if draft > 0:
                room -= draft
                batch.add_draft(seq, draft)
            else:
                others.append(seq)
        return others

    def _reserve_draft(self, seq: Sequence, draft: int) -> int:
        """Give `seq` the blocks that `draft` more tokens need, and return how many tokens fit.

        Takes only blocks that nobody holds: others are not preempted for a draft.
        """
        draft = min(draft, seq.position_limit - 1 - (seq.num_planned - seq.num_unsure))
        if draft <= 0:
            return 0
        end = min(seq.num_planned + 1 + draft, seq.position_limit)
        while seq.capacity < end and self._can_grow(seq):
            self._grow_one(seq)
        return draft if seq.capacity >= end else seq.capacity - seq.num_planned - 1

    def _grow(self, short: list[Sequence], preempted: list[Sequence]) -> set[int]:
        """Give each of `short` blocks, in order of rank; returns the ids that must wait."""
        returning = sum(self.pool.count_exclusive(s.held) for s in self.draining.values())
        stalled: set[int] = set()
        for seq in sorted(short, key=lambda seq: seq.request.rank):
            while not seq.closed and not self._can_grow(seq):
                if len(stalled) * len(self._needs.windows) < returning:
                    # Blocks of closed sequences come back when the running step is done.
                    break
                victim = self._victim()
                if victim is None:
                    break
                if victim.num_in_flight:
                    returning += self.pool.count_exclusive(victim.held)
                victim.request.num_preemptions += 1
                preempted.append(victim)
                self.close(victim)
            if seq.closed:
                continue
            if self._can_grow(seq):
                self._grow_one(seq)
            else:
                stalled.add(seq.seq_id)
        return stalled

    def _victim(self) -> Sequence | None:
        """Return the running sequence that arrived last and is not protected."""
        unprotected = [seq for seq in self.running if not seq.protected]
        return max(unprotected, key=lambda seq: seq.request.rank, default=None)

    # Admission.

    def fits(self, request: Request, hits: list[int], *, protect: bool) -> bool:
        """Say whether `request` can be admitted now.

        There must be blocks for all its known tokens and one more, in addition to those that
        protected sequences may still ask for; with `protect`, its reservation must fit too.
        """
        if request.max_blocks > self.max_blocks:
            return False
        if protect and self._reserved() + request.max_blocks > self.max_blocks:
            return False
        num_known = min(len(request.tokens) + 1, request.position_limit)
        num_columns = -(-num_known // self._needs.block_size)
        frames = self._frames
        if frames is not None and frames.need_of(request, num_columns) > self._frames_left:
            return False
        available = self.tables.num_available(hits) - self._owed()
        return available >= self.tables.num_lacking(num_columns, hits)

    def _reserved(self) -> int:
        return sum(seq.request.max_blocks for seq in self._protected.values())

    def _owed(self) -> int:
        """Return how many blocks protected sequences may still ask for."""
        return sum(seq.request.max_blocks - len(seq.held) for seq in self._protected.values())

    def admit(
        self, request: Request, *, seq_id: int, hits: list[int], protect: bool, batch: NodeBatch
    ) -> Sequence:
        """Admit `request`, with blocks for all known tokens, and plan its first chunk."""
        num_tokens, block_size = len(request.tokens), self._needs.block_size
        num_groups = len(self._needs.windows)
        num_computed = len(hits) // num_groups * block_size
        seq = Sequence(
            request=request,
            seq_id=seq_id,
            replica_idx=self.index,
            blocks=list(hits),
            block_size=block_size,
            num_planned=num_computed,
            num_committed=num_computed,
            length=num_tokens,
            position_limit=request.position_limit,
            num_sent=len(hits) // num_groups,
            num_groups=num_groups,
            protected=protect,
        )
        self.tables.open(seq, -(-num_tokens // block_size))
        if protect:
            self._protected[seq_id] = seq
        self.prefilling[seq_id] = seq
        if self._frames is not None:
            self._frames_left -= self._frames.need(seq)
        self._new.append(
            NewSequence(
                seq_id=seq_id,
                tokens=pack_ints(request.tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed=num_computed,
                blocks=pack_ints(hits),
                max_length=request.max_length,
                sampling=request.sampling,
                cache_salt="" if self._draft_tokens is None else request.cache_salt,
                request_id=client_id(request.request_id),
            )
        )
        self._plan_chunk(seq, batch, share=1.0 if len(self.prefilling) == 1 else 0.0)
        return seq

    def take_news(self) -> tuple[bytes, tuple[NewSequence, ...]]:
        """Return, for a plan, and clear: the packed ids of closed sequences, the new ones."""
        news = pack_ints(self._finished), tuple(self._new)
        self._finished, self._new = [], []
        return news

    # Leaving.

    def close(self, seq: Sequence) -> None:
        """Stop planning `seq`; releases its blocks now, or when its last step has succeeded."""
        assert not seq.closed
        seq.closed = True
        if self._frames is not None:
            self._frames_left += self._frames.need(seq)
        self.prefilling.pop(seq.seq_id, None)
        self.decoding.pop(seq.seq_id, None)
        self._protected.pop(seq.seq_id, None)
        self._finished.append(seq.seq_id)
        if seq.num_in_flight:
            self.draining[seq.seq_id] = seq
        else:
            self.tables.release(seq)

    def drained(self, seq: Sequence) -> None:
        """Release the blocks of a closed sequence whose last step has succeeded."""
        assert seq.closed
        assert not seq.num_in_flight
        del self.draining[seq.seq_id]
        self.tables.release(seq)

    def halt(self) -> list[Sequence]:
        """End and return every sequence, and drop the news that the node was not sent.

        Published blocks stay cached: the steps that were given up did not write them.
        """
        seqs = [*self.prefilling.values(), *self.decoding.values(), *self.draining.values()]
        for seq in seqs:
            seq.closed = True
            self.tables.release(seq)
        self.prefilling.clear()
        self.decoding.clear()
        self.draining.clear()
        self._protected.clear()
        self._finished, self._new = [], []
        return seqs

    def leave(self) -> None:
        """Mark the node as absent, with an empty cache; halt() must come before."""
        assert not self.num_running
        assert not self.draining
        self.is_present = False
        self.tables = BlockTables(BlockPool(self.pool.num_blocks), self._needs)

    def equip(self, num_blocks: int, frames: FrameBudget | None) -> None:
        """Note the cache of the absent node that is about to join."""
        assert not self.is_present
        self.tables = BlockTables(BlockPool(num_blocks), self._needs)
        self._frames = frames

    def check_integrity(self) -> None:
        """Assert that every block is free, cached, or held by the sequences that name it."""
        live = {**self.prefilling, **self.decoding, **self.draining}
        assert len(live) == self.num_running + len(self.draining), "a sequence is in two states"
        self.tables.check_integrity(live.values())
