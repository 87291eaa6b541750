"""The outputs and failures of a step, grouped per gateway.

Owns the grouping only: at most one Outputs message per gateway and step. Knows no sockets.
Filled by policy.py, sent by service.py.
"""

from __future__ import annotations

from server.scheduler.planning.sequence import Request
from topspin.errors import RequestError, TopspinError
from topspin.messages import Outputs, RequestFailed, RequestOutput

Delivery = tuple[bytes, Outputs | RequestFailed]
"""A message, and the gateway that gets it."""


class Outbox:
    """Collects outputs and failures; `deliveries` returns them, failures last."""

    def __init__(self) -> None:
        self._outputs: dict[bytes, list[RequestOutput]] = {}
        self._failures: list[Delivery] = []

    def outputs_of(self, peer: bytes) -> list[RequestOutput]:
        """Return the list to which outputs for `peer` are appended."""
        return self._outputs.setdefault(peer, [])

    def fail(self, request: Request, error: TopspinError) -> None:
        """Record that `request` has ended with `error`."""
        self._failures.append((request.peer, failure(request.request_id, error)))

    def deliveries(self) -> list[Delivery]:
        """Return everything collected."""
        outputs: list[Delivery] = [
            (peer, Outputs(outputs=tuple(each))) for peer, each in self._outputs.items()
        ]
        return outputs + self._failures


def failure(request_id: str, error: TopspinError) -> RequestFailed:
    """Return the message that ends a request with `error`."""
    param = error.param if isinstance(error, RequestError) else None
    return RequestFailed(
        request_id=request_id,
        code=error.code,
        status=error.status,
        message=str(error),
        param=param or "",
    )
