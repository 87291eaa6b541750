"""Who may take part, when the engine is complete, and when it is ready."""

from __future__ import annotations

from typing import Any

import pytest

from server.scheduler.membership import Member, Membership
from tests.server.scheduler.engine import make_config
from topspin.errors import ConfigError, ProtocolError, VersionMismatch
from topspin.expert_table import uniform_table
from topspin.messages import ExpertPeer, Hello, Ready, Role


def hello(role: Role, index: int, **changes: Any) -> Hello:
    """Return a Hello that a new engine accepts, but for `changes`."""
    address = f"unix:@expert{index}" if role == "expert" else ""
    fields: dict[str, Any] = {
        "role": role,
        "index": index,
        "incarnation": 10 * index + len(role),
        "revision": "1.0",
        "fingerprint": "" if role == "gateway" else "abc",
        "data_address": address,
        "pid": 77,
    }
    return Hello(**{**fields, **changes})


def make_membership() -> Membership:
    """Return the roll of an engine of two attention nodes and one expert node."""
    return Membership(num_attention=2, num_experts=1, revision="1.0")


def joined() -> Membership:
    """Return a complete roll; peers are named after their places."""
    membership = make_membership()
    membership.join(b"e0", hello("expert", 0))
    membership.join(b"a1", hello("attention", 1))
    membership.join(b"a0", hello("attention", 0))
    return membership


def test_complete_when_every_place_is_taken() -> None:
    membership = make_membership()
    membership.join(b"a1", hello("attention", 1))
    membership.join(b"g", hello("gateway", 0))
    assert membership.awaited() == "waiting for attention 0, expert 0"
    membership.join(b"a0", hello("attention", 0))
    assert not membership.is_complete
    membership.join(b"e0", hello("expert", 0))
    assert membership.is_complete
    assert membership.gateways == {b"g"}
    assert membership.awaited() == "loading: attention 0, attention 1, expert 0"


def test_welcome_lists_peers_in_index_order() -> None:
    membership = joined()
    table = uniform_table(num_layers=2, num_experts=4, num_nodes=1)
    config = make_config().for_node()
    welcome = membership.welcome(config, table)
    assert welcome.topology.attention_incarnations == (9, 19)
    assert welcome.topology.experts == (ExpertPeer(address="unix:@expert0", incarnation=6),)
    assert welcome.config == config
    assert welcome.table == table
    assert membership.peers() == [b"a0", b"a1", b"e0"]
    assert membership.peers("expert") == [b"e0"]
    assert membership.peer(Member("attention", 1)) == b"a1"
    assert membership.member(b"a1") == Member("attention", 1)
    assert membership.member(b"nobody") is None
    assert membership.expert_addresses() == ["unix:@expert0"]
    assert membership.describe(Member("expert", 0)) == "expert 0 (pid 77)"


def test_ready_when_every_node_is() -> None:
    membership = joined()
    membership.ready(b"a1", Ready(role="attention", index=1, num_blocks=20))
    membership.ready(b"e0", Ready(role="expert", index=0))
    assert membership.awaited() == "loading: attention 0"
    assert not membership.is_ready
    membership.ready(b"a0", Ready(role="attention", index=0, num_blocks=10))
    assert membership.is_ready
    assert membership.num_blocks() == [10, 20]
    assert membership.awaited() == ""


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        (hello("attention", 1, protocol=99), VersionMismatch, "protocol 99"),
        (hello("gateway", 0, protocol=99), VersionMismatch, "protocol 99"),
        (hello("attention", 1, revision="2.0"), VersionMismatch, "revision '2.0'"),
        (hello("gateway", 0, revision="2.0"), VersionMismatch, "revision '2.0'"),
        (hello("expert", 0, fingerprint="xyz"), VersionMismatch, "'xyz', attention 0 serves 'abc'"),
        (hello("attention", 0), ConfigError, "attention 0 is there already"),
        (hello("attention", 2), ConfigError, "2 attention and 1 expert nodes"),
        (hello("attention", -1), ConfigError, "has no place"),
        (hello("expert", 1), ConfigError, "has no place"),
    ],
)
def test_refusals(message: Hello, error: type[Exception], reason: str) -> None:
    membership = make_membership()
    membership.join(b"a0", hello("attention", 0))
    with pytest.raises(error, match=reason):
        membership.join(b"new", message)
    assert membership.member(b"new") is None
    assert membership.gateways == set()


def test_one_hello_per_connection() -> None:
    membership = make_membership()
    membership.join(b"a0", hello("attention", 0))
    membership.join(b"g", hello("gateway", 0))
    for peer in (b"a0", b"g"):
        with pytest.raises(ConfigError, match="has said Hello before"):
            membership.join(peer, hello("attention", 1))


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (b"a0", Ready(role="attention", index=1, num_blocks=5)),
        (b"a0", Ready(role="expert", index=0)),
        (b"nobody", Ready(role="expert", index=0)),
    ],
)
def test_only_a_node_itself_reports_ready(peer: bytes, message: Ready) -> None:
    with pytest.raises(ProtocolError):
        joined().ready(peer, message)


def test_ready_comes_once_and_after_welcome() -> None:
    membership = make_membership()
    membership.join(b"e0", hello("expert", 0))
    with pytest.raises(ProtocolError):
        membership.ready(b"e0", Ready(role="expert", index=0))
    membership = joined()
    membership.ready(b"e0", Ready(role="expert", index=0))
    with pytest.raises(ProtocolError, match="twice"):
        membership.ready(b"e0", Ready(role="expert", index=0))


def test_an_attention_node_without_cache_cannot_serve() -> None:
    with pytest.raises(ConfigError, match="attention 0 has no KV-cache blocks"):
        joined().ready(b"a0", Ready(role="attention", index=0, num_blocks=0))
