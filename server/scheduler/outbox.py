"""What a step's results mean for the gateways: outputs and failures, grouped per gateway.

Owns the grouping only: at most one Outputs message per gateway and step. Knows no sockets.
Filled by policy.py, sent by service.py.
"""

from __future__ import annotations

from typing import NamedTuple

from server.scheduler.sequence import Request
from topspin.errors import TopspinError
from topspin.messages import Outputs, RequestFailed, RequestOutput


class Delivery(NamedTuple):
    """A message for the gateway `peer`."""

    peer: bytes
    message: Outputs | RequestFailed


class Outbox:
    """Collects outputs and failures; `deliveries` hands them out, failures last."""

    def __init__(self) -> None:
        self._outputs: dict[bytes, list[RequestOutput]] = {}
        self._failures: list[Delivery] = []

    def outputs_of(self, peer: bytes) -> list[RequestOutput]:
        """Return the list to which outputs for `peer` are appended."""
        return self._outputs.setdefault(peer, [])

    def fail(self, request: Request, error: TopspinError) -> None:
        """Record that `request` has ended with `error`."""
        self._failures.append(Delivery(request.peer, failure(request.request_id, error)))

    def deliveries(self) -> list[Delivery]:
        """Return everything collected."""
        outputs = [Delivery(peer, Outputs(outputs=tuple(o))) for peer, o in self._outputs.items()]
        return outputs + self._failures


def failure(request_id: str, error: TopspinError) -> RequestFailed:
    """Return the message that ends a request with `error`."""
    return RequestFailed(
        request_id=request_id, code=error.code, status=error.status, message=str(error)
    )
