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


PLACES = [Member("attention", 0), Member("attention", 1), Member("expert", 0)]


@pytest.fixture
def roster() -> Roster:
    """Return the list of an engine of two attention nodes and one expert node."""
    return Roster(PLACES, revision="1.0")


def join(roster: Roster, *peers: str) -> None:
    """Let peers join, which are named after their places."""
    for peer in peers:
        role: Role = {"a": "attention", "e": "expert", "g": "gateway"}[peer[0]]  # type: ignore[assignment]
        roster.join(peer.encode(), hello(role, int(peer[1])))


def ready(roster: Roster, member: Member, *, num_blocks: int = 7) -> None:
    """Let a node be ready."""
    message = Ready(role=member.role, index=member.index, num_blocks=num_blocks)
    roster.ready(member, message)


def test_an_engine_is_complete_and_ready_with_all_its_nodes(roster: Roster) -> None:
    join(roster, "a1", "g0")
    assert roster.awaited() == "waiting for attention 0, expert 0"
    join(roster, "a0")
    assert not roster.is_complete
    with pytest.raises(ProtocolError, match="before Welcome"):
        ready(roster, PLACES[0])
    join(roster, "e0")
    assert roster.is_complete
    assert roster.gateways == {b"g0"}
    with pytest.raises(ConfigError, match="attention 0 has no KV-cache blocks"):
        ready(roster, PLACES[0], num_blocks=0)
    ready(roster, PLACES[1], num_blocks=20)
    ready(roster, PLACES[2], num_blocks=0)
    assert roster.awaited() == "loading: attention 0"
    assert not roster.is_ready
    with pytest.raises(ProtocolError, match="twice"):
        ready(roster, PLACES[2])
    ready(roster, PLACES[0], num_blocks=10)
    assert roster.is_ready
    assert roster.num_blocks() == [10, 20]
    assert roster.awaited() == ""


def test_an_engine_is_complete_and_ready_without_optional_nodes() -> None:
    roster = Roster(PLACES, revision="1.0", optional=[PLACES[0]])
    join(roster, "a1")
    assert roster.awaited() == "waiting for expert 0"
    join(roster, "e0")
    assert roster.is_complete
    for member in roster.members:
        assert not roster.is_ready
        ready(roster, member)
    assert roster.is_ready
    assert roster.num_blocks() == [0, 7]
    join(roster, "a0")
    with pytest.raises(ProtocolError, match="no KV-cache blocks"):
        roster.loaded(PLACES[0], Loaded(role="attention", index=0))
    roster.loaded(PLACES[0], Loaded(role="attention", index=0, num_blocks=9))


def test_a_topology_lists_nodes_in_index_order(roster: Roster) -> None:
    join(roster, "e0", "a1", "a0")
    table = uniform_table(num_layers=2, num_experts=4, num_nodes=1)
    topology = roster.topology(roster.places, table, generation=3)
    assert topology.attention_incarnations == (9, 19)
    assert topology.experts == (ExpertPeer(address="unix:@expert0", incarnation=6),)
    assert (topology.generation, topology.table) == (3, table)
    without = roster.topology(roster.places[1:], table, generation=4)
    assert without.attention_incarnations == (None, 19)
    assert roster.members == PLACES
    assert roster.peer(Member("attention", 1)) == b"a1"
    assert roster.member(b"a1") == Member("attention", 1)
    assert roster.member(b"nobody") is None
    assert roster.expert_addresses() == ["unix:@expert0"]
    assert roster.describe(Member("expert", 0)) == "expert 0 (pid 77)"


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        (hello("attention", 1, protocol=99), VersionMismatch, "protocol 99"),
        (hello("gateway", 0, revision="2.0"), VersionMismatch, "revision '2.0'"),
        (hello("expert", 0, fingerprint="xyz"), VersionMismatch, "'xyz', attention 0 serves 'abc'"),
        (hello("attention", 0), ConfigError, "attention 0 is there already"),
        (hello("attention", 2), ConfigError, "the engine has attention 0, attention 1, expert 0"),
        (hello("attention", -1), ConfigError, "has no place"),
        (hello("expert", 1), ConfigError, "has no place"),
    ],
)
def test_refusals(roster: Roster, message: Hello, error: type[Exception], reason: str) -> None:
    join(roster, "a0")
    with pytest.raises(error, match=reason):
        roster.join(b"new", message)
    assert roster.member(b"new") is None
    assert roster.gateways == set()


def test_another_checkpoint_is_named_by_its_files_also_once_all_nodes_have_gone(
    roster: Roster,
) -> None:
    files = {"config.json": "1", **{f"model-{n}.safetensors": "2" for n in range(6)}}
    roster.join(b"a0", hello("attention", 0, files=files))
    other = {**files, "model-3.safetensors": "3"}
    with pytest.raises(VersionMismatch, match=r"differ in model-3\.safetensors$"):
        roster.join(b"e0", hello("expert", 0, fingerprint="xyz", files=other))
    roster.leave(Member("attention", 0))
    with pytest.raises(VersionMismatch, match=r"differ in config.json, model-0.*, \.\.\.$"):
        roster.join(b"a0", hello("attention", 0, fingerprint="xyz"))
    roster.join(b"a0", hello("attention", 0, files=files))


def test_one_hello_per_connection(roster: Roster) -> None:
    join(roster, "a0", "g0")
    for peer in (b"a0", b"g0"):
        with pytest.raises(ConfigError, match="has said Hello before"):
            roster.join(peer, hello("attention", 1))
