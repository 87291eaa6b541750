"""The end of a connection, by its second handle."""

from __future__ import annotations

import socket

from topspin.processes.connection import Line


def test_a_peer_is_silent_or_has_closed_its_end() -> None:
    mine, theirs = socket.socketpair()
    with mine:
        assert Line(mine.fileno(), 2.0).end() == "was silent for 2 s"
        theirs.close()
        assert Line(mine.fileno(), 2.0).end() is None


def test_a_number_that_is_another_sockets_by_now_counts_as_closed() -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("")
        other.listen()
        assert Line(other.fileno(), 2.0).end() is None
