"""Whatever comes in the handshake ends in a pair or a typed error, and disturbs nobody."""

from __future__ import annotations

import socket
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.cli.keys import make
from m2n_comm.pairing.handshake import Reader, ask, introduce
from m2n_comm.pairing.hello import Identity, KeyOffer, KeyProof, PairHello, PairRefusal
from m2n_comm.pairing.session import Session, Trust
from tests.m2n_comm.harness import (
    make_shape,
)
from tests.m2n_comm.pairing.meetings import meeting_of, of
from tests.m2n_comm.pairing.test_session import agreed
from topspin.errors import (
    FrameError,
    PeerLost,
    UntrustedPeer,
)
from topspin.processes.node_network import ON_ONE_HOST


@pytest.fixture(scope="module")
def some_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return keys that examples share."""
    folder = tmp_path_factory.mktemp("shared") / "keys"
    make(folder, ("attention", "expert"))
    return folder


# Hypothesis: whatever comes in the handshake.

MESSAGES = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda length, body: b"TSHS" + length.to_bytes(4, "little") + body,
        st.integers(0, 2**32 - 1),
        st.binary(max_size=300),
    ),
    st.builds(
        lambda body: b"TSHS" + len(body).to_bytes(4, "little") + body,
        st.one_of(
            st.binary(min_size=1, max_size=300),
            st.recursive(
                st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=9)),
                lambda inner: (
                    st.lists(inner, max_size=4)
                    | st.dictionaries(
                        st.sampled_from(["type", "static", "ephemeral", "code", "reason", "shape"])
                        | st.text(max_size=5),
                        inner,
                        max_size=5,
                    )
                ),
                max_leaves=12,
            ).map(msgspec.msgpack.encode),
            st.just(b"\x91" * 5000),  # nested deeply
        ),
    ),
    st.builds(
        lambda static, ephemeral: _encoded(KeyOffer(static=static, ephemeral=ephemeral)),
        st.binary(max_size=40),
        st.binary(max_size=40),
    ),
    st.sampled_from([KeyProof(), PairRefusal(code="x", reason="y" * 999)]).map(
        lambda message: _encoded(message)
    ),
)


def _encoded(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return b"TSHS" + len(body).to_bytes(4, "little") + body


@settings(max_examples=100)
@given(data=MESSAGES, keyed=st.booleans())
def test_a_reader_of_any_bytes_raises_only_typed_errors_and_reads_no_more_than_it_may(
    data: bytes, keyed: bool
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    session: Session | None = agreed()[0] if keyed else None
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(data)
        theirs.close()
        reader = Reader(ours, session)
        tracemalloc.start()
        try:
            while True:
                message = reader.advance()
                if message is not None:
                    assert session is None
                    assert isinstance(message, KeyOffer | KeyProof | PairHello | PairRefusal)
        except (FrameError, UntrustedPeer, PeerLost):
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 300_000


@settings(max_examples=40)
@given(first=MESSAGES, keyed=st.booleans(), offers=st.booleans())
def test_no_stranger_ends_the_reception(
    some_keys: Path, first: bytes, keyed: bool, offers: bool
) -> None:
    """Also after it has offered a key that is accepted, which it does not have."""
    mine = of(some_keys, "attention")
    with (
        meeting_of("tcp", of(some_keys, "expert") if keyed else ON_ONE_HOST) as meeting,
        meeting.stranger() as stranger,
    ):
        if offers:
            stranger.sendall(_encoded(Trust(mine.keys).begin("attention").offer))
        stranger.sendall(first)
        stranger.shutdown(socket.SHUT_WR)
        expert = meeting.accept()
        meeting.connect(0, mine if keyed else ON_ONE_HOST)
        expert.result(10)


@settings(max_examples=60)
@given(data=MESSAGES, keyed=st.booleans())
def test_an_attention_node_meets_any_answer_with_a_typed_error(
    some_keys: Path, data: bytes, keyed: bool
) -> None:
    ours, theirs = socket.socketpair()
    end_s = time.monotonic() + 5
    me = Identity(role="attention", index=0, incarnation=1, shape=make_shape())

    def meet() -> None:
        if keyed:
            trust = Trust(of(some_keys, "attention").keys)
            introduce({0: ours}, trust, deadline_s=end_s, check=lambda: None)
        else:
            ask(ours, me.hello(0, 2), deadline_s=end_s, check=lambda: None)

    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((FrameError, UntrustedPeer, PeerLost)):
            meet()
