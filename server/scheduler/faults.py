"""What becomes of the engine when a node is lost or a step fails.

Owns the interface, and the plain answer to it: the engine ends. The other answer is
failover.py's. Called by service.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn, Protocol

from server.scheduler.roster import Member, Roster
from topspin.errors import ProtocolError, TopspinError
from topspin.messages import Halted, Loaded, Ready


class Faults(Protocol):
    """The engine's way to deal with faults."""

    @property
    def ends_engine(self) -> bool:
        """Say whether any fault ends the engine."""

    @property
    def is_serving(self) -> bool:
        """Say whether steps may be planned."""

    @property
    def is_whole(self) -> bool:
        """Say whether every node serves, so that experts may be moved between them."""

    @property
    def nodes(self) -> Collection[Member]:
        """Return the nodes that take part in steps."""

    def lose(self, member: Member, error: TopspinError) -> None:
        """Deal with a node that is gone, or must be taken for dead; `error` says why."""

    def step_failed(self, generation: int, error: TopspinError) -> None:
        """Deal with a step, or a forming, of `generation` that has failed."""

    def joined(self, member: Member) -> None:
        """Take in a node that has said Hello while the engine serves."""

    def answered(self, member: Member, message: Halted | Loaded | Ready) -> None:
        """Take a node's answer; raises ProtocolError, with which the node is lost."""

    def advance(self) -> None:
        """Do what time, or an answer, has made possible; called at every turn."""


class FailStop:
    """Every fault ends the engine: with `--restart off`, and before it is first ready."""

    ends_engine = True
    is_serving = True
    is_whole = True

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    @property
    def nodes(self) -> Collection[Member]:
        return self._roster.places

    def lose(self, member: Member, error: TopspinError) -> NoReturn:
        self._roster.leave(member)
        raise error

    def step_failed(self, generation: int, error: TopspinError) -> NoReturn:
        raise error

    def joined(self, member: Member) -> None:
        raise AssertionError("every place is taken")

    def answered(self, member: Member, message: Halted | Loaded | Ready) -> None:
        raise ProtocolError(f"{member} sent {type(message).__name__}")

    def advance(self) -> None:
        pass
