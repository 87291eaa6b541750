"""The policy's telemetry: counters since start for /metrics, and log entries on single requests.

Owns plain numbers, whose names are those of Stats, and the entries' names and fields. Filled by
policy.py. Knows no logging: the journal calls the `JournalNote` it was given;
server.scheduler.command makes one that logs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from server.scheduler.planning.sequence import Request
from topspin.errors import TopspinError
from topspin.messages import (
    ITERATION_BUCKETS,
    STEP_BUCKETS_S,
    FinishReason,
    KvCounts,
    StepHistogram,
    StepTimings,
)

PHASES = ("prepare", "draft", "attention", "expert", "wait", "link", "sample", "scheduler_gap")


@dataclass(slots=True)
class Histogram:
    """Durations by bucket, as in StepHistogram."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    sum_s: float = 0.0

    def observe(self, duration_s: float) -> None:
        """Count a duration in the first bucket whose bound is not below it."""
        self.counts[bisect_left(STEP_BUCKETS_S, duration_s)] += 1
        self.sum_s += duration_s


@dataclass(slots=True)
class Counters:
    """Totals since start. Prefix cache queries and hits count tokens of admitted sequences.

    `num_accepted_tokens[i]` counts drafts of which at least i + 1 tokens were kept.
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_seconds: float = 0.0
    phases: dict[str, Histogram] = field(
        default_factory=lambda: {phase: Histogram() for phase in PHASES}
    )
    num_replays: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: list[int] = field(default_factory=list)
    kv: KvCounts = field(default_factory=KvCounts)
    iteration_tokens: list[int] = field(default_factory=lambda: [0] * (len(ITERATION_BUCKETS) + 1))
    iteration_tokens_sum: int = 0

    def observe_tokens(self, num_tokens: int) -> None:
        """Count a step that computed so many tokens."""
        self.iteration_tokens[bisect_left(ITERATION_BUCKETS, num_tokens)] += 1
        self.iteration_tokens_sum += num_tokens

    def observe_draft(self, length: int, accepted: int) -> None:
        """Count a draft of `length` tokens, of which a path of `accepted` was kept."""
        self.num_drafts += 1
        self.num_draft_tokens += length
        self.num_accepted_tokens += [0] * (accepted - len(self.num_accepted_tokens))
        for position in range(accepted):
            self.num_accepted_tokens[position] += 1

    def observe(self, timings: StepTimings, *, after_idle: bool) -> None:
        """Count one attention node's step; the gap before it only unless `after_idle`."""
        phases = self.phases
        phases["prepare"].observe(timings.prepare_s)
        if timings.draft_s:
            phases["draft"].observe(timings.draft_s)
        phases["attention"].observe(timings.attention_s)
        phases["expert"].observe(timings.expert_s)
        phases["wait"].observe(timings.wait_s)
        phases["sample"].observe(timings.sample_s)
        if timings.link_s is not None:
            phases["link"].observe(timings.link_s)
        if not after_idle:
            phases["scheduler_gap"].observe(timings.gap_s)

    def step_phases(self) -> dict[str, StepHistogram]:
        """Return all phases for a message."""
        return {
            phase: StepHistogram(counts=tuple(each.counts), sum_s=each.sum_s)
            for phase, each in self.phases.items()
        }

    def for_stats(self) -> dict[str, Any]:
        """Return all of them for a Stats message, by its fields' names."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        del shown["phases"]
        return {
            **shown,
            "step_phases": self.step_phases(),
            "num_accepted_tokens": tuple(self.num_accepted_tokens),
            "iteration_tokens": tuple(self.iteration_tokens),
        }


class JournalNote(Protocol):
    """Takes an entry about a choice of a client's request; `is_bad`: an operator should see it."""

    def __call__(
        self, what: str, request_id: str, fields: dict[str, object], *, is_bad: bool = False
    ) -> None:
        """Take the entry; `request_id` is the engine's."""


def no_note(what: str, request_id: str, fields: dict[str, object], *, is_bad: bool = False) -> None:
    """Take an entry and drop it."""


class Journal:
    """Turns events of the policy into entries."""

    def __init__(self, note: JournalNote) -> None:
        self._note = note

    def admitted(self, request: Request, *, node: int, num_cached: int) -> None:
        """Record that `request` got its place on an attention node; again after each preemption."""
        fields: dict[str, object] = {
            "node": node,
            "prompt_tokens": request.num_prompt_tokens,
            "cached_tokens": num_cached,
            "queue_s": round(request.queue_s, 6),
        }
        self._note("admitted", request.request_id, fields)

    def finished(self, request: Request, reason: FinishReason) -> None:
        """Record that `request` is complete."""
        self._note("finished", request.request_id, {"reason": reason, **_counts(request)})

    def aborted(self, request: Request) -> None:
        """Record that the gateway gave `request` up: the client has gone, or has all it wants."""
        self._note("aborted", request.request_id, _counts(request))

    def preempted(self, request: Request) -> None:
        """Record that `request` lost its blocks and waits again."""
        self._note("preempted", request.request_id, _counts(request))

    def replayed(self, request: Request) -> None:
        """Record that `request` waits to be computed again after a loss."""
        fields = {"replays": request.num_replays, **_counts(request)}
        self._note("replayed", request.request_id, fields)

    def failed(self, request: Request, error: TopspinError) -> None:
        """Record that `request` ended with `error`."""
        fields = {"code": error.code, "error": str(error), **_counts(request)}
        self._note("failed", request.request_id, fields, is_bad=True)


def _counts(request: Request) -> dict[str, object]:
    return {"output_tokens": request.num_output_tokens}
