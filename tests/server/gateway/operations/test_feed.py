"""GET /feed: who sees the engine, and what is asked of the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.gateway.http.auth import ApiKeys, read_key_file
from tests.server.gateway.fakes import FakeEngine, gateway
from topspin.errors import ConfigError
from topspin.messages import Feed, FeedNode, FeedRequest, Message
from topspin.plan.spec import LinkSpec

OPERATOR, USER = "sk-operator-0123456789", "sk-user-0123456789"
NODE = FeedNode(
    role="expert",
    index=1,
    state="lost",
    connection=b"",
    host="127.0.0.1",
    device="cpu",
    num_threads=None,
)
LINK = LinkSpec(transport="tcp", payload="int8", window_rows=8, latency_us=250.0)


class FedEngine(FakeEngine):
    """Answers a FeedRequest at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, bool]] = []

    def send(self, message: Message) -> None:
        super().send(message)
        if isinstance(message, FeedRequest):
            self.asked.append((message.after, message.experts))
            told: dict[str, Any] = {"state": "ready", "detail": "", "table_version": 1}
            told |= {"steps": (), "news": (), "sample": None, "stats": self.stats, "link": LINK}
            feed = Feed(query_id=message.query_id, cursor=9, nodes=(NODE,), heat=(b"\xff",), **told)
            self.say(feed)


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f"us: {OPERATOR} operator=1\nthem: {USER} weight=2\n")
    return ApiKeys(None, file)


async def test_the_feed_comes_as_json_from_a_cursor_on() -> None:
    fake = FedEngine()
    async with gateway(fake) as client:
        answer = await client.get("/feed?after=7&experts=1")
        await client.get("/feed")
    assert answer.status_code == 200
    feed = answer.json()
    assert (feed["cursor"], feed["heat"]) == (9, ["/w=="])
    assert feed["nodes"] == [msgspec.to_builtins(NODE)]
    assert fake.asked == [(7, True), (0, False)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *((f"after={text}", "after") for text in ("-1", "x", "", "1e3", "9" * 19, "\u0661")),
        ("experts=2", "experts"),
    ],
)
async def test_a_wrong_query_is_refused(query: str, param: str) -> None:
    fake = FedEngine()
    async with gateway(fake) as client:
        answer = await client.get(f"/feed?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert fake.asked == []


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("10.0.0.1", {}, 404),
        ("127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}, 404),
    ],
)
async def test_without_keys_only_this_host_sees_the_engine(
    host: str, headers: dict[str, str], status: int
) -> None:
    fake = FedEngine()
    async with gateway(fake, address=(host, 1)) as client:
        assert (await client.get("/feed", headers=headers)).status_code == status
    assert len(fake.asked) == (status == 200)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
async def test_with_keys_only_operators_see_the_engine(keys: ApiKeys, host: str) -> None:
    fake = FedEngine()
    async with gateway(fake, keys=keys, address=(host, 1)) as client:
        for key, status in (
            (None, 401),
            ("sk-wrong-0123456789", 401),
            (USER, 404),
            (OPERATOR, 200),
        ):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = await client.get("/feed", headers=headers)
            assert answer.status_code == status
    assert len(fake.asked) == 1


def test_the_one_key_of_a_variable_is_no_operators() -> None:
    tenant = ApiKeys(USER, None).tenant_of(USER.encode())
    assert tenant is not None
    assert not tenant.operator


def test_a_mark_is_0_or_1(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f"us: {OPERATOR} operator=2\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_key_file(file)
