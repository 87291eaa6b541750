"""GET /trace: its limits, its form, and which clients are answered."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from tests.server.gateway.fakes import FakeEngine, gateway, loopback
from topspin.messages import Message, NodeTrace, Trace, TraceRequest

NODE = NodeTrace(role="expert", index=2, offset_ns=-7, error_ns=5, records=b"\x00\xff" * 12)


class TracedEngine(FakeEngine):
    """Answers a TraceRequest at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def send(self, message: Message) -> None:
        super().send(message)
        if isinstance(message, TraceRequest):
            self.seconds.append(message.seconds)
            self.say(Trace(query_id=message.query_id, nodes=(NODE,), missing=("attention 0",)))


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


async def test_a_wrong_length_is_refused() -> None:
    fake = TracedEngine()
    async with gateway(fake) as client:
        for seconds in ("0", "-1", "nan", "inf", "61", "x", ""):
            answer = await client.get("/trace", params={"seconds": seconds})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds")
    assert fake.seconds == []


@pytest.mark.parametrize(
    ("host", "status"),
    [(host, 200) for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")]
    + [(host, 404) for host in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "unix")],
)
async def test_only_this_hosts_clients_are_answered(host: str, status: int) -> None:
    fake = TracedEngine()
    async with gateway(fake, address=(host, 1234)) as client:
        assert (await client.get("/trace")).status_code == status
    assert len(fake.seconds) == (status == 200)


async def test_who_comes_through_a_proxy_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says of the client: the client may have said that."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    fake = TracedEngine()
    async with loopback(fake) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/trace"
        assert (await client.get(url)).status_code == 200
        for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
            answer = await client.get(url, headers={name: "127.0.0.1"})
            assert answer.status_code == 404
    assert len(fake.seconds) == 1
