"""What both ends of cuda_ipc keep alike: how a step is cut into parts, and how a net's life ends.

Pure but for the waiting of `Life.settle`. Knows no window and no kernel. Called by cuda_ipc.py and
cuda_ipc_expert.py.
"""

from __future__ import annotations

import time
from typing import Final

from m2n_comm.gpu.ipc_pairs import IpcPairs
from m2n_comm.host.lines import describe
from m2n_comm.net import NetShape
from topspin.errors import ProtocolError, TransportError
from topspin.messages import StepTicket

_LOOK_S: Final = 50e-6


def parts_of(ticket: StepTicket, window_rows: int) -> tuple[int, ...]:
    """Return in how many parts each micro-batch of a step travels."""
    return tuple(max(1, -(-bucket // window_rows)) for bucket in ticket.row_buckets)


def check_ticket(ticket: StepTicket, shape: NetShape) -> None:
    """Raise ProtocolError for a ticket that asks for more than there are windows for."""
    if not 1 <= ticket.num_micro_batches <= shape.num_micro_batches:
        raise ProtocolError(
            f"step {ticket.step}: {ticket.num_micro_batches} micro-batches, "
            f"windows for {shape.num_micro_batches}"
        )
    if len(ticket.row_buckets) != ticket.num_micro_batches:
        raise ProtocolError(f"step {ticket.step}: row buckets {ticket.row_buckets}")


class Life:
    """Whether a net can be used, and the errors that end it; each end of cuda_ipc has one."""

    def __init__(self, name: str, pairs: IpcPairs) -> None:
        self._name = name
        self._pairs = pairs
        self._failure: str | None = None

    def check_usable(self) -> None:
        """Raise TransportError if the net has failed or is closed."""
        if self._failure is not None:
            raise TransportError(
                f"{self._name}: this net can not be used any more: {self._failure}"
            )

    def fail(self, error: BaseException) -> None:
        """Let the net be unusable from now on, and end what kernels wait for."""
        if self._failure is None:
            self._failure = describe(error)
        self._pairs.control.abort()

    def look(self) -> None:
        """Raise what has gone wrong so far; never waits."""
        self.check_usable()
        try:
            self._pairs.look()
        except BaseException as error:
            self.fail(error)
            raise

    def look_if_done(self) -> None:
        """Look, on a runtime where all that was enqueued has happened."""
        if not self._pairs.runtime.is_asynchronous:
            self.look()

    def settle(self) -> None:
        """Wait until all that was enqueued so far has happened, and raise what went wrong."""
        done = self._pairs.runtime.current_stream().record()
        while not done.is_done():
            self.look()
            time.sleep(_LOOK_S)
        self.look()

    def close(self) -> None:
        """Free everything; safe to call twice."""
        if self._failure is None:
            self._failure = "it is closed"
        self._pairs.close()
