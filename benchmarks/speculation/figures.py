"""The arithmetic of `topspin bench spec`: counters of drafts, paired ratios, and what is no result.

Owns the figures of one phase (a server, a kind, a concurrency, a round), the change of the
server's counters in it, and the summary over rounds. Sends nothing. Called by
benchmarks.speculation.command.

A ratio is taken round by round, to the first server in the same round. Rounds are few, so the
interval is Student's t on the logarithms: their mean +- t(0.975, rounds - 1) * s / sqrt(rounds).
It covers the noise of the machine from round to round; the prompts are the same in all rounds, so
it says nothing about other prompts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy import stats

from benchmarks.servers.topspin import Metrics
from topspin.errors import EngineUnavailable, TopspinError


class NothingAccepted(TopspinError):
    """A server that was forced to speculate had no token of a draft accepted."""

    code = "nothing_accepted"


class VerifiedDrafts(NamedTuple):
    """Counts of a server, or of a phase: verified drafts, their tokens, and the accepted ones."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    @classmethod
    def of(cls, metrics: Metrics) -> VerifiedDrafts:
        """Return the counts of a server's metrics; raises EngineUnavailable if one is not there."""
        return cls(*(int(metrics[f"topspin_spec_decode_num_{name}_total"]) for name in cls._fields))

    def since(self, before: VerifiedDrafts) -> VerifiedDrafts:
        """Return what was counted since `before`; raises EngineUnavailable if counts fell."""
        change = VerifiedDrafts(*(now - then for now, then in zip(self, before, strict=True)))
        if min(change) < 0:
            raise EngineUnavailable(f"counters of drafts fell from {before} to {self}")
        return change


@dataclass(frozen=True)
class ServerPhase:
    """One server's figures for a kind at a concurrency; `answers` in the order of the requests.

    `median_tpot_ms` is None if no answer had two tokens.
    """

    output_throughput: float
    median_tpot_ms: float | None
    drafts: VerifiedDrafts
    answers: tuple[str, ...]


# A kind's phases in one round, by server, the one without speculation first.
Turn = Mapping[str, ServerPhase]


class Ratio(NamedTuple):
    """The geometric mean of paired ratios, its 95 % interval (None with one pair), and they."""

    mean: float
    low: float | None
    high: float | None
    rounds: list[float]


def paired_ratio(values: Sequence[float], bases: Sequence[float]) -> Ratio:
    """Return the ratio of each value (> 0) to the base (> 0) of the same round."""
    logs = [math.log(value / base) for value, base in zip(values, bases, strict=True)]
    mean = statistics.fmean(logs)
    rounds = [math.exp(each) for each in logs]
    if len(logs) < 2:
        return Ratio(math.exp(mean), None, None, rounds)
    quantile = float(stats.t.ppf(0.975, len(logs) - 1))
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), rounds)


def check_accepted(turns: Mapping[str, Turn], server: str, concurrency: int) -> None:
    """Raise NothingAccepted if `server` had no token accepted in any kind of a round.

    It was told to draft, so what was measured is a server that does not speculate. `turns` is
    kind -> turn.
    """
    drafts = [turn[server].drafts for turn in turns.values()]
    if any(each.accepted_tokens for each in drafts):
        return
    raise NothingAccepted(
        f"the {server} server accepted no token of a draft in any kind of prompt at {concurrency} "
        f"at once ({sum(each.draft_tokens for each in drafts)} were drafted): its figures are not "
        "those of speculative decoding"
    )


def summarise(turns: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """Return server -> figures of a kind at a concurrency, over at least one round.

    The counts are sums over rounds. Beside every server but the first stand the ratios to it, and
    the share of its answers that are the first's.
    """
    first = next(iter(turns[0]))
    table: dict[str, dict[str, Any]] = {}
    for server in turns[0]:
        phases = [turn[server] for turn in turns]
        bases = [turn[first] for turn in turns]
        table[server] = {
            "output_throughput": _figure(
                [phase.output_throughput for phase in phases],
                [phase.output_throughput for phase in bases],
                with_ratio=server != first,
            ),
            "median_tpot_ms": _figure(
                [phase.median_tpot_ms for phase in phases],
                [phase.median_tpot_ms for phase in bases],
                with_ratio=server != first,
            ),
            **_counts([phase.drafts for phase in phases]),
        }
        if server != first:
            table[server]["equal_answers"] = equal_share(phases, bases)
    return table


def _figure(
    values: Sequence[float | None], bases: Sequence[float | None], *, with_ratio: bool
) -> dict[str, Any] | None:
    """Return the median, the rounds and the ratio; None if a round has no value."""
    known = [value for value in values if value is not None]
    known_bases = [base for base in bases if base is not None]
    if len(known) < len(values) or len(known_bases) < len(bases):
        return None
    found: dict[str, Any] = {"median": statistics.median(known), "rounds": known}
    if with_ratio:
        found["ratio"] = paired_ratio(known, known_bases)._asdict()
    return found


def _counts(changes: Sequence[VerifiedDrafts]) -> dict[str, Any]:
    total = VerifiedDrafts(*map(sum, zip(*changes, strict=True)))
    return {
        **total._asdict(),
        "accepted_per_draft": total.accepted_tokens / total.drafts if total.drafts else None,
    }


def equal_share(phases: Sequence[ServerPhase], bases: Sequence[ServerPhase]) -> float:
    """Return the share of answers that equal those of `bases`, request by request."""
    equal = [
        answer == other
        for phase, base in zip(phases, bases, strict=True)
        for answer, other in zip(phase.answers, base.answers, strict=True)
    ]
    return sum(equal) / len(equal)
