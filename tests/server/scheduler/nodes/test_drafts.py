"""The list of draft nodes: joining, readiness, counters over several lives, wrong messages."""

from __future__ import annotations

from typing import Any

import pytest

from server.scheduler.nodes.drafts import DraftSide
from server.scheduler.nodes.roster import Member
from topspin.errors import ConfigError, NodeLost, ProtocolError, VersionMismatch
from topspin.messages import DraftCounts, Goodbye, Hello, Ready, Stop


def hello(index: int = 0, **changes: Any) -> Hello:
    fields = {"role": "draft", "index": index, "incarnation": 1, "revision": "r1", **changes}
    return Hello(**fields)


def counts(index: int, passes: int) -> DraftCounts:
    return DraftCounts(
        index=index,
        num_root_hits=1,
        num_root_misses=2,
        num_passes=passes,
        num_overlapped=3,
        pass_seconds=0.5,
    )


def test_nodes_join_become_ready_and_leave() -> None:
    drafts = DraftSide([0, 1], revision="r1")
    assert drafts.awaited() == "draft 0, draft 1"
    drafts.join(b"a", hello(0))
    drafts.join(b"b", hello(1))
    assert drafts.members == {Member("draft", 0): b"a", Member("draft", 1): b"b"}
    assert drafts.heard(b"a", Ready(role="draft", index=0))
    assert drafts.awaited() == "draft 1"
    assert drafts.heard(b"b", Ready(role="draft", index=1))
    assert drafts.is_ready
    assert (drafts.index(b"b"), drafts.index(b"c")) == (1, None)
    drafts.leave(b"b")
    assert drafts.index(b"b") is None
    assert not drafts.is_ready
    drafts.join(b"c", hello(1))
    assert DraftSide([], revision="r1").is_ready


def test_the_counters_of_all_lives_are_kept() -> None:
    drafts = DraftSide([0], revision="r1")
    for peer, passes in ((b"a", 5), (b"b", 7)):
        drafts.join(peer, hello(0))
        assert not drafts.heard(peer, counts(0, 1))
        assert not drafts.heard(peer, counts(0, passes))
        drafts.leave(peer)
    assert sorted(each.num_passes for each in drafts.counts) == [5, 7]


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"revision": "r2"}, VersionMismatch, "of revision 'r2', this engine"),
        ({"protocol": 1}, VersionMismatch, "draft 0 speaks protocol 1"),
        ({"index": 2}, ConfigError, "draft 2 has no place: the engine has 2 of them"),
        ({"index": 1}, ConfigError, "draft 1 is there already"),
    ],
)
def test_wrong_nodes_are_refused(
    changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    drafts = DraftSide([0, 1], revision="r1")
    drafts.join(b"a", hello(1))
    with pytest.raises(error, match=reason):
        drafts.join(b"b", hello(**changes))


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        (Stop(reason="x"), ProtocolError, "draft 0 sent Stop"),
        (
            Goodbye(role="draft", index=0, code="internal_error", message="a bug"),
            NodeLost,
            r"draft 0 left: a bug \(internal_error\)",
        ),
        (
            Goodbye(role="draft", index=0, code="invalid_config", message="no such model"),
            ConfigError,
            "draft 0 left: no such model",
        ),
    ],
)
def test_what_ends_a_node(message: Any, error: type[Exception], reason: str) -> None:
    drafts = DraftSide([0], revision="r1")
    drafts.join(b"a", hello())
    with pytest.raises(error, match=reason):
        drafts.heard(b"a", message)
