"""The outputs and failures of a step, grouped per gateway.

Owns the grouping only: at most one Outputs message per gateway and step, and one RequestQueued per
gateway and turn. Knows no sockets. Filled by policy.py, sent by service.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from server.scheduler.planning.sequence import Request
from topspin.errors import RequestError, TopspinError
from topspin.messages import Outputs, RequestFailed, RequestOutput, RequestQueued

Delivery = tuple[bytes, Outputs | RequestQueued | RequestFailed]
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


class Arrivals:
    """The requests that have been queued, and whose gateways have not been told so."""

    def __init__(self) -> None:
        self._untold: list[Request] = []

    def add(self, request: Request) -> None:
        """Note a request that has just been queued."""
        self._untold.append(request)

    def deliveries(self, is_compiling: Callable[[str], bool]) -> list[Delivery]:
        """Return what gateways are to be told; requests whose grammar `is_compiling` have time."""
        if not self._untold:
            return []
        told: defaultdict[bytes, list[str]] = defaultdict(list)
        untold, self._untold = self._untold, []
        for request in untold:
            if is_compiling(request.grammar_key):
                self._untold.append(request)
            elif not request.ended:
                told[request.peer].append(request.request_id)
        return [(peer, RequestQueued(request_ids=tuple(ids))) for peer, ids in told.items()]


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
