"""The times of an attention node's step, in words that hops.py counts in.

Knows no clock and no frame. Read by attention_side.py.
"""

from __future__ import annotations

from array import array

from m2n_comm.host.frames import hops
from m2n_comm.net import NetTimes


class AttentionTimes:
    """The sums of one step, at `address`, as NetTimes says."""

    def __init__(self, num_experts: int) -> None:
        self._words = array("q", bytes(hops.EXPERT_NS + 8 * num_experts))
        self.address: int = self._words.buffer_info()[0]

    def begin(self) -> None:
        """Begin a step."""
        for idx in range(len(self._words)):
            self._words[idx] = 0

    @property
    def has_answers(self) -> bool:
        """Return whether an answer has come in this step."""
        return self._words[hops.NUM_ANSWERS // 8] > 0

    def read(self) -> NetTimes:
        """Return the sums so far."""
        _, wait_ns, link_ns, num_links, *expert_ns = self._words
        return NetTimes(
            wait_s=wait_ns * 1e-9,
            expert_s=max(expert_ns, default=0) * 1e-9,
            link_s=link_ns * 1e-9 / num_links if num_links else None,
        )
