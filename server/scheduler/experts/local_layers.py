"""The choice whether the layers that a plan's local_experts names are local, by measured steps.

Owns the times of steps in which they are and of steps in which their rows travel, by the load, and
the decision. The time compared is that of all layers on the attention nodes, waits
included: whatever hides a hop, or shares a core with it, is in it. Pure: knows no clock; service.py
asks for a change, balancer.py changes the table.

One side's time says nothing of the other's, so the other one is tried for TRIAL_STEPS: first
because there are no measurements of it, then after RETRY_STEPS, which double with each trial. In
between the layers change sides only if the other side's model predicts, for the recent loads, a
time that is shorter by HYSTERESIS. Each such change doubles the steps until the next one, up to
RETRY_STEPS without a change; so whatever the times do, changes are rare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from statistics import median
from typing import Final, NamedTuple

from server.scheduler.micro_batching.cost import CostModel, LinearFit, StepLoad
from topspin.messages import StepTimings

SETTLE_STEPS: Final = 16
"""Steps after a change that are not measured: their shapes are recorded and kernels compiled."""
TRIAL_STEPS: Final = 96
"""The steps that tell the times of a side: as many as are remembered. Both halves of them must
agree on a change, and the newer one tells the times: a link that has changed is not taken for its
mean before and after."""
HYSTERESIS: Final = 0.05
RETRY_STEPS: Final = 4000
MAX_DOUBLINGS: Final = 10
# How often a decision is looked for.
_EVERY: Final = 16
# A step that takes so many times as long as others of its load counts as one that takes so long.
_OUTLIER: Final = 3.0

Load = tuple[float, float, float]
"""1, tokens, query-key pairs of all attention nodes."""


class Change(NamedTuple):
    """The layers that are to be local now, and the times by which that was decided, in words."""

    layers: tuple[int, ...]
    reason: str


class LocalLayers:
    """The side of one engine's layers, local or remote, where they begin.

    `wanted` says whether they should be local from now on. Invariant: it is decided anew only after
    steps on the side that it names.
    """

    def __init__(self, prior: CostModel, named: tuple[int, ...] = ()) -> None:
        """`prior` tells how times grow with loads where the steps do not.

        `named` are the layers that are local together, or not.
        """
        self._named = named
        self._prior = (
            prior.attention_fixed_s + prior.expert_fixed_s,
            prior.attention_token_s + prior.expert_token_s,
            prior.attention_pair_s,
        )
        self.wanted = False
        self._side = False
        # Of the side that was left: the coefficients of its times.
        self._other: tuple[float, ...] | None = None
        self._recent: deque[tuple[Load, float]] = deque(maxlen=TRIAL_STEPS)
        self._num_steps = 0
        self._is_trial = False
        self._num_changes = self._num_trials = 0

    def learn(
        self, loads: Mapping[int, StepLoad], timings: Mapping[int, StepTimings], *, is_local: bool
    ) -> None:
        """Learn from a step's loads and timings by attention node."""
        if is_local != self._side:
            self._enter(is_local)
        self._num_steps += 1
        num_measured = self._num_steps - SETTLE_STEPS
        if num_measured <= 0:
            return
        load = (
            1.0,
            float(sum(each.num_tokens for each in loads.values())),
            float(sum(each.num_pairs for each in loads.values())),
        )
        self._recent.append((load, max(t.attention_s + t.wait_s for t in timings.values())))
        if is_local == self.wanted and num_measured >= TRIAL_STEPS and not num_measured % _EVERY:
            self._decide(num_measured)

    def _enter(self, is_local: bool) -> None:
        """Begin to measure a side anew: since it was left its times may have changed."""
        self._side = is_local
        self._num_steps = 0
        if len(self._recent) == TRIAL_STEPS:
            fit = LinearFit(self._prior)
            for load, took_s in list(self._recent)[TRIAL_STEPS // 2 :]:
                fit.add(load, took_s)
            self._other = fit.coefficients
        self._recent.clear()

    def _decide(self, num_measured: int) -> None:
        """Change `wanted` if that is due after so many measured steps on one side."""
        if num_measured >= RETRY_STEPS:
            self._num_changes = 0
        patience = TRIAL_STEPS * (1 if self._is_trial else 2**self._num_changes)
        retry = RETRY_STEPS * 2 ** max(0, self._num_trials - 1)
        if self._other is None or num_measured >= retry:
            self._num_trials = min(self._num_trials + 1, MAX_DOUBLINGS)
            self._change(is_trial=True)
        elif num_measured >= patience and self._is_worse():
            if not self._is_trial:
                self._num_changes = min(self._num_changes + 1, MAX_DOUBLINGS)
            self._change(is_trial=False)

    def _is_worse(self) -> bool:
        """Say whether steps are slower than they would be on the other side."""
        recent, half = list(self._recent), TRIAL_STEPS // 2
        assert self._other is not None
        times_s = [_compare(part, self._other) for part in (recent[:half], recent[half:])]
        return all(there_s * (1 + HYSTERESIS) < here_s for here_s, there_s in times_s)

    def _change(self, *, is_trial: bool) -> None:
        self._is_trial = is_trial
        self.wanted = not self._side

    def change(self, local: tuple[int, ...]) -> Change | None:
        """Return how the layers that are `local` in the table in use should change; None: not."""
        wanted = self._named if self.wanted else ()
        if wanted == local:
            return None
        here, there = ("?" if each is None else f"{each * 1e3:.2f} ms" for each in self.times_s())
        return Change(
            wanted,
            f"{len(wanted)} layers are to be local, not {len(local)}: a step's layers take "
            f"{here} now, {there} then",
        )

    def times_s(self) -> tuple[float | None, float | None]:
        """Return the mean seconds of the recent steps' layers: as measured, and on the other side.

        None: that is not known.
        """
        if not self._recent:
            return None, None
        if self._other is None:
            return sum(took_s for _, took_s in self._recent) / len(self._recent), None
        return _compare(self._recent, self._other)


def _compare(
    steps: Collection[tuple[Load, float]], other: tuple[float, ...]
) -> tuple[float, float]:
    """Return the mean seconds of `steps`, outliers bounded, and as `other` predicts them."""
    predicted_s = [
        max(1e-9, sum(c * x for c, x in zip(other, load, strict=True))) for load, _ in steps
    ]
    pairs = [(took_s, p) for (_, took_s), p in zip(steps, predicted_s, strict=True)]
    limit = _OUTLIER * median(took_s / p for took_s, p in pairs)
    here_s = sum(min(took_s, limit * p) for took_s, p in pairs)
    return here_s / len(steps), sum(predicted_s) / len(steps)
