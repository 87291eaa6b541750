"""Records all work of a ticket on a device: every layer, from gather to reply.

Owns the conditions under which one ticket's recording serves another:
how many attention nodes take part, the row buckets of the micro-batches, and the expert table.
Kernels read everything else from memory (the participants, their rows, the step).
Knows no kernel and no frame; the net says whether it can be recorded (m2n_comm.net.ExpertNet).
Called by worker.py, between a ticket's begin() and finish().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kernels.recordings import Recordings
from kernels.runtime import Runtime
from m2n_comm.net import ExpertNet
from topspin.messages import StepTicket

MAX_TICKETS: Final = 64
"""Recordings that a node keeps: decode steps of a few micro-batches have fewer shapes."""


class TicketShape(NamedTuple):
    """The key of a recording; `row_buckets` has one per micro-batch."""

    num_participants: int
    row_buckets: tuple[int, ...]


class TicketGraphs:
    """The recordings of one node, for the net, epoch and expert table of the last serve().

    Those of an earlier table are dropped: they would keep experts that have left this node.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._recordings: Recordings[TicketShape] = Recordings(runtime, MAX_TICKETS)

    def __len__(self) -> int:
        return len(self._recordings)

    def serve(self, net: ExpertNet, ticket: StepTicket, body: Callable[[], None]) -> None:
        """Enqueue the work of `body` with `net` for `ticket`, which the net has begun."""
        if not net.is_graph_safe:
            body()
            return
        shape = TicketShape(len(ticket.participants), ticket.row_buckets)
        self._recordings.run(shape, body, (net, net.epoch, ticket.table_version))

    def clear(self) -> None:
        """Forget all recordings: the net that they use is to be closed."""
        self._recordings.clear()
