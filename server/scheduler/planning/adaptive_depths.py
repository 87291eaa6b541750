"""Joins the controller of speculative decoding to the steps that are planned and done.

Owns what of a step the controller sees: which requests decode, how many rows there are, what their
drafts came to. It is here, beside the plans, because a step is as long for all of its requests on
all nodes: whether one more row pays depends on all others. Nodes do not wait for it: they verify
what they hold, up to the planned number of tokens. Called by policy.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from server.scheduler.planning.attention_replica import AttentionReplica
from server.scheduler.planning.in_flight import NodePart, RunningStep
from server.scheduler.planning.sequence import Request
from spec_decode.controller import Controller

# So many planned steps without drafts, of as many and some more, are worth a word to the user.
LOSING_STEPS = 1000
LOSING_SHARE = 0.95


class AdaptiveDepths:
    """How many tokens nodes may draft for each request in the next step."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._depths: dict[int, int] = {}
        self._has_warned = False

    def of(self, request: Request) -> int:
        """Return the number for the step that is being planned."""
        return self._depths.get(request.number, 0)

    def plan(self, replicas: Iterable[AttentionReplica], budgets: Mapping[int, int]) -> None:
        """Choose the numbers for a step of the replicas' running sequences."""
        decoding: list[int] = []
        num_rows = room = 0
        for replica in replicas:
            budget, num_decoding = budgets.get(replica.index, 0), len(replica.decoding)
            decoding += [seq.request.number for seq in replica.decoding.values()]
            num_rows += min(num_decoding + replica.num_pending_tokens, budget)
            room += replica.draft_room(budget, num_decoding)
        self._depths = self._controller.plan(decoding, max(num_rows, len(decoding)), room=room)

    def learn(self, step: RunningStep) -> None:
        """Learn from a step that is done, before its tokens are applied."""
        num_drafted = 0
        for part in step.parts.values():
            num_drafted += sum(part.drafted)
            self._learn_drafts(part)
        is_decode = all(count == 1 for part in step.parts.values() for count in part.counts)
        if is_decode and not step.after_idle:
            num_rows = sum(load.num_tokens for load in step.loads.values())
            self._controller.stepped(num_rows, step.took_s, num_drafted=num_drafted)

    def _learn_drafts(self, part: NodePart) -> None:
        lengths = part.drafted or [0] * len(part.seqs)
        for seq, planned, length, tokens in zip(
            part.seqs, part.drafts, lengths, part.tokens, strict=True
        ):
            if planned and tokens:
                self._controller.drafted(
                    seq.request.number, planned=planned, length=length, accepted=len(tokens) - 1
                )

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended."""
        self._controller.forget([request.number])

    def take_warning(self) -> str | None:
        """Return, once, that drafts do not pay, if that is so."""
        steps, off = self._controller.num_steps, self._controller.num_steps_off
        if self._has_warned or steps < LOSING_STEPS or off < LOSING_SHARE * steps:
            return None
        self._has_warned = True
        return (
            f"--speculative-config: drafts would have made {off} of {steps} steps slower, by "
            "measured times and acceptance; they are tried rarely until they pay"
        )
