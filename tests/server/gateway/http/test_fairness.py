"""Turns: addresses first, then their connections; the event loop goes on after a few.

Places: strangers who hold them make room for those who ask something.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource

import pytest

from server.gateway.http import fairness
from server.gateway.http.fairness import (
    MAX_CONNECTIONS,
    TURNS_AT_ONCE,
    Room,
    Turns,
    allowed_connections,
)
from tests.server.gateway.calls import http_request
from tests.server.gateway.fakes import FakeEngine, ids, loopback, output
from tests.server.gateway.http.test_protocol import error_in


class Busy:
    """A connection that always has more to read, `num_left` turns long."""

    def __init__(self, turns: Turns, log: list[str], name: str, num_left: int) -> None:
        self._turns, self._log, self._name, self._num_left = turns, log, name, num_left

    def enter(self) -> None:
        self._turns.enter(self, self._name[0])

    def take_turn(self) -> None:
        self._log.append(self._name)
        self._num_left -= 1
        if self._num_left:
            self.enter()


async def test_addresses_take_turns_and_so_do_their_connections() -> None:
    turns, log = Turns(), list[str]()
    for name, num_turns in (("a1", 3), ("a2", 3), ("a3", 1), ("b1", 2)):
        busy = Busy(turns, log, name, num_turns)
        busy.enter()
        busy.enter()  # which changes nothing
    while len(log) < 9:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log == ["a1", "b1", "a2", "a3", "a1", "b1", "a2", "a1", "a2"]


async def test_a_new_request_goes_before_long_ones_of_its_address_and_does_not_stop_them() -> None:
    turns, log = Turns(), list[str]()
    for number in range(2 * TURNS_AT_ONCE):
        Busy(turns, log, f"a{number}", 1).enter()
    for number in range(2 * TURNS_AT_ONCE):
        turns.enter(Busy(turns, log, f"anew{number}", 1), "a", is_new=True)
    while len(log) < 4 * TURNS_AT_ONCE:
        await asyncio.sleep(0)
    first = log[:TURNS_AT_ONCE]
    assert first[0] == "anew0"
    assert sum("new" in name for name in first) == 3 * TURNS_AT_ONCE // 4


async def test_the_loop_goes_on_after_a_few_turns() -> None:
    turns, log = Turns(), list[str]()
    for number in range(1000):
        Busy(turns, log, f"a{number}", 2).enter()
    num_passes = 0
    while len(log) < 2000:
        before = len(log)
        await asyncio.sleep(0)
        num_passes += 1
        assert len(log) - before <= TURNS_AT_ONCE
    assert num_passes >= 2000 // TURNS_AT_ONCE


async def test_who_fails_does_not_keep_others_from_their_turn() -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    turns, log = Turns(), list[str]()

    class Broken:
        def take_turn(self) -> None:
            raise RuntimeError("a bug")

    turns.enter(Broken(), "a")
    Busy(turns, log, "b", 1).enter()
    while not log:
        await asyncio.sleep(0)
    assert len(failures) == 1


VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


class Guest:
    """A connection that counts how often it was closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def give_way(self) -> None:
        self.num_closed += 1


def test_who_has_waited_longest_makes_room() -> None:
    places = Room(3)
    first, second, third, fourth, fifth, sixth = (Guest() for _ in range(6))
    for guest in (first, second, third):
        assert places.enter(guest)
    places.note(first, waits=False)
    assert places.enter(fourth)  # `first` works, so `second` has waited longest
    places.note(first, waits=True)
    places.note(third, waits=True)  # it waited already: its turn stays
    assert places.enter(fifth)
    assert [each.num_closed for each in (first, second, third, fourth)] == [0, 1, 1, 0]
    for guest in (first, fourth, fifth):
        places.note(guest, waits=False)
    assert not places.enter(sixth)
    places.leave(fourth)
    assert places.enter(sixth)
    places.note(second, waits=True)  # it has gone, which changes nothing
    places.note(sixth, waits=False)
    assert not places.enter(Guest())
    assert fifth.num_closed == 0


async def test_silent_connections_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they end a request that is in progress."""
    monkeypatch.setattr(fairness, "MAX_CONNECTIONS", 4)
    fake = FakeEngine()
    async with loopback(fake) as port:
        busy, busy_writer = await asyncio.open_connection("127.0.0.1", port)
        busy_writer.write(http_request({"prompt": "hi"}))
        await fake.request_came.wait()
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in silent[-3:]:
            writer.write(b"GET /ver")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(VERSION)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for other, _ in silent[:17]:
            with contextlib.suppress(ConnectionResetError):
                assert await other.read() == b""
        fake.emit(output(fake.added[0], ids("a"), finish_reason="length"))
        assert (await busy.readline()).startswith(b"HTTP/1.1 200 ")
        for _, each in (*silent, (reader, writer), (busy, busy_writer)):
            each.close()


async def test_too_many_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_CONNECTIONS", 1)
    fake = FakeEngine()
    async with loopback(fake) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_request({"prompt": "hi"}))
        await fake.request_came.wait()
        refused, other = await asyncio.open_connection("127.0.0.1", port)
        answer = await refused.read()
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert error_in(answer)["code"] == "rate_limit_exceeded"
        fake.emit(output(fake.added[0], ids("a"), finish_reason="length"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        other.close()
        writer.close()
        await writer.wait_closed()
        last, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(VERSION)
        assert (await last.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


def test_there_are_descriptors_for_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 2**20)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert allowed_connections() == MAX_CONNECTIONS
    assert MAX_CONNECTIONS < limits[-1][0] < 2 * MAX_CONNECTIONS
    limits.append((256, 1024))
    assert 512 < allowed_connections() < 1024
    assert limits[-1] == (1024, 1024)
    limits.append((2**20, 2**20))
    assert allowed_connections() == MAX_CONNECTIONS
    assert limits[-1] == (2**20, 2**20)
