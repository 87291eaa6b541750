"""Search for stop strings in text that arrives in pieces of any size.

Owns an Aho-Corasick automaton (Aho and Corasick, 1975) over the stop strings of a request and
the scan of one choice's text by it. The state's depth is the number of last characters that
could still become a stop string; exactly these are held back. Pure: knows no tokens, no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Scanned(NamedTuple):
    """Text that is safe to show, and the stop string that ends it, if one was found."""

    text: str
    stop: str | None


class StopStrings:
    """The automaton of a request's stop strings; shared by its choices, never changed.

    Per state: `children` by character, `fallback` (the longest proper suffix that is a
    state), `found` (the longest stop string that ends here), `held` (how many characters
    could still become a stop string).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback: list[int] = [0]
        self.found: list[str | None] = [None]
        self.held: list[int] = [0]
        for stop in stops:
            assert stop, "an empty stop string would stop everything"
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, start=1):
            following = self.children[state].get(char)
            if following is None:
                following = len(self.children)
                self.children[state][char] = following
                self.children.append({})
                self.fallback.append(0)
                self.found.append(None)
                self.held.append(depth)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Fill fallbacks breadth first, so that a state's fallback is complete before the state."""
        waiting = deque(self.children[0].values())
        while waiting:
            state = waiting.popleft()
            shorter = self.fallback[state]
            if self.found[state] is None:
                self.found[state] = self.found[shorter]
            if not self.children[state]:
                # A leaf is a whole stop string; only a shorter suffix of it can still grow.
                self.held[state] = self.held[shorter]
            for char, child in self.children[state].items():
                self.fallback[child] = self.step(shorter, char)
                waiting.append(child)

    def step(self, state: int, char: str) -> int:
        """Return the state after reading `char` in `state`."""
        while True:
            following = self.children[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fallback[state]


class StopScanner:
    """Scans the text of one choice.

    The stop string that ends first wins, and of those that end at the same character the
    longest: the result depends on the text only, not on how it was cut into pieces.
    """

    def __init__(self, stops: StopStrings, *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> Scanned:
        """Scan `text` and return the part to show now; ignores stop strings unless `armed`.

        Must not be called again once a stop string has been found.
        """
        stops, state = self._stops, self._state
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = stops.step(state, char)
            stop = stops.found[state] if armed else None
            if stop is not None:
                self._held = ""
                return Scanned(buffer[: end if self._include_stop else end - len(stop)], stop)
        self._state = state
        shown = len(buffer) - stops.held[state]
        self._held = buffer[shown:]
        return Scanned(buffer[:shown], None)

    def flush(self) -> str:
        """Return the text held back, as no more text follows to complete a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
