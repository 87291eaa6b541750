"""The life cycle of a cuda_ipc net, whose errors kernels find while the host does other work.

Owns the host's checks for them. Knows no window and no kernel. Called by ipc_attention.py and
ipc_expert.py.
"""

from __future__ import annotations

import time
from typing import Final

from m2n_comm.gpu.ipc_pairs import IpcPairs
from m2n_comm.rules import NetRules
from topspin.messages import StepTicket

_LOOK_S: Final = 50e-6


def parts_of(ticket: StepTicket, window_rows: int) -> tuple[int, ...]:
    """Return the number of parts of each micro-batch of a step."""
    return tuple(max(1, -(-bucket // window_rows)) for bucket in ticket.row_buckets)


class IpcLife:
    """The faults of one net's kernels as errors, which end its life by `rules`."""

    def __init__(self, rules: NetRules, pairs: IpcPairs) -> None:
        self._rules = rules
        self._pairs = pairs

    def look(self) -> None:
        """Raise the first error so far; never waits."""
        with self._rules:
            self._pairs.look()

    def look_if_done(self) -> None:
        """Call look() on a runtime where enqueued work has already completed."""
        if not self._pairs.runtime.is_asynchronous:
            self.look()

    def settle(self) -> None:
        """Wait until all enqueued work has completed, and raise the first error."""
        done = self._pairs.runtime.current_stream().record()
        while not done.is_done():
            self.look()
            time.sleep(_LOOK_S)
        self.look()

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._rules.close()
        self._pairs.close()
