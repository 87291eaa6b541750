"""The places for open connections, and the choice of one that goes for a new one.

Owns that number and the order in which connections have waited for a request. A stranger can open
connections, and needs no key for it: the one that has waited longest makes room, so that those who
have something to ask get in. Knows no protocol; server.gateway.http.protocol tells it what happens.
"""

from __future__ import annotations

from typing import Final, Protocol

from topspin.process import allow_open_files

MAX_CONNECTIONS: Final = 4096
# For files, pipes, the control connection, and connections that are being closed.
_SPARE_FILES: Final = 128


class Guest(Protocol):
    """One that holds a place."""

    def give_way(self) -> None:
        """Close at once."""


def allowed_connections() -> int:
    """Return how many connections this process may have: MAX_CONNECTIONS, if it may open as many.

    Raises its limit of open files for that, if the system lets it.
    """
    num_files = allow_open_files(MAX_CONNECTIONS + _SPARE_FILES)
    return max(1, min(MAX_CONNECTIONS, num_files - _SPARE_FILES))


class Room:
    """The places for connections of one server; belongs to its event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._open: set[Guest] = set()
        # As an ordered set: who has waited longest is first.
        self._waiting: dict[Guest, None] = {}

    def enter(self, connection: Guest) -> bool:
        """Give a new connection a place, where it waits; False: all have requests in progress."""
        if len(self._open) >= self._num_places:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.give_way()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def note(self, connection: Guest, *, waits: bool) -> None:
        """Note whether a connection waits for a request; one that waits already keeps its turn."""
        if waits and connection in self._open:
            self._waiting.setdefault(connection)
        else:
            self._waiting.pop(connection, None)

    def leave(self, connection: Guest) -> None:
        """Take back the place of a connection, if it has one."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
