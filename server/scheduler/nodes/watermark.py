"""Detection of a node that blocks a step although it answers pings.

Owns the nodes' last reports on the oldest step (topspin.processes.progress) and the two rules that
judge them: a node that the step awaits and that reports nothing is dead; if all nodes wait for
one another, rows or answers were lost on the way. Pure: no clock, no socket. Called by
service.py at every turn.

A step may take any time as long as its nodes report, which they do from layer to layer. So
the limit bounds one layer's work on one node, not the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from server.scheduler.nodes.roster import Member
from server.scheduler.planning.in_flight import StepUnderWay
from topspin.messages import Progress, ProgressState

# After a longer pause of the loop, silence counts from its return: reports may be unread.
MAX_GAP_S = 2.0


class ProgressVerdict(NamedTuple):
    """The node that counts as dead (None: no single one), and the reason as text.

    `silent_s` is the time without progress when this was decided.
    """

    member: Member | None
    reason: str
    silent_s: float


@dataclass(slots=True)
class _Said:
    """A node's last report: step, state, time, and since when both have been the same."""

    step: int
    state: ProgressState
    at_s: float
    since_s: float


class Watermark:
    """The last reports of all nodes.

    The caller passes only reports of the current generation.
    """

    def __init__(self, *, silent_limit_s: float, standstill_limit_s: float | None) -> None:
        """`standstill_limit_s` None: nodes may wait for one another without limit."""
        self._silent_limit_s = silent_limit_s
        self._standstill_limit_s = standstill_limit_s
        self._said: dict[Member, _Said] = {}
        self._judged_s: float | None = None
        self._back_s = 0.0

    def heard(self, message: Progress, now: float) -> None:
        """Note a node's report."""
        member = Member(message.role, message.index)
        before = self._said.get(member)
        same = before is not None and (before.step, before.state) == (message.step, message.state)
        since_s = before.since_s if same and before is not None else now
        self._said[member] = _Said(message.step, message.state, now, since_s)

    def judge(
        self, head: StepUnderWay | None, others: Iterable[Member], now: float
    ) -> ProgressVerdict | None:
        """Return the verdict on step `head`, if it has made no progress for too long.

        `others` take part in it and answer by no result: expert nodes, stages.
        """
        if self._judged_s is not None and now - self._judged_s > MAX_GAP_S:
            self._back_s = now
        self._judged_s = now
        if head is None:
            return None
        waiting_s: list[float] = []
        is_working = False
        for member in [*(Member("attention", index) for index in head.unanswered), *others]:
            said = self._said.get(member)
            if said is not None and _is_done(said, head.step):
                continue
            last_s = max(head.since_s, self._back_s, 0.0 if said is None else said.at_s)
            if now - last_s > self._silent_limit_s:
                return self._silent(member, head.step, now - last_s)
            if said is not None and said.step == head.step and said.state == "waiting":
                waiting_s.append(max(said.since_s, self._back_s))
            else:
                is_working = True
        limit_s = self._standstill_limit_s
        if is_working or not waiting_s or limit_s is None or now - max(waiting_s) <= limit_s:
            return None
        reason = f"all nodes of step {head.step} wait for one another: what was sent is lost"
        return ProgressVerdict(None, reason, now - max(waiting_s))

    def _silent(self, member: Member, step: int, silent_s: float) -> ProgressVerdict:
        reason = (
            f"it has not got on with step {step} for {silent_s:.1f} s, although it is connected "
            f"(failover.progress_deadline_s {self._silent_limit_s:g})"
        )
        return ProgressVerdict(member, reason, silent_s)


def _is_done(said: _Said, step: int) -> bool:
    """Say whether a node has reported its part of `step` as done."""
    return said.step > step or (said.step == step and said.state == "done")
