"""GET /trace: its limits, its form, and which clients are answered."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from server.gateway.engine_client import EngineClient
from tests.server.gateway.fakes import FakeEngine, gateway, loopback, make_app
from topspin.messages import Message, NodeTrace, Trace, TraceRequest

NODE = NodeTrace(role="expert", index=2, offset_ns=-7, error_ns=5, records=b"\x00\xff" * 12)


class TracedEngine(FakeEngine):
    """Answers a TraceRequest at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def send(self, message: Message) -> None:
        if isinstance(message, TraceRequest):
            self.seconds.append(message.seconds)
            self.say(Trace(query_id=message.query_id, nodes=(NODE,), missing=("attention 0",)))
        else:
            super().send(message)


def run(test: Any) -> None:
    asyncio.run(test)


async def test_the_stamps_come_as_json() -> None:
    fake = TracedEngine()
    async with gateway(fake) as client:
        answer = await client.get("/trace?seconds=1.5")
        await client.get("/trace")
    assert answer.status_code == 200
    trace = msgspec.json.decode(answer.content, type=Trace)
    assert trace.nodes == (NODE,)
    assert trace.missing == ("attention 0",)
    assert fake.seconds == [1.5, 2.0]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "61", "x", ""])
async def test_a_wrong_length_is_refused(seconds: str) -> None:
    fake = TracedEngine()
    async with gateway(fake) as client:
        answer = await client.get("/trace", params={"seconds": seconds})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "seconds"
    assert fake.seconds == []


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 200), ("127.9.9.9", 200), ("::1", 200), ("::ffff:127.0.0.1", 200)]
    + [(host, 404) for host in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "unix")],
)
async def test_only_this_hosts_clients_are_answered(host: str, status: int) -> None:
    fake = TracedEngine()
    engine = EngineClient(fake)
    reader = asyncio.create_task(engine.run())
    transport = httpx.ASGITransport(make_app(engine), client=(host, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/trace")).status_code == status
    assert len(fake.seconds) == (status == 200)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"])
async def test_who_comes_through_a_proxy_is_not_answered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says of the client: the client may have said that."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    fake = TracedEngine()
    async with loopback(fake) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/trace"
        for given, status in ({}, 200), ({name: "127.0.0.1"}, 404):
            assert (await client.get(url, headers=given)).status_code == status
    assert len(fake.seconds) == 1
