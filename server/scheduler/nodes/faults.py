"""The handling of lost nodes and failed steps.

Owns the interface, and its simple implementation: the engine ends. The other implementation
is in failover.py. Called by service.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn, Protocol

from server.scheduler.nodes.roster import Member, Roster
from topspin.errors import NodeLost, ProtocolError, TopspinError
from topspin.messages import Halted, Loaded, Ready


class Faults(Protocol):
    """The engine's handling of faults."""

    @property
    def ends_engine(self) -> bool:
        """Say whether any fault ends the engine."""

    @property
    def is_serving(self) -> bool:
        """Say whether steps may be planned."""

    @property
    def is_whole(self) -> bool:
        """Say whether every node serves that must, so that experts may be moved between them."""

    @property
    def nodes(self) -> Collection[Member]:
        """Return the nodes that take part in steps."""

    def takes_part(self, member: Member) -> bool:
        """Say whether a node is one of `nodes`."""

    def lose(self, member: Member, error: TopspinError) -> None:
        """Handle a node that is gone or must count as dead; `error` is the reason."""

    def leave(self, member: Member) -> None:
        """Handle a node that was asked to end; after a NodeLost the caller gives it up."""

    def step_failed(self, generation: int, error: TopspinError) -> None:
        """Handle the failure of a step, or of the forming, of `generation`."""

    def joined(self, member: Member) -> None:
        """Handle a node that has sent Hello while the engine serves."""

    def answered(self, member: Member, message: Halted | Loaded | Ready) -> None:
        """Handle a node's answer; after a ProtocolError the caller gives the node up."""

    def advance(self) -> None:
        """Act on deadlines and on answers received; called at every turn."""


class FailStop:
    """Ends the engine at any fault; used with `--restart off`, and before it is first ready."""

    ends_engine = True
    is_serving = True
    is_whole = True

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    @property
    def nodes(self) -> Collection[Member]:
        return self._roster.places

    def takes_part(self, member: Member) -> bool:
        return True

    def lose(self, member: Member, error: TopspinError) -> NoReturn:
        self._roster.leave(member)
        raise error

    def leave(self, member: Member) -> NoReturn:
        raise NodeLost(f"{member} leaves, as it was asked to end")

    def step_failed(self, generation: int, error: TopspinError) -> NoReturn:
        raise error

    def joined(self, member: Member) -> None:
        raise AssertionError("every place is taken")

    def answered(self, member: Member, message: Halted | Loaded | Ready) -> None:
        raise ProtocolError(f"{member} sent {type(message).__name__}")

    def advance(self) -> None:
        pass
