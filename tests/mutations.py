"""Valid bytes, damaged: what a peer that nearly follows a format sends (Hypothesis)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


def damaged(samples: Sequence[bytes], *, most: int = 4) -> st.SearchStrategy[bytes]:
    """Return a strategy of `samples` with up to `most` bytes or pieces changed.

    A piece is cut out, repeated, or replaced by any bytes. One may be left as it is.
    """
    return st.builds(_changed, st.sampled_from(samples), st.lists(_change(), max_size=most))


def _change() -> st.SearchStrategy[tuple[float, float, bytes, int]]:
    place = st.floats(0, 1)
    return st.tuples(place, place, st.binary(max_size=8), st.integers(0, 3))


def _changed(sample: bytes, changes: Sequence[tuple[float, float, bytes, int]]) -> bytes:
    data = bytearray(sample)
    for begin, size, new, kind in changes:
        start = round(begin * len(data))
        stop = start + round(size**4 * (len(data) - start))  # mostly short pieces
        match kind:
            case 0:
                data[start:stop] = b""
            case 1:
                data[start:start] = data[start:stop]
            case 2:
                data[start:stop] = new
            case _:
                data[start : start + 1] = new[:1]
    return bytes(data)
