"""A step that a runner has launched and whose result is not sent yet.

Owns its record until the result is sent, what its drafts leave in the table, and the arithmetic
of its timings.
Called by model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attention_nodes.long_contexts.contexts import NOTHING_LOST, FollowedStep
from attention_nodes.sampling.sampler import (
    NO_SCORES,
    NO_VERDICT,
    AskedRows,
    Drawn,
    SampleVerdict,
    Scores,
)
from attention_nodes.step.executor import Receipt
from attention_nodes.step.sequences import IntArray, Reserved, SequenceTable
from attention_nodes.step.step_inputs import Scored
from kernels.runtime import Event
from m2n_comm.net import AttentionNet, NetTimes
from topspin.messages import KvCounts, StepResult, StepTicket, StepTimings, pack_ints


def check_of(net: AttentionNet | None) -> Callable[[], None] | None:
    """Return the check() of a net whose errors arise on the device; None: it has none.

    check() raises the first fault of completed kernels and never waits.
    """
    check: Callable[[], None] | None = getattr(net, "check", None)
    return check


@dataclass(eq=False)
class LaunchedStep:
    """One step; `arrays` are the `num_drawn` of the sampler, then the scores, once they have come.

    `verdict` is set with them. `scored` are the slices that have scores, `ended` the sequences
    that had nothing to feed.
    `followed`: why some fail whatever is drawn.
    `check` is called during the wait for the step and at its end. The host began the step at
    `started_s` and enqueued its layers from `prepared_s` on (time.perf_counter); `began` and
    `rallied` are the events of the device's begin and end of the layers. `draft_s` of its
    preparation went to drafts.
    """

    ticket: StepTicket
    index: int
    asked: AskedRows
    reserved: Reserved
    receipt: Receipt
    started_s: float
    prepared_s: float
    began: Event
    rallied: Event
    times: NetTimes
    draft_s: float = 0.0
    num_drawn: int = 0
    scored: tuple[Scored, ...] = ()
    ended: tuple[int, ...] = ()
    check: Callable[[], None] | None = None
    followed: FollowedStep = NOTHING_LOST
    arrays: list[np.ndarray] | None = None
    verdict: SampleVerdict = NO_VERDICT

    def wait(self) -> list[np.ndarray]:
        """Wait for the end of the step and return its arrays; raises as check()."""
        if self.check is None:
            return self.receipt.arrays()
        while not self.receipt.ended.is_done():
            self.check()
        self.check()
        return self.receipt.arrays()

    def keep_accepted(self, table: SequenceTable) -> tuple[IntArray, IntArray]:
        """Append the accepted tokens of drafts to their sequences, once the arrays have come.

        Returns the cache slots whose content is not in its place, and the places for it, both
        i64[groups of layers, n].
        """
        assert self.arrays is not None
        rows, counts = self.verdict
        drafted = {each.first: each for each in self.asked.sampled.drafted}
        nothing = np.zeros((table.limits.num_groups, 0), dtype=np.int64)
        sources, targets = [nothing], [nothing]
        for idx, mine in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
            each = drafted.get(int(mine[0]))
            path, places = mine[1:] - mine[0] - 1, np.arange(len(mine) - 1)
            if each is None or not table.extend(self.reserved, idx, self.arrays[0][mine[1:]]):
                continue
            moved = path != places
            sources.append(table.slots(each.row, each.storage + path[moved]))
            targets.append(table.slots(each.row, each.storage + places[moved]))
        return np.concatenate(sources, axis=1), np.concatenate(targets, axis=1)

    def result(
        self,
        drawn: Drawn,
        scores: Scores = NO_SCORES,
        *,
        previous_s: float | None,
        kv: KvCounts | None = None,
    ) -> StepResult:
        """Return the result; `previous_s` is the time of the previous step's result.

        The host's preparation during the previous step does not count as time of this step.
        """
        free_s = self.started_s if previous_s is None else max(self.started_s, previous_s)
        prepare_s = max(0.0, self.prepared_s - free_s)
        layers_s = self.rallied.seconds_since(self.began)
        sample_s = self.receipt.ended.seconds_since(self.rallied)
        return StepResult(
            step=self.ticket.step,
            generation=self.ticket.generation,
            index=self.index,
            seq_ids=drawn.seq_ids,
            counts=drawn.counts,
            drafted=drawn.drafted,
            tokens=drawn.tokens,
            logprobs=drawn.logprobs,
            prompt_logprobs=scores.prompt_logprobs,
            errors=drawn.errors | scores.errors | self.followed.errors,
            refused=drawn.refused,
            kv=kv,
            lost_blocks=pack_ints(self.followed.lost_blocks.tolist()),
            timings=StepTimings(
                total_s=prepare_s + layers_s + sample_s,
                # The device may still compute while the host waits for experts.
                attention_s=max(0.0, layers_s - self.times.wait_s),
                wait_s=self.times.wait_s,
                sample_s=sample_s,
                prepare_s=prepare_s,
                expert_s=self.times.expert_s,
                link_s=self.times.link_s,
                gap_s=0.0 if previous_s is None else free_s - previous_s,
                draft_s=self.draft_s,
            ),
        )
