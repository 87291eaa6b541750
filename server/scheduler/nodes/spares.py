"""Spare nodes: second processes of places that are taken, with the weights of these places.

Owns who they are and whether they have loaded; a place has one at most. One takes its place when
the node there is gone (failover.py). Until then it is no member: it gets no step and no grammar,
and what it says about itself is not counted. Pure. Called by service.py and failover.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.scheduler.nodes.roster import Member
from topspin.messages import Hello, Loaded


@dataclass(slots=True)
class Spare:
    """A spare node of the place that its `hello` names.

    `loaded`: its answer to Welcome. `is_leaving`: it was asked to end, and takes no place.
    """

    peer: bytes
    hello: Hello
    loaded: Loaded | None = None
    is_leaving: bool = False

    @property
    def place(self) -> Member:
        """Return the place that it may take."""
        return Member(self.hello.role, self.hello.index)


class Spares:
    """The spare nodes of one engine, by connection."""

    def __init__(self) -> None:
        self._of: dict[bytes, Spare] = {}

    def add(self, peer: bytes, hello: Hello) -> None:
        """Add one, whose place must have none."""
        spare = Spare(peer, hello)
        assert not self.has(spare.place), f"{spare.place} has a spare node"
        self._of[peer] = spare

    def has(self, place: Member) -> bool:
        """Say whether a place has a spare node."""
        return any(spare.place == place for spare in self._of.values())

    def place(self, peer: bytes) -> Member | None:
        """Return the place of the spare node `peer`, None for other peers."""
        spare = self._of.get(peer)
        return None if spare is None else spare.place

    def loaded(self, peer: bytes, message: Loaded) -> None:
        """Note that a spare node has loaded."""
        self._of[peer].loaded = message

    def leaves(self, peer: bytes) -> None:
        """Note that a spare node was asked to end."""
        self._of[peer].is_leaving = True

    def drop(self, peer: bytes) -> Hello:
        """Forget one, and return its Hello."""
        return self._of.pop(peer).hello

    def take(self, place: Member) -> Spare | None:
        """Return, once, the spare node of a place that is free; None if there is none."""
        for peer, spare in self._of.items():
            if spare.place == place and not spare.is_leaving:
                return self._of.pop(peer)
        return None

    @property
    def peers(self) -> dict[bytes, str]:
        """Return the name of each by connection."""
        return {peer: f"the spare {spare.place}" for peer, spare in self._of.items()}
