"""The way of a step's rows through an attention node's stages, and back to it.

Owns the order: as each micro-batch is through the node's own layers it goes to the first stage,
from each stage, by way of this node, to the next, and from the last one back. In a recorded step
all this is Python, between ops. Knows no layers, no sockets (m2n_comm.host.stage_link) and no plan.
Called by rally.py and model_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from attention_nodes.step.rally import Passage, RowsInFlight
from kernels.runtime import Runtime
from m2n_comm.net import NO_TIMES, NetTimes
from topspin.messages import StepTicket


class StageLinkEnd(Protocol):
    """One end of the pair of an attention node and a stage; see m2n_comm.host.stage_link."""

    def begin(self, ticket: StepTicket) -> None: ...

    def send(self, micro_batch: int, rows: Tensor, times: NetTimes = NO_TIMES) -> None: ...

    def receive(self, micro_batch: int, out: Tensor) -> None: ...

    @property
    def times(self) -> NetTimes: ...

    def close(self) -> None: ...


class Relay(Passage):
    """An attention node's links to its stages, one at least, in the order of their layers.

    Micro-batches without rows do not travel.
    """

    def __init__(self, links: Sequence[StageLinkEnd], runtime: Runtime) -> None:
        """`runtime` is that of the node's own layers."""
        self._links = links
        self._runtime = runtime

    def begin(self, ticket: StepTicket) -> None:
        """Open a step."""
        for link in self._links:
            link.begin(ticket)

    def leave(self, micro_batch: int, flight: RowsInFlight) -> None:
        """Send a micro-batch that is through the node's own layers."""
        if len(flight.residual):
            self._runtime.call_again(partial(self._links[0].send, micro_batch, flight.residual))

    def end(self, flights: Sequence[RowsInFlight]) -> None:
        """Pass all micro-batches on, until the last stage has returned the residuals, complete."""
        self._runtime.call_again(partial(self._pass_on, flights))

    def _pass_on(self, flights: Sequence[RowsInFlight]) -> None:
        for place, link in enumerate(self._links):
            for micro_batch, flight in enumerate(flights):
                if not len(flight.residual):
                    continue
                link.receive(micro_batch, flight.residual)
                if place + 1 < len(self._links):
                    self._links[place + 1].send(micro_batch, flight.residual)

    def add_times(self, own: NetTimes) -> NetTimes:
        """Return the times of all nets in the step: the node's `own` and those of its stages."""
        found = [own, *(link.times for link in self._links)]
        return own._replace(
            wait_s=sum(each.wait_s for each in found), expert_s=sum(each.expert_s for each in found)
        )

    def close(self) -> None:
        """Leave all stages."""
        for link in self._links:
            link.close()
