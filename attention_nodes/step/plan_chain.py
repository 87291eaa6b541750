"""Takes plans in: their chain, and what each makes of the node's sequences.

Owns the chain of steps (a plan out of order is refused), admits and forgets sequences, asks for
drafts, and turns a plan's micro-batches into slices. Knows no layers and no results. Called by
model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from attention_nodes.long_contexts.contexts import Contexts, PreparedSlices
from attention_nodes.step.drafts import draft_requests, end_texts, take_drafts
from attention_nodes.step.sequences import SequenceTable, unpack
from attention_nodes.step.step_inputs import slice_up
from spec_decode.draft import Draft, Drafter, trim
from topspin.errors import ProtocolError
from topspin.messages import StepPlan, StepTicket
from topspin.processes.progress import Beat, no_beat
from topspin.trace import Stamps


class PlanChain:
    """The plans of one attention node, one after the other."""

    def __init__(
        self,
        table: SequenceTable,
        drafter: Drafter | None,
        contexts: Contexts,
        *,
        max_tokens: int,
        trims: bool,
        ended: Callable[[int], None] = lambda seq_id: None,
    ) -> None:
        """`trims` drafts to numbers of rows that steps are recorded for.

        `ended` is told the id of each sequence that is forgotten.
        """
        self._table = table
        self._drafter = drafter
        self._contexts = contexts
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
        self._contexts.end(finished)
        for seq_id in finished:
            self._table.forget(seq_id)
            self._ended(seq_id)
        for new in plan.new:
            self._table.admit(new)
            limits = self._table.limits
            kept = new.num_computed // limits.block_size * limits.num_groups
            self._contexts.overwrite(unpack(new.blocks, what="blocks")[kept:])

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
        trace: Stamps,
        beat: Beat = no_beat,
    ) -> PreparedSlices:
        """Turn the plan into indices and advance its sequences.

        `may_wait`, `trace` and `beat` as in Contexts.prepare(). Raises ProtocolError.
        """
        micro_batches = [slice_up(each, self._table, drafts) for each in plan.micro_batches]
        num_tokens = sum(slices.num_tokens for slices in micro_batches)
        if num_tokens > self._max_tokens:
            raise ProtocolError(f"{num_tokens} tokens in a step, more than {self._max_tokens}")
        for each in plan.micro_batches:
            self._contexts.overwrite(unpack(each.block_ids, what="block_ids"))
        prepared = self._contexts.prepare(micro_batches, may_wait=may_wait, trace=trace, beat=beat)
        for slices in prepared.micro_batches:
            self._table.commit(slices.rows, slices.certain)
        return prepared
