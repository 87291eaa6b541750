"""Stop strings against brute force: any cut of the text, any end, any stops."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from server.gateway.generation.stop_strings import StopScanner, StopStrings

TEXTS = st.text(alphabet="abé", max_size=24)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=5)


def first_stop(text: str, stops: list[str], *, from_end: int = 0) -> tuple[int, str] | None:
    """Return the end of the first stop string, and the longest one that ends there."""
    for end in range(from_end + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def could_grow(text: str, stops: list[str]) -> int:
    """Return the length of the longest end of `text` that a stop string begins with."""
    for size in range(len(text), 0, -1):
        if any(len(stop) > size and stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def cut(text: str, at: list[int]) -> list[str]:
    """Return `text` in pieces, some perhaps empty."""
    bounds = [0, *sorted(position % (len(text) + 1) for position in at), len(text)]
    return [text[low:high] for low, high in pairwise(bounds)]


@settings(max_examples=120)
@given(text=TEXTS, stops=STOPS, at=st.lists(st.integers(0, 24), max_size=6), include=st.booleans())
def test_scan_equals_brute_force_for_any_pieces(
    text: str, stops: list[str], at: list[int], include: bool
) -> None:
    scanner = StopScanner(StopStrings(stops), include_stop=include)
    shown, read, found = "", "", None
    for piece in cut(text, at):
        scanned = scanner.push(piece)
        shown += scanned.text
        read += piece
        if scanned.stop is not None:
            found = scanned.stop
            break
        assert shown == read[: len(read) - could_grow(read, stops)]
    expected = first_stop(text, stops)
    if expected is None:
        assert found is None
        assert shown + scanner.flush() == text
    else:
        end, stop = expected
        assert found == stop
        assert shown == text[: end if include else end - len(stop)]
