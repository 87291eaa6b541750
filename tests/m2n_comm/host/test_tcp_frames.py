"""tcp, with keys and without: whatever somebody between two nodes does to frames is noticed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2n_comm.host.frames.wire import HEADER_BYTES, SEAL_AT
from tests.m2n_comm.host.wires import ROWS, Between, between, hop, resealed
from topspin.errors import DeadlineExceeded, FrameError, PeerLost, StaleFrame

REFUSED = (FrameError, StaleFrame, PeerLost, DeadlineExceeded)


@pytest.mark.parametrize("keyed", [True, False])
def test_every_flipped_bit_of_a_frame_is_noticed(keyed: bool) -> None:
    """Of its header and its code; with keys, of every field of its payload too."""
    with between(keyed=keyed) as wire:
        size = len(wire.frame())
    places = [*range(0, HEADER_BYTES, 3), *range(SEAL_AT, HEADER_BYTES)]
    if keyed:
        places += [*range(HEADER_BYTES, size, 37), size - 1]
    for place in places:
        with between(keyed=keyed) as wire:
            frame = bytearray(wire.frame())
            frame[place] ^= 1 << place % 8
            with pytest.raises(REFUSED if keyed else FrameError):
                wire.receive(frame, timeout_s=0.05)
            assert not wire.reader.arrived(0, 0)


def reversed_(first: bytes, second: bytes) -> bytes:
    return second + first


CODE_IS_WRONG = "layer 5, micro-batch 0: its authentication code is wrong"


@pytest.mark.parametrize(
    ("forge", "error", "message"),
    [
        (lambda wire: resealed(wire.frame()), FrameError, CODE_IS_WRONG),
        (lambda wire: wire.frame()[:SEAL_AT] + bytes(16) + bytes(400), FrameError, CODE_IS_WRONG),
        (lambda wire: resealed(wire.frame(), rows=9), FrameError, "9 rows, a window has 8"),
        (lambda wire: [wire.frame(), wire.frame(mb=1)][1], FrameError, "code is wrong"),
        (lambda wire: wire.frame(mb=1) + wire.frame(mb=1), StaleFrame, "sequence is 1, expected 2"),
        # Micro-batches have sequences of their own, and one order of codes.
        (lambda wire: reversed_(wire.frame(mb=1), wire.frame()), FrameError, CODE_IS_WRONG),
    ],
    ids=["without a code", "zero", "size", "dropped", "replayed", "reordered"],
)
def test_a_forged_frame_is_refused(
    forge: Callable[[Between], bytes], error: type[Exception], message: str
) -> None:
    with between(keyed=True) as wire, pytest.raises(error, match=message):
        wire.receive(forge(wire))


def test_a_frame_that_is_cut_off_is_never_received() -> None:
    with between(keyed=True) as wire:
        frame = wire.frame()
        with pytest.raises(DeadlineExceeded):
            wire.receive(frame[:-1], timeout_s=0.05)
        wire.passed_on.close()
        with pytest.raises(PeerLost):
            wire.reader.receive(hop(), (0,))


def test_a_frame_of_another_connection_is_refused() -> None:
    with (
        between(keyed=True) as one,
        between(keyed=True) as other,
        pytest.raises(FrameError, match="code is wrong"),
    ):
        other.receive(one.frame())


@pytest.mark.parametrize("keyed", [True, False])
def test_rows_in_use_are_not_overwritten_by_a_frame_that_never_ends(keyed: bool) -> None:
    """The code is checked at a frame's end; until then its rows may only go where none are."""
    with between(keyed=keyed) as wire:
        wire.receive(wire.frame())
        rows = wire.reader.inbox(0, 0).hidden[:ROWS].clone()
        forged = resealed(wire.frame(sequence=2), sequence=2)
        with pytest.raises(StaleFrame, match="none before the last one is answered"):
            wire.receive(forged[:-1], mb=1)
        assert torch.equal(wire.reader.inbox(0, 0).hidden[:ROWS], rows)


@settings(max_examples=30)
@given(data=st.binary(max_size=2000), keyed=st.booleans())
def test_random_bytes_are_refused(data: bytes, keyed: bool) -> None:
    with between(keyed=keyed) as wire:
        wire.passed_on.sendall(data)
        wire.passed_on.close()
        with pytest.raises(REFUSED):
            wire.reader.receive(hop(), (0,))


@settings(max_examples=30)
@given(
    fields=st.dictionaries(
        st.sampled_from(["rows", "payload_bytes", "micro_batch", "sequence", "part", "num_parts"]),
        st.sampled_from([0, 1, 2, 3, 7, 8, 9, 2**31, 2**32 - 1, 2**63, 2**64 - 1]),
        min_size=1,
    ),
    keyed=st.booleans(),
)
def test_random_headers_take_no_more_memory_than_a_window(
    fields: dict[str, int], keyed: bool
) -> None:
    with between(keyed=keyed) as wire:
        frame = wire.frame()
        changed = resealed(frame, **fields)
        wire.passed_on.sendall(changed)
        wire.passed_on.close()
        tracemalloc.start()
        try:
            wire.reader.receive(hop(), (0,))
        except REFUSED:
            pass
        else:
            assert not keyed  # what changed nothing that is checked here
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 200_000
