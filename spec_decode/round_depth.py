"""The number of passes that a draft node makes while the target verifies.

Owns the times of a target's step and of a pass, and the choice between r = floor(t_target /
t_draft) passes and one more, which the target waits for in part but which may find the tree deeper
(SwiftSpec, section 4): both are measured in turns, and the one with more tokens per second is kept
until it is tried against the other again. Pure: times come in.
"""

from __future__ import annotations

from typing import Final

ROUNDS: Final = 16
"""Rounds of one depth before the other is measured."""
KEPT_ROUNDS: Final = 256
"""Rounds of the better depth before both are measured again."""
_RATE: Final = 0.1


class RoundDepth:
    """At least one pass, at most `most`. All times are of one clock, in seconds."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._target_s: float | None = None
        self._pass_s: float | None = None
        self._began_s: float | None = None
        self._extra = 0
        self._rounds = 0
        self._tokens = 0
        self._speeds: dict[int, float] = {}
        self._limit = ROUNDS

    @property
    def passes(self) -> int:
        """Return the passes of the next round."""
        if self._target_s is None or self._pass_s is None:
            return 1
        fitting = int(self._target_s / self._pass_s)
        return max(1, min(fitting + self._extra, self._most))

    @property
    def pass_share(self) -> float:
        """Return the time of a pass in steps of the target; 0 if nothing was timed."""
        if self._target_s is None or self._pass_s is None:
            return 0.0
        return self._pass_s / self._target_s

    def passed(self, took_s: float) -> None:
        """Learn how long a pass took."""
        self._pass_s = _mean(self._pass_s, took_s)

    def heard(self, now_s: float, *, target_s: float, num_tokens: int) -> None:
        """Learn that verdicts came, by which sequences go on by `num_tokens`.

        `target_s` is the time that the target's step took, 0 if unknown: what passes here between
        two verdicts also has the pass that the target waited for.
        """
        if not target_s:
            return
        self._target_s = _mean(self._target_s, target_s)
        if self._began_s is None:
            self._began_s = now_s
            return
        self._tokens += num_tokens
        self._rounds += 1
        if self._rounds < self._limit:
            return
        self._speeds[self._extra] = self._tokens / max(now_s - self._began_s, 1e-9)
        if len(self._speeds) < 2:
            self._extra, self._limit = 1 - self._extra, ROUNDS
        else:
            self._extra = max(self._speeds, key=lambda extra: self._speeds[extra])
            self._speeds.clear()
            self._limit = KEPT_ROUNDS
        self._rounds = self._tokens = 0
        self._began_s = now_s


def _mean(mean: float | None, value: float) -> float:
    """Return a running mean; a stall of the machine counts for little."""
    return value if mean is None else mean + _RATE * (min(value, 3.0 * mean) - mean)
