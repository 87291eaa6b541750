"""The rules of m2n_comm.net that are the same for every net, on any transport.

Owns the usability of a net, the checks of tables, tickets and the caller's tensors, and the
uncombined dispatches. Knows no frame, no memory and no device; each side of each
transport has one of these objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from m2n_comm.net import ExpertBatch, NetShape
from m2n_comm.waits import TURN_S
from topspin.errors import FrameError, ProtocolError, TransportError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket


def describe(error: BaseException) -> str:
    """Return kind and text of `error`, without the traceback, which keeps windows alive."""
    return f"{type(error).__name__}: {error}"


class NetRules:
    """The rules of both sides. As a context: an error inside makes the net unusable.

    `on_failure` is called once, when an error makes the net unusable.
    """

    def __init__(
        self, name: str, shape: NetShape, *, on_failure: Callable[[], None] | None = None
    ) -> None:
        """`name` is the node's name in errors, such as "expert 1"."""
        self.name = name
        self.shape = shape
        self._failure: str | None = None
        self._on_failure = on_failure

    def check_usable(self) -> None:
        """Raise TransportError if the net has failed or is closed."""
        if self._failure is not None:
            raise TransportError(f"{self.name}: this net can not be used any more: {self._failure}")

    def fail(self, error: BaseException) -> None:
        """Make the net unusable from now on."""
        if self._failure is None:
            self._failure = describe(error)
        if self._on_failure is not None:
            self._on_failure()

    def close(self) -> None:
        """Make the net unusable because it is closed."""
        if self._failure is None:
            self._failure = "it is closed"

    def __enter__(self) -> None:
        """Raise TransportError if the net has failed or is closed."""
        if self._failure is not None:
            self.check_usable()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Make the net unusable after an error."""
        if error is not None:
            self.fail(error)

    def _check_micro_batches(self, ticket: StepTicket) -> None:
        if not 1 <= ticket.num_micro_batches <= self.shape.num_micro_batches:
            raise ProtocolError(
                f"step {ticket.step}: {ticket.num_micro_batches} micro-batches, "
                f"windows for {self.shape.num_micro_batches}"
            )
        if len(ticket.row_buckets) != ticket.num_micro_batches:
            raise ProtocolError(f"step {ticket.step}: row buckets {ticket.row_buckets}")


class OpenDispatch(Protocol):
    """A dispatch that is not combined yet."""

    @property
    def layer(self) -> int: ...

    @property
    def size(self) -> torch.Size:
        """Return the size of its hidden rows."""


FlightT = TypeVar("FlightT", bound=OpenDispatch)
Route = TypeVar("Route")


class AttentionRules(NetRules, Generic[FlightT, Route]):
    """The rules of an attention node's side.

    `flights[mb]` is the dispatch of that micro-batch between its dispatch() and the end of its
    combine(). `patience_s` is how long the next wait may last; begin() sets that of the first.
    `local` are the MoE layers that attention nodes compute in this step (before the first: by the
    first table).
    `make_route` turns a table into the net's routing data.
    """

    def __init__(
        self,
        index: int,
        shape: NetShape,
        *,
        num_experts: int,
        make_route: Callable[[ExpertTable], Route],
        absent: Collection[int] = (),
        dtypes: tuple[torch.dtype | None, ...] | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """`absent` expert nodes must hold no expert in any table.

        `dtypes` are the required ones of hidden, experts and weights; None is any.
        """
        super().__init__(f"attention {index}", shape, on_failure=on_failure)
        self.flights: list[FlightT | None] = [None] * shape.num_micro_batches
        self.step = 0
        self.local: frozenset[int] = frozenset()
        self.patience_s = shape.deadline_s
        self._index = index
        self._num_experts = num_experts
        self._absent = absent
        self._dtypes = dtypes
        self._make_route = make_route
        self._routes: dict[int, tuple[ExpertTable, Route]] = {}

    def set_table(self, table: ExpertTable) -> Route:
        """Keep `table` for tickets of its version; return its route. See AttentionNet.set_table.

        Raises ProtocolError if it does not fit.
        """
        table.validate()
        if len(table.slots) != self.shape.num_layers or table.num_nodes != self._num_experts:
            raise ProtocolError(
                f"expert table {table.version}: {len(table.slots)} layers over "
                f"{table.num_nodes} nodes, expected {self.shape.num_layers} over "
                f"{self._num_experts}"
            )
        for node in self._absent:
            if any(table.experts_of(node)):
                raise ProtocolError(
                    f"expert table {table.version}: expert node {node} is absent and holds experts"
                )
        if not self._routes:
            self.local = frozenset(table.local)
        known = self._routes.get(table.version)
        if known is None or known[0] != table:
            known = self._routes[table.version] = table, self._make_route(table)
        return known[1]

    def begin(self, ticket: StepTicket) -> Route:
        """Open a step; return the route of its table and forget those of older ones.

        Raises ProtocolError if the ticket does not fit, or a dispatch is not combined.
        """
        self.check_usable()
        step, version = ticket.step, ticket.table_version
        if self._index not in ticket.participants:
            raise ProtocolError(f"step {step}: {self.name} takes no part")
        self._check_micro_batches(ticket)
        for micro_batch, flight in enumerate(self.flights):
            if flight is not None:
                raise ProtocolError(
                    f"step {step}: micro-batch {micro_batch} of step {self.step} is still in "
                    "the air"
                )
        if version not in self._routes:
            raise ProtocolError(
                f"step {step}: expert table {version}, {self.name} has {sorted(self._routes)}"
            )
        if len(self._routes) > 1:
            self._routes = {known: kept for known, kept in self._routes.items() if known >= version}
        # The experts may serve a step of other attention nodes first.
        is_next = ticket.previous in (0, self.step)
        self.patience_s = self.shape.deadline_s if is_next else TURN_S
        self.step = step
        table, route = self._routes[version]
        self.local = frozenset(table.local)
        return route

    def check_rows(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> None:
        """Raise FrameError unless hidden is [T, H] and the others are [T, K]."""
        check_rows(self.shape, hidden, experts, weights)
        if self._dtypes is None:
            return
        for name, got, wanted in zip(
            ("hidden", "experts", "weights"), (hidden, experts, weights), self._dtypes, strict=True
        ):
            if wanted is not None and got.dtype != wanted:
                raise FrameError(f"dispatch: {name} is {got.dtype}, expected {wanted}")

    def flight(self, micro_batch: int, layer: int, out: Tensor) -> FlightT:
        """Return the dispatch to combine. Raises FrameError for an `out` that does not fit."""
        flight = self.flights[micro_batch]
        assert flight is not None, "dispatch() first"
        assert flight.layer == layer, "combine() of another layer than the dispatch"
        check_sum(out, flight.size)
        return flight

    def close(self) -> None:
        """Make the net unusable because it is closed, and drop its dispatches."""
        super().close()
        self.flights = [None] * len(self.flights)


class ExpertRules(NetRules):
    """The rules of an expert node's side.

    `open` is the batch without a reply, `ticket` that of the current step, `num_slots[layer]` the
    number of this node's slots in the step's table, `local` the layers that attention nodes compute
    by it.
    """

    def __init__(
        self,
        index: int,
        shape: NetShape,
        *,
        peers: Collection[int],
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """`peers` are the attention nodes that are present."""
        super().__init__(f"expert {index}", shape, on_failure=on_failure)
        self.open: ExpertBatch | None = None
        self._index = index
        self._peers = peers
        self.ticket: StepTicket | None = None
        self.num_slots: list[int] = []
        self.local: frozenset[int] = frozenset()
        self._known: dict[int, tuple[list[int], frozenset[int]]] = {}

    def set_table(self, table: ExpertTable) -> list[int]:
        """Store and return the slots of each layer here; the newest two tables are kept.

        Raises ProtocolError if it does not fit.
        """
        table.validate()
        if len(table.slots) != self.shape.num_layers or not self._index < table.num_nodes:
            raise ProtocolError(
                f"expert table {table.version}: {len(table.slots)} layers over "
                f"{table.num_nodes} nodes; this is {self.name} of {self.shape.num_layers} layers"
            )
        found = [len(held) for held in table.experts_of(self._index)]
        self._known[table.version] = found, frozenset(table.local)
        for version in sorted(self._known)[:-2]:
            del self._known[version]
        return found

    def begin(self, ticket: StepTicket) -> None:
        """Open a step. Raises ProtocolError if the ticket does not fit."""
        self.check_usable()
        assert self.open is None, "reply() to the last batch first"
        step, version = ticket.step, ticket.table_version
        ascending = tuple(sorted(set(ticket.participants))) == ticket.participants
        if not ascending or any(index not in self._peers for index in ticket.participants):
            raise ProtocolError(f"step {step}: participants {ticket.participants}")
        self._check_micro_batches(ticket)
        if version not in self._known:
            raise ProtocolError(
                f"step {step}: expert table {version}, {self.name} has {sorted(self._known)}"
            )
        self.ticket = ticket
        self.num_slots, self.local = self._known[version]

    def local_of(self, version: int) -> frozenset[int]:
        """Return the layers that attention nodes compute by a table; none if it is not known."""
        return self._known[version][1] if version in self._known else frozenset()

    def check_gather(self, micro_batch: int) -> StepTicket:
        """Return the ticket of the step. Raises TransportError if the net has failed."""
        self.check_usable()
        ticket = self.ticket
        assert ticket is not None, "begin() first"
        assert micro_batch < ticket.num_micro_batches, "not a micro-batch of the ticket"
        assert self.open is None, "reply() to each batch before taking the next"
        return ticket

    def check_reply(self, batch: ExpertBatch, partial: Tensor, num_rows: int) -> None:
        """Raise FrameError unless `partial` answers the open batch with `num_rows` rows."""
        assert batch is self.open, "reply() to the batch that gather() yielded last"
        wanted = (num_rows, self.shape.hidden_size)
        if partial.shape != wanted or not partial.is_floating_point():
            raise FrameError(
                f"reply: partial is {tuple(partial.shape)} {partial.dtype}, expected {wanted}"
            )


def check_rows(shape: NetShape, hidden: Tensor, experts: Tensor, weights: Tensor) -> None:
    """Raise FrameError unless hidden is [T, H] and experts and weights are [T, K]."""
    rows = hidden.shape[0]
    wide, narrow = (rows, shape.hidden_size), (rows, shape.top_k)
    if hidden.shape == wide and experts.shape == narrow and weights.shape == narrow:
        return
    wanted = (("hidden", hidden, wide), ("experts", experts, narrow), ("weights", weights, narrow))
    for name, got, size in wanted:
        if got.shape != size:
            raise FrameError(f"dispatch: {name} is {tuple(got.shape)}, expected {size}")


def check_sum(out: Tensor, size: tuple[int, ...]) -> None:
    """Raise FrameError unless `out` fits the sum of a dispatch of that size."""
    if out.shape != size or out.dtype != torch.float32:
        raise FrameError(
            f"combine into {tuple(out.shape)} {out.dtype}, expected {tuple(size)} torch.float32"
        )
