"""The peers that may join, and an engine that is complete, and ready."""

from __future__ import annotations

from typing import Any

import pytest

from server.scheduler.nodes.roster import Member, Roster
from topspin.errors import ConfigError, ProtocolError, VersionMismatch
from topspin.expert_table import uniform_table
from topspin.messages import ExpertPeer, Hello, Loaded, Ready, Role


def hello(role: Role, index: int, **changes: Any) -> Hello:
    """Return a Hello that a new engine accepts, except for `changes`."""
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


def make_roster() -> Roster:
    """Return the roll of an engine of two attention nodes and one expert node."""
    places = [Member("attention", 0), Member("attention", 1), Member("expert", 0)]
    return Roster(places, revision="1.0")


def joined() -> Roster:
    """Return a complete roll; peers are named after their places."""
    roster = make_roster()
    roster.join(b"e0", hello("expert", 0))
    roster.join(b"a1", hello("attention", 1))
    roster.join(b"a0", hello("attention", 0))
    return roster


def test_complete_when_every_place_is_taken() -> None:
    roster = make_roster()
    roster.join(b"a1", hello("attention", 1))
    roster.join(b"g", hello("gateway", 0))
    assert roster.awaited() == "waiting for attention 0, expert 0"
    roster.join(b"a0", hello("attention", 0))
    assert not roster.is_complete
    roster.join(b"e0", hello("expert", 0))
    assert roster.is_complete
    assert roster.gateways == {b"g"}
    assert roster.awaited() == "loading: attention 0, attention 1, expert 0"


def test_an_engine_is_complete_and_ready_without_optional_nodes() -> None:
    places = [Member("attention", 0), Member("attention", 1), Member("expert", 0)]
    roster = Roster(places, revision="1.0", optional=[Member("attention", 0)])
    roster.join(b"a1", hello("attention", 1))
    assert roster.awaited() == "waiting for expert 0"
    roster.join(b"e0", hello("expert", 0))
    assert roster.is_complete
    for member in roster.members:
        assert not roster.is_ready
        roster.ready(member, Ready(role=member.role, index=member.index, num_blocks=7))
    assert roster.is_ready
    assert roster.num_blocks() == [0, 7]
    topology = roster.topology(
        roster.members, uniform_table(num_layers=2, num_experts=4, num_nodes=1), generation=1
    )
    assert topology.attention_incarnations == (None, 10 + len("attention"))
    roster.join(b"a0", hello("attention", 0))
    with pytest.raises(ProtocolError, match="no KV-cache blocks"):
        roster.loaded(places[0], Loaded(role="attention", index=0))
    roster.loaded(places[0], Loaded(role="attention", index=0, num_blocks=9))


def test_a_topology_lists_nodes_in_index_order() -> None:
    roster = joined()
    table = uniform_table(num_layers=2, num_experts=4, num_nodes=1)
    topology = roster.topology(roster.places, table, generation=3)
    assert topology.attention_incarnations == (9, 19)
    assert topology.experts == (ExpertPeer(address="unix:@expert0", incarnation=6),)
    assert (topology.generation, topology.table) == (3, table)
    without = roster.topology(roster.places[1:], table, generation=4)
    assert without.attention_incarnations == (None, 19)
    assert [str(member) for member in roster.members] == ["attention 0", "attention 1", "expert 0"]
    assert roster.peer(Member("attention", 1)) == b"a1"
    assert roster.member(b"a1") == Member("attention", 1)
    assert roster.member(b"nobody") is None
    assert roster.expert_addresses() == ["unix:@expert0"]
    assert roster.describe(Member("expert", 0)) == "expert 0 (pid 77)"


def test_ready_when_every_node_is() -> None:
    roster = joined()
    roster.ready(Member("attention", 1), Ready(role="attention", index=1, num_blocks=20))
    roster.ready(Member("expert", 0), Ready(role="expert", index=0))
    assert roster.awaited() == "loading: attention 0"
    assert not roster.is_ready
    roster.ready(Member("attention", 0), Ready(role="attention", index=0, num_blocks=10))
    assert roster.is_ready
    assert roster.num_blocks() == [10, 20]
    assert roster.awaited() == ""


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        (hello("attention", 1, protocol=99), VersionMismatch, "protocol 99"),
        (hello("gateway", 0, protocol=99), VersionMismatch, "protocol 99"),
        (hello("attention", 1, revision="2.0"), VersionMismatch, "revision '2.0'"),
        (hello("gateway", 0, revision="2.0"), VersionMismatch, "revision '2.0'"),
        (hello("expert", 0, fingerprint="xyz"), VersionMismatch, "'xyz', attention 0 serves 'abc'"),
        (hello("attention", 0), ConfigError, "attention 0 is there already"),
        (hello("attention", 2), ConfigError, "the engine has attention 0, attention 1, expert 0"),
        (hello("attention", -1), ConfigError, "has no place"),
        (hello("expert", 1), ConfigError, "has no place"),
    ],
)
def test_refusals(message: Hello, error: type[Exception], reason: str) -> None:
    roster = make_roster()
    roster.join(b"a0", hello("attention", 0))
    with pytest.raises(error, match=reason):
        roster.join(b"new", message)
    assert roster.member(b"new") is None
    assert roster.gateways == set()


def test_another_checkpoint_is_named_by_its_files_also_once_all_nodes_have_gone() -> None:
    roster = make_roster()
    files = {"config.json": "1", **{f"model-{n}.safetensors": "2" for n in range(6)}}
    roster.join(b"a0", hello("attention", 0, files=files))
    other = {**files, "model-3.safetensors": "3"}
    with pytest.raises(VersionMismatch, match=r"differ in model-3\.safetensors$"):
        roster.join(b"e0", hello("expert", 0, fingerprint="xyz", files=other))
    roster.leave(Member("attention", 0))
    with pytest.raises(VersionMismatch, match=r"differ in config.json, model-0.*, \.\.\.$"):
        roster.join(b"a0", hello("attention", 0, fingerprint="xyz"))
    roster.join(b"a0", hello("attention", 0, files=files))


def test_one_hello_per_connection() -> None:
    roster = make_roster()
    roster.join(b"a0", hello("attention", 0))
    roster.join(b"g", hello("gateway", 0))
    for peer in (b"a0", b"g"):
        with pytest.raises(ConfigError, match="has said Hello before"):
            roster.join(peer, hello("attention", 1))


def test_ready_comes_once_and_after_welcome() -> None:
    roster = make_roster()
    roster.join(b"e0", hello("expert", 0))
    with pytest.raises(ProtocolError):
        roster.ready(Member("expert", 0), Ready(role="expert", index=0))
    roster = joined()
    roster.ready(Member("expert", 0), Ready(role="expert", index=0))
    with pytest.raises(ProtocolError, match="twice"):
        roster.ready(Member("expert", 0), Ready(role="expert", index=0))


def test_an_attention_node_without_cache_cannot_serve() -> None:
    with pytest.raises(ConfigError, match="attention 0 has no KV-cache blocks"):
        joined().ready(Member("attention", 0), Ready(role="attention", index=0, num_blocks=0))
