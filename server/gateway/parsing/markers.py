"""Search for markers in text that comes in pieces. Pure."""

from __future__ import annotations


def num_held(text: str, *markers: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = max(len(marker) for marker in markers) - 1
    for length in range(min(len(text), longest), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) and marker != end for marker in markers):
            return length
    return 0
