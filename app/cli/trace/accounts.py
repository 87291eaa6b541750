"""The time of a step by its parts, from one result of an attention node to its next.

Owns the accounts, pure arithmetic over timelines (app.cli.trace.report). A node's timeline has
no holes, so all of its own time is accounted for; its waits for experts are divided into the
experts' own work on that hop, the way there and back, and the rest, which nothing explains: queues
behind other micro-batches or nodes, and time in which no process had a core. Knows no server.

A hop is matched with the experts' work by its layer, micro-batch and node, not by times: the clocks
of two nodes are known less exactly than a hop lasts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from app.cli.trace.report import Lane, Span
from topspin.trace import Kind

_OWN = {
    Kind.ATTENTION: "attention and routing",
    Kind.SEARCHED: "search for keys",
    Kind.READ: "selected keys from a file",
    Kind.ATTENDED: "attention to selected keys",
    Kind.LOCAL: "attention and routing",
    Kind.EXPERTS: "local experts",
    Kind.RALLIED: "attention and routing",
    Kind.DISPATCHED: "sending and adding rows",
    Kind.COMBINED: "sending and adding rows",
    Kind.STEP_BEGAN: "inputs",
    Kind.FETCHED: "keys from a file",
    Kind.CODED: "codes of keys",
    Kind.STEP_ENDED: "LM head and sampling",
    Kind.PLAN_RECEIVED: "the scheduler's turn",
}
_EXPERTS, _WAY, _REST = "experts", "the way there and back", "unexplained"
_EXPERTS_WORK = (Kind.JOINED, Kind.COMPUTED, Kind.REPLIED)

_Hop = tuple[int, int, int, int]
"""Step, layer, micro-batch, expert node."""


class Account(NamedTuple):
    """One kind of time: its seconds per step, the mean of the middle half of the steps."""

    name: str
    seconds: float


def accounts_of(
    attention: Lane, experts: Sequence[Lane], steps: Collection[int], way_s: float | None
) -> list[Account]:
    """Return the accounts of `steps` on one attention node, the largest first.

    `way_s` is the time of one way over the link, None if it is not known.
    """
    work = _work_by_hop(experts)
    both_ways_ns = 2e9 * (way_s or 0.0)
    spent: dict[int, dict[str, float]] = {}
    for span in attention.spans:
        if span.step not in steps:
            continue
        own = spent.setdefault(span.step, dict.fromkeys((*_OWN.values(), _EXPERTS, _WAY, _REST), 0))
        duration_ns = span.end_ns - span.start_ns
        if span.kind == Kind.ARRIVED:
            at_work_ns = min(duration_ns, work.get(_hop(span, span.peer), 0))
            way_ns = min(duration_ns - at_work_ns, both_ways_ns)
            own[_EXPERTS] += at_work_ns
            own[_WAY] += way_ns
            own[_REST] += duration_ns - at_work_ns - way_ns
        else:
            own[_OWN.get(span.kind, _REST)] += duration_ns
    if not spent:
        return []
    middle = _middle([sum(each.values()) for each in spent.values()])
    chosen = [each for each in spent.values() if middle[0] <= sum(each.values()) <= middle[1]]
    found = [Account(name, sum(e[name] for e in chosen) / len(chosen) * 1e-9) for name in chosen[0]]
    return sorted((each for each in found if each.seconds), key=lambda each: -each.seconds)


def explained(accounts: Sequence[Account]) -> float:
    """Return the share of the time that is explained, 0 to 1."""
    total_s = sum(each.seconds for each in accounts)
    rest_s = sum(each.seconds for each in accounts if each.name == _REST)
    return 1.0 - rest_s / total_s if total_s else 0.0


def _middle(totals: Sequence[float]) -> tuple[float, float]:
    """Return bounds around the median that hold half of the steps: means of those add up."""
    ordered = sorted(totals)
    quarter = len(ordered) // 4
    return ordered[quarter], ordered[-1 - quarter]


def _hop(span: Span, expert: int) -> _Hop:
    return span.step, span.layer, span.micro_batch, expert


def _work_by_hop(experts: Sequence[Lane]) -> dict[_Hop, int]:
    work: dict[_Hop, int] = {}
    for lane in experts:
        for span in lane.spans:
            if span.kind in _EXPERTS_WORK:
                hop = _hop(span, lane.index)
                work[hop] = work.get(hop, 0) + span.end_ns - span.start_ns
    return work
