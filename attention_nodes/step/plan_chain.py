"""Takes plans in: their chain, and what each makes of the node's sequences.

Owns the chain of steps (a plan out of order is refused), admits and forgets sequences, asks for
drafts, and turns a plan's micro-batches into slices. Knows no layers and no results. Called by
model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np

from attention_nodes.long_contexts.long_contexts import LongContexts
from attention_nodes.sampling.drafts import draft_requests, end_texts, take_drafts
from attention_nodes.step.sequences import SequenceTable, unpack
from attention_nodes.step.step_inputs import Slices, slice_up
from spec_decode.draft import Draft, Drafter, trim
from topspin.errors import ProtocolError
from topspin.messages import StepPlan, StepTicket
from topspin.processes.progress import Beat
from topspin.trace import Kind


class PlanChain:
    """The plans of one attention node, one after the other."""

    def __init__(
        self,
        table: SequenceTable,
        drafter: Drafter | None,
        long: LongContexts | None,
        *,
        max_tokens: int,
        trims: bool,
        ended: Callable[[int], None],
    ) -> None:
        """`trims` drafts to numbers of rows that steps are recorded for.

        `ended` is told the id of each sequence that is forgotten.
        """
        self._table = table
        self._drafter = drafter
        self._long = long
        self._max_tokens = max_tokens
        self._trims = trims
        self._ended = ended
        self._generation = 0
        self._last_step = 0

    def follow(self, plan: StepPlan, index: int) -> None:
        """Check the plan's place in the chain, as attention node `index`.

        Forgets and admits sequences. Raises ProtocolError.
        """
        ticket = plan.ticket
        self._check_ticket(ticket, index)
        if len(plan.micro_batches) != ticket.num_micro_batches:
            raise ProtocolError(f"{len(plan.micro_batches)} micro-batches, not the ticket's")
        begins = ticket.generation > self._generation
        self._generation = ticket.generation
        self._last_step = ticket.step
        finished = unpack(plan.finished, what="finished").tolist()
        if begins:
            finished = self._table.seq_ids + finished
        if self._drafter is not None:
            end_texts(self._drafter, finished, self._table)
        if self._long is not None:
            self._long.end(self._table.rows_of(np.array(finished, dtype=np.int64)))
        for seq_id in finished:
            self._table.forget(seq_id)
            self._ended(seq_id)
        for new in plan.new:
            self._table.admit(new)
            if self._long is not None:
                kept = new.num_computed // self._table.limits.block_size
                self._long.overwrite(unpack(new.blocks, what="blocks")[kept:])

    def _check_ticket(self, ticket: StepTicket, index: int) -> None:
        if ticket.generation < self._generation:
            raise ProtocolError(f"generation {ticket.generation} after {self._generation}")
        if ticket.generation == self._generation and ticket.step <= self._last_step:
            raise ProtocolError(f"step {ticket.step} after step {self._last_step}")
        if index not in ticket.participants:
            raise ProtocolError(f"step {ticket.step} is not for attention node {index}")

    def may_draft(self, plan: StepPlan) -> bool:
        """Return whether a plan lets sequences have drafts, and there is a drafter."""
        return self._drafter is not None and any(mb.max_draft for mb in plan.micro_batches)

    def drafts(self, plan: StepPlan) -> dict[int, Draft]:
        """Return the drafts for a step, by sequence id, once the steps before have been settled."""
        if self._drafter is None or not self.may_draft(plan):
            return {}
        requests = [draft_requests(each, self._table) for each in plan.micro_batches]
        drafts = take_drafts(self._drafter, list(chain.from_iterable(requests)))
        if not self._trims:
            return drafts
        trimmed: dict[int, Draft] = {}
        for micro_batch, own in zip(plan.micro_batches, requests, strict=True):
            ids = [each.text.seq_id for each in own]
            num_rows = int(unpack(micro_batch.num_tokens, what="num_tokens").sum())
            trimmed |= trim({each: drafts[each] for each in ids if each in drafts}, num_rows)
        return trimmed

    def slice_up(
        self,
        plan: StepPlan,
        drafts: dict[int, Draft],
        *,
        may_wait: bool,
        stamp: Callable[[Kind], None],
        beat: Beat | None,
    ) -> tuple[list[Slices], dict[int, str]]:
        """Turn the plan into indices and advance its sequences.

        Returns, by sequence id, why some fail, too. `may_wait`: rows will be with experts, as in
        KeyIndex.code(). `stamp` is called as parts end. Raises ProtocolError.
        """
        micro_batches = [slice_up(each, self._table, drafts) for each in plan.micro_batches]
        num_tokens = sum(slices.num_tokens for slices in micro_batches)
        if num_tokens > self._max_tokens:
            raise ProtocolError(f"{num_tokens} tokens in a step, more than {self._max_tokens}")
        errors: dict[int, str] = {}
        if self._long is not None:
            for each in plan.micro_batches:
                self._long.overwrite(unpack(each.block_ids, what="block_ids"))
            self._long.index.code(may_wait=may_wait)
            stamp(Kind.CODED)
            micro_batches, errors = self._long.prepare(micro_batches, beat)
            stamp(Kind.FETCHED)
        for slices in micro_batches:
            self._table.commit(slices.rows, slices.certain)
        return micro_batches, errors
